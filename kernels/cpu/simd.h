// Sixteen float lanes, as one AVX-512 register or two AVX2 registers.
//
// Both give the same bits: every operation is lane by lane, `fma` rounds once, and `sum` halves the lanes
// 8 + 8, 4 + 4, 2 + 2, 1 + 1 on either level. The compiler may not contract products and sums by itself
// (-ffp-contract=off), so what is fused is what says `fma`.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace deepinfer {

constexpr int kLanes = 16;

inline float sum8(__m256 v) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

#ifdef __AVX512F__

struct Lanes {
  __m512 v;
  static Lanes zero() { return {_mm512_setzero_ps()}; }
  static Lanes load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Lanes fill(float value) { return {_mm512_set1_ps(value)}; }
  // Sixteen bf16 values.
  static Lanes load_bf16(const uint16_t* p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
  }
  // Sixteen IEEE half values.
  static Lanes from_half(__m256i halves) { return {_mm512_cvtph_ps(halves)}; }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  float sum() const {
    __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1));
    return sum8(_mm256_add_ps(_mm512_castps512_ps256(v), high));
  }
};

inline Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Lanes operator*(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Lanes operator+(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }

#else

struct Lanes {
  __m256 low, high;
  static Lanes zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static Lanes load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static Lanes fill(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
  static Lanes load_bf16(const uint16_t* p) {
    auto half = [](const uint16_t* q) {
      __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q)));
      return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
    };
    return {half(p), half(p + 8)};
  }
  static Lanes from_half(__m256i halves) {
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
            _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
  }
  void store(float* p) const {
    _mm256_storeu_ps(p, low);
    _mm256_storeu_ps(p + 8, high);
  }
  float sum() const { return sum8(_mm256_add_ps(low, high)); }
};

inline Lanes fma(Lanes a, Lanes b, Lanes c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Lanes operator*(Lanes a, Lanes b) {
  return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
inline Lanes operator+(Lanes a, Lanes b) {
  return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}

#endif

}  // namespace deepinfer
