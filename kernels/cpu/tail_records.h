// Records whose tail stays bf16 (kernels/quantize_tail.py) and the rotation of kernels/hadamard.py.
#pragma once

#include <algorithm>
#include <cmath>

#include "formats.h"

namespace deepinfer {

constexpr int64_t kTailGroup = 64;

inline int64_t tail_scales(int64_t size, int64_t tail) { return (size - tail + kTailGroup - 1) / kTailGroup; }
inline int64_t tail_record_bytes(int64_t size, int64_t tail) {
  return size + tail + (tail_scales(size, tail) + 7) / 8 * 8;
}

template <class T>
void encode_tail_record(const T* x, int64_t size, int64_t tail, uint8_t* out) {
  int64_t coded = size - tail;
  uint8_t* scales = out + coded + 2 * tail;
  std::fill(scales, out + tail_record_bytes(size, tail), uint8_t(0));
  for (int64_t begin = 0; begin < coded; begin += kTailGroup) {
    int64_t end = std::min(coded, begin + kTailGroup);
    float amax = 1e-4f;
    for (int64_t i = begin; i < end; ++i) amax = std::max(amax, group_amax<1>(x + i, 0.0f));
    uint8_t byte = float_to_e8m0_ceil(amax * (1.0f / 448.0f));
    float inverse = e8m0_to_float(uint8_t(254 - byte));
    for (int64_t i = begin; i < end; ++i) out[i] = float_to_e4m3(to_float(x[i]) * inverse);
    *scales++ = byte;
  }
  for (int64_t i = 0; i < tail; ++i) {
    bf16 value;
    round_to(to_float(x[coded + i]), value);
    std::memcpy(out + coded + 2 * i, &value, sizeof value);
  }
}

inline void decode_tail_record(const uint8_t* record, int64_t size, int64_t tail, float* out) {
  int64_t coded = size - tail;
  const uint8_t* scales = record + coded + 2 * tail;
  for (int64_t i = 0; i < coded; ++i) {
    out[i] = e4m3_to_float(record[i]) * e8m0_to_float(scales[i / kTailGroup]);
  }
  for (int64_t i = 0; i < tail; ++i) {
    bf16 value;
    std::memcpy(&value, record + coded + 2 * i, sizeof value);
    out[coded + i] = to_float(value);
  }
}

// `size` is a power of two; `y` holds as many floats. x and out may be the same row.
template <class T>
void hadamard_row(const T* x, int64_t size, float* y, T* out) {
  for (int64_t i = 0; i < size; ++i) y[i] = to_float(x[i]);
  for (int64_t distance = 1; distance < size; distance *= 2) {
    for (int64_t block = 0; block < size; block += 2 * distance) {
      for (int64_t i = block; i < block + distance; ++i) {
        float first = y[i], second = y[i + distance];
        y[i] = first + second;
        y[i + distance] = first - second;
      }
    }
  }
  float factor = float(std::pow(double(size), -0.5));
  for (int64_t i = 0; i < size; ++i) round_to(y[i] * factor, out[i]);
}

}  // namespace deepinfer
