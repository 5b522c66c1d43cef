// Vectors of activations as float32, through the FP8 quantiser where asked.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <memory>

#include "kernels.h"

namespace deepinfer {

inline __m256 load8(const float* x) { return _mm256_loadu_ps(x); }
inline __m256 load8(const bf16* x) {
  __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

// e4m3_to_float(float_to_e4m3(value)) of eight values, without the codes in between.
inline __m256 round_to_e4m3(__m256 value) {
  auto constant = [](uint32_t bits) { return _mm256_set1_epi32(int32_t(bits)); };
  __m256i bits = _mm256_castps_si256(value), magnitude = _mm256_and_si256(bits, constant(0x7FFFFFFF));
  __m256i clamped = _mm256_min_epi32(magnitude, constant(0x43E00000));
  // below 2^-6 steps of 2^-9
  __m256 big = _mm256_set1_ps(0x1p14f);
  __m256 small = _mm256_sub_ps(_mm256_add_ps(_mm256_castsi256_ps(clamped), big), big);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(clamped, 20), constant(1));
  __m256i large = _mm256_add_epi32(_mm256_add_epi32(clamped, constant(0x7FFFF)), odd);
  large = _mm256_and_si256(large, constant(0xFFF00000));
  __m256i is_large = _mm256_cmpgt_epi32(clamped, constant(0x3C7FFFFF));
  __m256i rounded = _mm256_blendv_epi8(_mm256_castps_si256(small), large, is_large);
  rounded = _mm256_or_si256(rounded, _mm256_and_si256(bits, constant(0x80000000)));
  __m256i is_nan = _mm256_cmpgt_epi32(magnitude, constant(0x7F800000));
  return _mm256_castsi256_ps(_mm256_blendv_epi8(rounded, constant(0x7FC00000), is_nan));
}

// Scale byte of `group` values for the FP8 quantiser; a multiple of 32.
template <class T>
inline uint8_t fp8_scale_of(const T* x, int64_t group) {
  __m256i most = _mm256_setzero_si256(), infinity = _mm256_set1_epi32(0x7F800000);
  for (int64_t i = 0; i < group; i += 8) {
    __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(load8(x + i)), _mm256_set1_epi32(0x7FFFFFFF));
    most = _mm256_max_epi32(most, _mm256_andnot_si256(_mm256_cmpgt_epi32(magnitude, infinity), magnitude));
  }
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4E));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xB1));
  float amax = std::min(float_of(uint32_t(_mm_cvtsi128_si32(four))), kFloat32Max);
  return float_to_e8m0_ceil(std::max(amax, 1e-4f) * (1.0f / 448.0f));
}

// A group of values through the FP8 quantiser and back.
template <class T>
inline void round_to_fp8(const T* x, int64_t group, float* out) {
  uint8_t byte = fp8_scale_of(x, group);
  __m256 scale = _mm256_set1_ps(e8m0_to_float(byte));
  __m256 inverse = _mm256_set1_ps(e8m0_to_float(uint8_t(254 - byte)));
  for (int64_t i = 0; i < group; i += 8) {
    __m256 rounded = round_to_e4m3(_mm256_mul_ps(load8(x + i), inverse));
    _mm256_storeu_ps(out + i, _mm256_mul_ps(rounded, scale));
  }
}

class Activations {
 public:
  // x [vectors, inputs] must outlive this: floats that need no rounding stay where they are. `group` values
  // share a scale of the quantiser; 0: none.
  template <class T>
  Activations(const T* x, int64_t vectors, int64_t inputs, int64_t group) : inputs_(inputs) {
    if constexpr (std::is_same_v<T, float>) {
      if (group == 0) {
        base_ = x;
        return;
      }
    }
    data_.reset(new float[size_t(vectors * inputs) + 1]);
    base_ = data_.get();
    parallel_for(vectors, (1 << 15) / (inputs + 1) + 1, [=, this](int64_t begin, int64_t end) {
      const T* in = x + begin * inputs;
      float* out = data_.get() + begin * inputs;
      int64_t count = (end - begin) * inputs;
      if (group > 0) {
        for (int64_t k = 0; k < count; k += group) round_to_fp8(in + k, group, out + k);
      } else {
        for (int64_t k = 0; k < count; ++k) out[k] = to_float(in[k]);
      }
    });
  }

  const float* vector(int64_t index) const { return base_ + index * inputs_; }

 private:
  int64_t inputs_;
  const float* base_;
  std::unique_ptr<float[]> data_;
};

}  // namespace deepinfer
