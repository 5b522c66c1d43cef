// One matrix product for every weight format: y[r][n] = sum_k W[n][k] * x[r][k], float32.
//
// Order of sums: lane l of 16 takes k = l, 16 + l, ... in ascending order by fused multiply-add from zero,
// then Lanes::sum. K is cut into chunks (accumulators are parked in memory between them), rows and columns
// into tiles; none of that changes the order, so a row's result depends on the row alone.
//
// Four columns of weights are decoded to float32 once per chunk and used for up to kRowBlock rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "formats.h"
#include "simd.h"

namespace deepinfer {

constexpr int64_t kColumns = 4;
constexpr int64_t kChunk = 512;
constexpr int64_t kRowBlock = 64;
#ifdef __AVX512F__
constexpr int kRowTile = 4;  // 16 accumulators of the 32 registers
#else
constexpr int kRowTile = 1;  // 4 accumulators of 2 registers each, of the 16 registers
#endif

inline int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Weight formats: decode(n, begin, count, out) writes W[n][begin .. begin + count) as float32. `begin` is a
// multiple of kChunk.

struct WeightFloat {
  const float* data;
  int64_t inputs;
  void decode(int64_t n, int64_t begin, int64_t count, float* out) const {
    std::memcpy(out, data + n * inputs + begin, size_t(count) * sizeof(float));
  }
};

struct WeightBf16 {
  const bf16* data;
  int64_t inputs;
  void decode(int64_t n, int64_t begin, int64_t count, float* out) const {
    const bf16* w = data + n * inputs + begin;
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      Lanes::load_bf16(reinterpret_cast<const uint16_t*>(w + i)).store(out + i);
    }
    for (; i < count; ++i) out[i] = to_float(w[i]);
  }
};

struct WeightFp8 {
  const uint8_t *data, *scale;  // scale row of column n starts at (n / 32) * scale_stride
  int64_t inputs, scale_stride;
  void decode(int64_t n, int64_t begin, int64_t count, float* out) const {
    const uint8_t* codes = data + n * inputs + begin;
    const uint8_t* scales = scale + n / kFp8Group * scale_stride + begin / kFp8Group;
    for (int64_t i = 0; i < count; i += kFp8Group) {
      decode_group(codes + i, scales[i / kFp8Group], std::min(kFp8Group, count - i), out + i);
    }
  }

  static void decode_group(const uint8_t* codes, uint8_t scale_byte, int64_t count, float* out) {
    if (count < kFp8Group || scale_byte > 246) return decode_slowly(codes, scale_byte, count, out);
    // The bits of E4M3, moved into a half, read as 2^-8 of the value (subnormals included).
    Lanes factor = Lanes::fill(float_of(uint32_t(scale_byte + 8) << 23));
    __m256i all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
    __m256i nan = _mm256_cmpeq_epi8(_mm256_and_si256(all, _mm256_set1_epi8(0x7F)), _mm256_set1_epi8(0x7F));
    if (_mm256_movemask_epi8(nan)) return decode_slowly(codes, scale_byte, count, out);
    (halves(_mm256_castsi256_si128(all)) * factor).store(out);
    (halves(_mm256_extracti128_si256(all, 1)) * factor).store(out + kLanes);
  }

  static Lanes halves(__m128i codes) {
    __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);
    return Lanes::from_half(_mm256_and_si256(shifted, _mm256_set1_epi16(int16_t(0xBF80))));
  }

  static void decode_slowly(const uint8_t* codes, uint8_t scale_byte, int64_t count, float* out) {
    float factor = e8m0_to_float(scale_byte);
    for (int64_t i = 0; i < count; ++i) out[i] = e4m3_to_float(codes[i]) * factor;
  }
};

