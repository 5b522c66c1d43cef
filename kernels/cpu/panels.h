// Weights as panels of sixteen outputs, inputs ascending: the packed layouts of kernels/packing.py, and plain
// matrices turned into panels block by block.
//
// Every form yields the same numbers. Those of FP8 are 2^-8 of the code's value, those of FP4 the value; what
// a group of 32 inputs is multiplied by comes apart, as one factor per output (`factors`).
#pragma once

#include <algorithm>
#include <cstdint>

#include "gemm.h"
#include "simd.h"

namespace deepinfer {

inline Lanes join(__m256 low, __m256 high) {
#ifdef __AVX512F__
  return {_mm512_castpd_ps(_mm512_insertf64x4(_mm512_castps_pd(_mm512_castps256_ps512(low)),
                                              _mm256_castps_pd(high), 1))};
#else
  return {low, high};
#endif
}

// 2^(byte - 127) of sixteen bytes; 255 is NaN.
inline Lanes powers(const uint8_t* bytes) {
  __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
  __m128i none = _mm_setzero_si128(), all = _mm_set1_epi8(-1);
  __m128i special = _mm_or_si128(_mm_cmpeq_epi8(b, none), _mm_cmpeq_epi8(b, all));
  auto half = [](__m128i eight, __m128i is_special) {
    // 2^-127 is subnormal, NaN needs a mantissa: the same bit, beside the exponent
    __m256i bit = _mm256_and_si256(_mm256_cvtepi8_epi32(is_special), _mm256_set1_epi32(0x00400000));
    return _mm256_castsi256_ps(_mm256_or_si256(_mm256_slli_epi32(_mm256_cvtepu8_epi32(eight), 23), bit));
  };
  return join(half(b, special), half(_mm_srli_si128(b, 8), _mm_srli_si128(special, 8)));
}

template <_mm_hint kHint>
inline void prefetch(const uint8_t* p) {
  _mm_prefetch(reinterpret_cast<const char*>(p), kHint);
}

// Codecs: kStep inputs of a packed panel, kBytes each, lie together; read(p, part, w) decodes kPart of them.
// kAhead: how many bytes ahead memory is asked for; 0 leaves it to the processor.

struct FloatCodec {
#ifdef __AVX512F__
  static constexpr int kAhead = 4096;
#else
  static constexpr int kAhead = 0;
#endif
  static constexpr int kStep = 1, kPart = 1, kBytes = 64;
  static void read(const uint8_t* p, int, Lanes* w) { w[0] = Lanes::load(reinterpret_cast<const float*>(p)); }
};

struct Bf16Codec {
  static constexpr int kStep = 2, kPart = 2, kBytes = 32, kAhead = 1024;
  static void read(const uint8_t* p, int, Lanes* w) {
    __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32));
    __m256i mask = _mm256_set1_epi32(int32_t(0xFFFF0000));
    auto floats = [](__m256i v) { return _mm256_castsi256_ps(v); };
    w[0] = join(floats(_mm256_slli_epi32(low, 16)), floats(_mm256_slli_epi32(high, 16)));
    w[1] = join(floats(_mm256_and_si256(low, mask)), floats(_mm256_and_si256(high, mask)));
  }
};

struct Fp8Codec {
  static constexpr int kStep = 2, kPart = 2, kBytes = 16, kAhead = 1024;
  // The bits of E4M3, moved into a half, read as 2^-8 of the value, subnormals included.
  static void read(const uint8_t* p, int, Lanes* w) {
    __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    __m256i mask = _mm256_set1_epi16(int16_t(0xBF80));
    w[0] = Lanes::from_half(_mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(pairs, 8), 1), mask));
    w[1] = Lanes::from_half(_mm256_and_si256(_mm256_srai_epi16(pairs, 1), mask));
  }
};

struct Fp4Codec {
  static constexpr int kStep = 4, kBytes = 8, kAhead = 1024;
#ifdef __AVX512F__
  static constexpr int kPart = 4;
  // One lookup per value: only the lowest four bits of a lane choose.
  static void read(const uint8_t* p, int, Lanes* w) {
    __m512 table = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f,
                                  -2.0f, -3.0f, -4.0f, -6.0f);
    // lane -> its 16 bits, which hold four inputs of one output
    __m512i places = _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15);
    __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    __m512i codes = _mm512_permutexvar_epi16(places, _mm512_castsi256_si512(bytes));
    w[0] = {_mm512_permutexvar_ps(codes, table)};
    w[1] = {_mm512_permutexvar_ps(_mm512_srli_epi32(codes, 8), table)};
    w[2] = {_mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4), table)};
    w[3] = {_mm512_permutexvar_ps(_mm512_srli_epi32(codes, 12), table)};
  }
