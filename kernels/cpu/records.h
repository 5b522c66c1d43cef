// Cache records back to float32: whole vectors of FP8 (spec 12.2) and FP4 with E4M3 scales (spec 12.3).
//
// The exact values of `dequantize_fp8` and `dequantize_fp4`, except that a minus zero of FP4 becomes zero.
#pragma once

#include <array>

#include "formats.h"
#include "simd.h"

namespace deepinfer {

constexpr int64_t kFp4Group = 16;  // with E4M3 scales

inline int64_t fp8_record_bytes(int64_t width) { return width + width / kFp8Group; }
inline int64_t fp4_record_bytes(int64_t width) { return width / 2 + width / kFp4Group; }

// Sixteen signed bytes as floats.
inline Lanes lanes_of_bytes(__m128i bytes) {
#ifdef __AVX512F__
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
#else
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
#endif
}

// 32 E4M3 codes and their scale byte.
inline void decode_fp8_group(const uint8_t* codes, uint8_t scale, float* out) {
  __m256i all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
  __m256i magnitude = _mm256_set1_epi8(0x7F);
  __m256i nan = _mm256_cmpeq_epi8(_mm256_and_si256(all, magnitude), magnitude);
  if (scale > 246 || _mm256_movemask_epi8(nan)) {
    for (int i = 0; i < kFp8Group; ++i) out[i] = e4m3_to_float(codes[i]) * e8m0_to_float(scale);
    return;
  }
  // The bits of E4M3, moved into a half, read as 2^-8 of the value (subnormals included).
  Lanes factor = Lanes::fill(float_of(uint32_t(scale + 8) << 23));
  auto halves = [](__m128i part) {
    __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(part), 7);
    return Lanes::from_half(_mm256_and_si256(shifted, _mm256_set1_epi16(int16_t(0xBF80))));
  };
  (halves(_mm256_castsi256_si128(all)) * factor).store(out);
  (halves(_mm256_extracti128_si256(all, 1)) * factor).store(out + kLanes);
}

// `width` is a multiple of 32.
inline void decode_fp8_record(const uint8_t* record, int64_t width, float* out) {
  for (int64_t i = 0; i < width; i += kFp8Group) {
    decode_fp8_group(record + i, record[width + i / kFp8Group], out + i);
  }
}

// Half of every E4M3 value: FP4 codes are looked up as twice their value.
inline const std::array<float, 256> kHalfOfE4M3 = [] {
  std::array<float, 256> values{};
  for (int code = 0; code < 256; ++code) values[size_t(code)] = e4m3_to_float(uint8_t(code)) * 0.5f;
  return values;
}();

// `width` is a multiple of 16.
inline void decode_fp4_record(const uint8_t* record, int64_t width, float* out) {
  const uint8_t* scales = record + width / 2;
  const __m128i doubled = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
  for (int64_t i = 0; i < width; i += kFp4Group) {
    __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(record + i / 2));
    __m128i low = _mm_and_si128(bytes, _mm_set1_epi8(15));
    __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), _mm_set1_epi8(15));
    __m128i values = _mm_shuffle_epi8(doubled, _mm_unpacklo_epi8(low, high));
    (lanes_of_bytes(values) * Lanes::fill(kHalfOfE4M3[scales[i / kFp4Group]])).store(out + i);
  }
}

}  // namespace deepinfer