struct WeightFp4 {
  const uint8_t *data, *scale;
  int64_t inputs;
  void decode(int64_t n, int64_t begin, int64_t count, float* out) const {
    const uint8_t* pairs = data + (n * inputs + begin) / 2;
    const uint8_t* scales = scale + (n * inputs + begin) / kFp8Group;
    for (int64_t i = 0; i < count; i += kFp8Group) {
      __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(pairs + i / 2));
      __m128i low = _mm_and_si128(bytes, _mm_set1_epi8(15));
      __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), _mm_set1_epi8(15));
      Lanes factor = Lanes::fill(e8m0_to_float(scales[i / kFp8Group]));
      (values(_mm_unpacklo_epi8(low, high)) * factor).store(out + i);
      (values(_mm_unpackhi_epi8(low, high)) * factor).store(out + i + kLanes);
    }
  }

  static Lanes values(__m128i codes) {
#ifdef __AVX512F__
    __m512 table = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f,
                                  -2.0f, -3.0f, -4.0f, -6.0f);
    return {_mm512_permutexvar_ps(_mm512_cvtepu8_epi32(codes), table)};
#else
    // Twice the value fits a byte. Minus zero becomes zero, which no sum that starts at +0 can tell.
    __m128i doubled = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    __m128i eight = _mm_shuffle_epi8(doubled, codes);
    Lanes wide = {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight)),
                  _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(eight, 8)))};
    return wide * Lanes::fill(0.5f);
#endif
  }
};

// Adds `count` inputs (a multiple of 16) of kRows rows and four columns to the parked accumulators.
template <int kRows>
inline void multiply_tile(const float* const* x, int64_t begin, const float* w, int64_t count,
                          float* parked) {
  Lanes acc[kRows][kColumns];
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kColumns; ++c) acc[r][c] = Lanes::load(parked + (r * kColumns + c) * kLanes);
  }
  for (int64_t k = 0; k < count; k += kLanes) {
    Lanes column[kColumns];
    for (int c = 0; c < kColumns; ++c) column[c] = Lanes::load(w + c * kChunk + k);
    for (int r = 0; r < kRows; ++r) {
      Lanes row = Lanes::load(x[r] + begin + k);
      for (int c = 0; c < kColumns; ++c) acc[r][c] = fma(row, column[c], acc[r][c]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kColumns; ++c) acc[r][c].store(parked + (r * kColumns + c) * kLanes);
  }
}

// y[r][n] for the columns first .. last of W. x[r] points to round_up(inputs, 16) floats, zero beyond inputs.
template <class Weight, class Out>
void multiply_columns(const Weight& weight, int64_t first, int64_t last, const float* const* x, Out* const* y,
                      int64_t rows) {
  alignas(64) float decoded[kColumns * kChunk];
  std::vector<float> parked(size_t(std::min(rows, kRowBlock) * kColumns * kLanes));
  for (int64_t row = 0; row < rows; row += kRowBlock) {
    int64_t block = std::min(kRowBlock, rows - row);
    for (int64_t n = first; n < last; n += kColumns) {
      int64_t columns = std::min(kColumns, last - n);
      std::fill(parked.begin(), parked.end(), 0.0f);
      for (int64_t begin = 0; begin < weight.inputs; begin += kChunk) {
        int64_t count = std::min(kChunk, weight.inputs - begin), padded = round_up(count, kLanes);
        for (int64_t c = 0; c < kColumns; ++c) {
          float* out = decoded + c * kChunk;
          if (c < columns) weight.decode(n + c, begin, count, out);
          std::fill(out + (c < columns ? count : 0), out + padded, 0.0f);
        }
        int64_t r = 0;
        float* sums = parked.data();
        for (; r + kRowTile <= block; r += kRowTile) {
          multiply_tile<kRowTile>(x + row + r, begin, decoded, padded, sums + r * kColumns * kLanes);
        }
        for (; r < block; ++r) {
          multiply_tile<1>(x + row + r, begin, decoded, padded, sums + r * kColumns * kLanes);
        }
      }
      for (int64_t r = 0; r < block; ++r) {
        for (int64_t c = 0; c < columns; ++c) {
          round_to(Lanes::load(parked.data() + (r * kColumns + c) * kLanes).sum(), y[row + r][n + c]);
        }
      }
    }
  }
}

}  // namespace deepinfer