#else
  static constexpr int kPart = 2;
  // The upper half of a float holds every E2M1 value; its two bytes come from two tables.
  static void read(const uint8_t* p, int part, Lanes* w) {
    __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    if (part) bytes = _mm256_srli_epi16(bytes, 4);
    __m256i codes = _mm256_and_si256(bytes, _mm256_set1_epi8(15));
    __m256i upper = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 0x3F, 0x3F, 0x3F, 0x40, 0x40, 0x40, 0x40, int8_t(0x80), int8_t(0xBF), int8_t(0xBF),
                      int8_t(0xBF), int8_t(0xC0), int8_t(0xC0), int8_t(0xC0), int8_t(0xC0)));
    __m256i lower = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 0, int8_t(0x80), int8_t(0xC0), 0, 0x40, int8_t(0x80), int8_t(0xC0), 0, 0,
                      int8_t(0x80), int8_t(0xC0), 0, 0x40, int8_t(0x80), int8_t(0xC0)));
    __m256i high = _mm256_shuffle_epi8(upper, codes), low = _mm256_shuffle_epi8(lower, codes);
    __m256i first = _mm256_unpacklo_epi8(low, high), last = _mm256_unpackhi_epi8(low, high);
    __m256i mask = _mm256_set1_epi32(int32_t(0xFFFF0000));
    auto floats = [](__m256i v) { return _mm256_castsi256_ps(v); };
    w[0] = join(floats(_mm256_slli_epi32(first, 16)), floats(_mm256_slli_epi32(last, 16)));
    w[1] = join(floats(_mm256_and_si256(first, mask)), floats(_mm256_and_si256(last, mask)));
  }
#endif
};

// A block of a panel: values [count][16], and factors [count / 32][16] if the format has scales.
struct Block {
  const float *values, *factors;
};

// Matrices. kUnit: the values are this much too small (0: there are no factors). block(panel, begin, count,
// values, factors) gives inputs begin .. begin + count of a panel, in these buffers or where they are.

template <class Format>
struct PackedMatrix {
  using Codec = Format;
  static constexpr bool kPacked = true;
  static constexpr float kUnit = std::is_same_v<Codec, Fp8Codec> ? 256.0f : std::is_same_v<Codec, Fp4Codec>;
  const uint8_t *data, *scale;
  int64_t outputs, inputs;

  const uint8_t* panel(int64_t index) const { return data + index * inputs * Codec::kBytes; }
  const uint8_t* panel_scale(int64_t index) const { return scale + index * (inputs / kFp8Group) * kPanel; }

  Block block(int64_t index, int64_t begin, int64_t count, float* values, float* factors) const {
    const uint8_t* p = panel(index) + begin * Codec::kBytes;
    if constexpr (std::is_same_v<Codec, FloatCodec>) return {reinterpret_cast<const float*>(p), nullptr};
    for (int64_t k = 0; k < count; k += Codec::kStep) {
      for (int part = 0; part * Codec::kPart < Codec::kStep; ++part) {
        Lanes w[Codec::kPart];
        Codec::read(p + k * Codec::kBytes, part, w);
        for (int s = 0; s < Codec::kPart; ++s) w[s].store(values + (k + part * Codec::kPart + s) * kPanel);
      }
    }
    if constexpr (kUnit != 0) {
      const uint8_t* bytes = panel_scale(index) + begin / kFp8Group * kPanel;
      for (int64_t g = 0; g < count / kFp8Group; ++g) {
        powers(bytes + g * kPanel).store(factors + g * kPanel);
      }
    }
    return {values, factors};
  }
};

