// Rotation of the last values of a vector in interleaved pairs; no torch.
//
// (u, v) -> (u cos - v sin, u sin + v cos), every product and sum rounded by itself.
#pragma once

#include "row_lanes.h"

namespace deepinfer {

constexpr int64_t kMaxRotated = 1024;

// The cosine and the signed sine that every single value of a rotated tail is multiplied with.
class Rotation {
 public:
  // cos_sin: `size` floats, the cosines of the pairs, then their sines. size is even, at most kMaxRotated.
  Rotation(const float* cos_sin, int64_t size, bool inverse) : size_(size) {
    for (int64_t pair = 0; pair < size / 2; ++pair) {
      float sin = inverse ? -cos_sin[size / 2 + pair] : cos_sin[size / 2 + pair];
      cos_[2 * pair] = cos_[2 * pair + 1] = cos_sin[pair];
      sin_[2 * pair] = -sin;
      sin_[2 * pair + 1] = sin;
    }
  }

  // Rotates `size` values; x and y may be the same.
  template <class T>
  void apply(const T* x, T* y) const {
    for (int64_t i = 0; i < size_; i += kLanes) {
      int64_t count = size_ - i;
      Lanes value = load_row(x + i, count);
      Lanes turned = value * load_row(cos_ + i, count) + swap_pairs(value) * load_row(sin_ + i, count);
      store_row(turned, y + i, count);
    }
  }

 private:
  int64_t size_;
  float cos_[kMaxRotated], sin_[kMaxRotated];
};

// x [rows, heads, size] -> y likewise; the last `rotated` values turn by line positions[row] of table
// [., rotated], by line 0 where the position is negative
template <class T>
void rope(const T* x, const float* table, const int64_t* positions, bool inverse, int64_t rows, int64_t heads,
          int64_t size, int64_t rotated, T* y);

}  // namespace deepinfer
