// Sum of squares of one row, float32: lane l of 16 adds x[l]^2, x[16 + l]^2, ... in ascending order, product
// and sum rounded apart; then Lanes::sum. A short last step counts as zeros.
#pragma once

#include "formats.h"
#include "simd.h"

namespace deepinfer {

inline Lanes load_lanes(const float* x) { return Lanes::load(x); }
inline Lanes load_lanes(const bf16* x) { return Lanes::load_bf16(reinterpret_cast<const uint16_t*>(x)); }

template <class T>
inline float sum_of_squares(const T* x, int64_t size) {
  Lanes sum = Lanes::zero();
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    Lanes value = load_lanes(x + i);
    sum = sum + value * value;
  }
  if (i < size) {
    float rest[kLanes] = {};
    for (int64_t j = i; j < size; ++j) rest[j - i] = to_float(x[j]);
    Lanes value = Lanes::load(rest);
    sum = sum + value * value;
  }
  return sum.sum();
}

}  // namespace deepinfer
