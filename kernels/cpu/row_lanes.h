// Reading and writing rows of bf16 or float sixteen values at a time, with tails in the same lanes, and the
// RMSNorm of a row.
#pragma once

#include "formats.h"
#include "simd.h"
#include "sum_of_squares.h"
#include "vector_math.h"

namespace deepinfer {

// The first `count` of sixteen values, the rest zero.
inline Lanes load_row(const float* p, int64_t count) { return load_part(p, count); }
inline Lanes load_row(const bf16* p, int64_t count) {
  if (count >= kLanes) return load_lanes(p);
  bf16 buffer[kLanes] = {};
  std::memcpy(buffer, p, size_t(count) * sizeof(bf16));
  return load_lanes(buffer);
}

// Sixteen values rounded as `round_to` does.
inline void store_sixteen(Lanes value, bf16* p) {
#ifdef __AVX512F__
  __m512i bits = _mm512_castps_si512(value.v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded =
      _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd), 16);
  __mmask16 nan = _mm512_cmp_ps_mask(value.v, value.v, _CMP_UNORD_Q);
  rounded = _mm512_mask_blend_epi32(nan, rounded, _mm512_set1_epi32(0x7FC0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
#else
  auto half = [](__m256 v) {
    __m256i bits = _mm256_castps_si256(v);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded =
        _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd), 16);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC0), nan);
  };
  __m256i both = _mm256_packus_epi32(half(value.low), half(value.high));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(both, 0xD8));
#endif
}

inline void store_row(Lanes value, float* p, int64_t count) { store_part(value, p, count); }
inline void store_row(Lanes value, bf16* p, int64_t count) {
  if (count >= kLanes) return store_sixteen(value, p);
  bf16 buffer[kLanes];
  store_sixteen(value, buffer);
  std::memcpy(p, buffer, size_t(count) * sizeof(bf16));
}

// Values 2i and 2i + 1 change places.
inline Lanes swap_pairs(Lanes a) {
#ifdef __AVX512F__
  return {_mm512_permute_ps(a.v, 0xB1)};
#else
  return {_mm256_permute_ps(a.low, 0xB1), _mm256_permute_ps(a.high, 0xB1)};
#endif
}

// y = weight * (x * (1 / sqrt(mean of squares + eps))); x and y may be the same row.
template <class T, class W>
inline void rms_norm_row(const T* x, const W* weight, float eps, int64_t size, T* y) {
  Lanes scale = Lanes::fill(1.0f / std::sqrt(sum_of_squares(x, size) / float(size) + eps));
  for (int64_t i = 0; i < size; i += kLanes) {
    store_row(load_row(weight + i, size - i) * (load_row(x + i, size - i) * scale), y + i, size - i);
  }
}

}  // namespace deepinfer
