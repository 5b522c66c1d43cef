#include "engram.h"

#include <algorithm>

#include "kernels.h"
#include "row_lanes.h"

namespace deepinfer {

namespace {

constexpr int64_t kPrefetchRecords = 8;  // a record's lines are asked for this many records ahead
constexpr int64_t kCacheLine = 64;

// The remainder with the sign of the divisor, which is positive.
int64_t modulo(int64_t value, int64_t divisor) {
  int64_t rest = value % divisor;
  return rest < 0 ? rest + divisor : rest;
}

void hash_row(const TokenRows& rows, const TokenHistory& history, const HashTables& tables, int64_t row,
              int64_t* ids) {
  int64_t position = rows.positions[row], line = rows.request_index[row];
  int64_t slot = rows.slot_ids[line], first = rows.num_computed_tokens[line];
  int64_t heads = tables.columns / (tables.ngram - 1), column = 0;
  uint64_t hash = 0;  // products wrap around, as those of int64 tensors do
  for (int64_t back = 0; back < tables.ngram; ++back) {
    int64_t at = position - back, compressed = tables.pad;
    if (at >= 0) {
      int64_t token = at >= first ? rows.token_ids[row - back] : history.token(slot, at);
      token = token < 0 ? 0 : (token < tables.map_size ? token : tables.map_size - 1);
      compressed = tables.token_map[token];
    }
    hash ^= uint64_t(compressed) * uint64_t(tables.multipliers[back]);
    if (back == 0) continue;
    for (int64_t head = 0; head < heads; ++head, ++column) {
      ids[column] = modulo(int64_t(hash), tables.primes[column]) + tables.offsets[column];
    }
  }
}

// 32 E4M3 codes times their scale.
template <class T>
void decode_group(const uint8_t* codes, uint8_t scale, T* y) {
  __m256i all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
  __m256i low_bits = _mm256_set1_epi8(0x7F);
  __m256i nan = _mm256_cmpeq_epi8(_mm256_and_si256(all, low_bits), low_bits);
  // The bits of E4M3, moved into a half, read as 2^-8 of the value (subnormals included).
  if (scale > 246 || _mm256_movemask_epi8(nan)) {
    for (int i = 0; i < kFp8Group; ++i) round_to(e4m3_to_float(codes[i]) * e8m0_to_float(scale), y[i]);
    return;
  }
  Lanes factor = Lanes::fill(float_of(uint32_t(scale + 8) << 23));
  auto halves = [](__m128i bytes) {
    __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
    return Lanes::from_half(_mm256_and_si256(shifted, _mm256_set1_epi16(int16_t(0xBF80))));
  };
  store_row(halves(_mm256_castsi256_si128(all)) * factor, y, kLanes);
  store_row(halves(_mm256_extracti128_si256(all, 1)) * factor, y + kLanes, kLanes);
}

// One stream of one row: adds gate * value to the stream.
template <class T>
void gate_stream(const T* stream, const T* key, const T* value, const float* weight, float eps, int64_t width,
                 T* y) {
  Lanes dots = Lanes::zero(), squares = Lanes::zero(), key_squares = Lanes::zero();
  for (int64_t d = 0; d < width; d += kLanes) {
    Lanes r = load_row(stream + d, width - d), k = load_row(key + d, width - d);
    dots = dots + r * load_row(weight + d, width - d) * k;
    squares = squares + r * r;
    key_squares = key_squares + k * k;
  }
  auto inverse_rms = [&](Lanes sums) { return 1.0f / std::sqrt(sums.sum() / float(width) + eps); };
  float dot = dots.sum() * inverse_rms(squares) * inverse_rms(key_squares);
  dot = dot * float(std::pow(double(width), -0.5));
  float magnitude = std::fabs(dot);
  magnitude = magnitude < 1e-6f ? 1e-6f : magnitude;  // a NaN stays
  Lanes gate = Lanes::fill(sigmoid_one(std::copysign(std::sqrt(magnitude), dot)));
  for (int64_t d = 0; d < width; d += kLanes) {
    store_row(load_row(stream + d, width - d) + gate * load_row(value + d, width - d), y + d, width - d);
  }
}

}  // namespace

void engram_ids(const TokenRows& rows, const TokenHistory& history, const HashTables& tables, int64_t count,
                int64_t* ids) {
  parallel_for(count, 64, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      int64_t* out = ids + row * tables.columns;
      if (rows.positions[row] < 0) {
        std::fill_n(out, tables.columns, int64_t(0));
      } else {
        hash_row(rows, history, tables, row, out);
      }
    }
  });
}

template <class T>
void engram_gather(const uint8_t* embed, const int64_t* ids, int64_t rows, int64_t columns, int64_t size,
                   T* y) {
  int64_t groups = size / kFp8Group, bytes = size + groups;
  parallel_for(rows * columns, (1 << 16) / (size + 1) + 1, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (i + kPrefetchRecords < end) {
        const uint8_t* next = embed + ids[i + kPrefetchRecords] * bytes;
        for (int64_t b = 0; b < bytes; b += kCacheLine) __builtin_prefetch(next + b);
      }
      const uint8_t* record = embed + ids[i] * bytes;
      for (int64_t g = 0; g < groups; ++g) {
        decode_group(record + g * kFp8Group, record[size + g], y + i * size + g * kFp8Group);
      }
    }
  });
}

template <class T>
void engram_gate(const T* residual, const T* key_and_value, const float* qk_weight, float eps, int64_t rows,
                 int64_t streams, int64_t width, T* y) {
  parallel_for(rows * streams, (1 << 15) / (width + 1) + 1, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      int64_t row = i / streams, stream = i % streams;
      const T* pair = key_and_value + row * (streams + 1) * width;
      gate_stream(residual + i * width, pair + stream * width, pair + streams * width,
                  qk_weight + stream * width, eps, width, y + i * width);
    }
  });
}

template void engram_gather(const uint8_t*, const int64_t*, int64_t, int64_t, int64_t, bf16*);
template void engram_gather(const uint8_t*, const int64_t*, int64_t, int64_t, int64_t, float*);
template void engram_gate(const bf16*, const bf16*, const float*, float, int64_t, int64_t, int64_t, bf16*);
template void engram_gate(const float*, const float*, const float*, float, int64_t, int64_t, int64_t, float*);

}  // namespace deepinfer