inline void transpose8(__m256 (&v)[8]) {
  __m256 t[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(v[i], v[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(v[i], v[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    v[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    v[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xEE);
    v[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    v[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xEE);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm256_permute2f128_ps(v[i], v[i + 4], 0x20);
    t[i + 4] = _mm256_permute2f128_ps(v[i], v[i + 4], 0x31);
  }
  for (int i = 0; i < 8; ++i) v[i] = t[i];
}

// Rows of plain formats: eight(row, k) decodes eight inputs, one(row, k) a single one.

struct FloatRows {
  static constexpr float kUnit = 0;
  const float* data;
  int64_t outputs, inputs;
  __m256 eight(int64_t n, int64_t k) const { return _mm256_loadu_ps(data + n * inputs + k); }
  float one(int64_t n, int64_t k) const { return data[n * inputs + k]; }
};

struct Bf16Rows {
  static constexpr float kUnit = 0;
  const bf16* data;
  int64_t outputs, inputs;
  __m256 eight(int64_t n, int64_t k) const {
    __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(data + n * inputs + k));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  float one(int64_t n, int64_t k) const { return to_float(data[n * inputs + k]); }
};

struct Fp8Rows {
  static constexpr float kUnit = 256.0f;
  const uint8_t *data, *scale;  // one scale per 32 x 32 tile
  int64_t outputs, inputs;
  __m256 eight(int64_t n, int64_t k) const {
    __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(data + n * inputs + k));
    __m128i shifted = _mm_slli_epi16(_mm_cvtepi8_epi16(codes), 7);
    return _mm256_cvtph_ps(_mm_and_si128(shifted, _mm_set1_epi16(int16_t(0xBF80))));
  }
  float one(int64_t n, int64_t k) const {
    return _cvtsh_ss(uint16_t((int8_t(data[n * inputs + k]) * 128) & 0xBF80));
  }
  // A NaN code makes the whole group of its output NaN: that is what it does to every sum it enters.
  uint8_t scale_byte(int64_t n, int64_t group) const {
    const uint8_t* codes = data + n * inputs + group * kFp8Group;
    int64_t count = std::min(kFp8Group, inputs - group * kFp8Group);
    bool has_nan = false;
    for (int64_t i = 0; i < count; ++i) has_nan |= (codes[i] & 0x7F) == kE4M3NaN;
    int64_t groups = (inputs + kFp8Group - 1) / kFp8Group;
    return has_nan ? kE8M0NaN : scale[n / kFp8Group * groups + group];
  }
};

struct Fp4Rows {
  static constexpr float kUnit = 1.0f;
  const uint8_t *data, *scale;
  int64_t outputs, inputs;  // inputs are a multiple of 32
  __m256 eight(int64_t n, int64_t k) const {
    uint32_t four;
    std::memcpy(&four, data + (n * inputs + k) / 2, sizeof four);
    __m128i bytes = _mm_cvtsi32_si128(int32_t(four));
    __m128i codes = _mm_unpacklo_epi8(bytes, _mm_srli_epi16(bytes, 4));
    // Twice the value fits a byte. Minus zero becomes zero, which no sum that starts at +0 can tell.
    __m128i doubled = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    __m128i values = _mm_shuffle_epi8(doubled, _mm_and_si128(codes, _mm_set1_epi8(15)));
    return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(values)), _mm256_set1_ps(0.5f));
  }
  float one(int64_t, int64_t) const { return 0.0f; }  // never needed
  uint8_t scale_byte(int64_t n, int64_t group) const { return scale[n * (inputs / kFp8Group) + group]; }
};

template <class Rows>
struct PlainMatrix : Rows {
  static constexpr bool kPacked = false;

  Block block(int64_t index, int64_t begin, int64_t count, float* values, float* factors) const {
    int64_t first = index * kPanel, height = std::min(kPanel, this->outputs - first);
    for (int64_t half = 0; half < kPanel; half += 8) {
      int64_t k = 0;
      for (; k + 8 <= count; k += 8) {
        __m256 v[8];
        for (int64_t i = 0; i < 8; ++i) {
          v[i] = half + i < height ? this->eight(first + half + i, begin + k) : _mm256_setzero_ps();
        }
        transpose8(v);
        for (int64_t i = 0; i < 8; ++i) _mm256_store_ps(values + (k + i) * kPanel + half, v[i]);
      }
      for (; k < count; ++k) {
        for (int64_t i = half; i < half + 8; ++i) {
          values[k * kPanel + i] = i < height ? this->one(first + i, begin + k) : 0.0f;
        }
      }
    }
    if constexpr (Rows::kUnit != 0) {
      for (int64_t g = 0; g * kFp8Group < count; ++g) {
        uint8_t bytes[kPanel] = {};
        for (int64_t i = 0; i < height; ++i) bytes[i] = this->scale_byte(first + i, begin / kFp8Group + g);
        powers(bytes).store(factors + g * kPanel);
      }
    }
    return {values, factors};
  }
};

}  // namespace deepinfer
