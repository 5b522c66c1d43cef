// The n-gram memory: hashing, lookup and gate; no torch.
//
// T is bf16 or float. Arrays are dense and row-major unless strides are given. Indices are in range.
#pragma once

#include <cstdint>

#include "formats.h"

namespace deepinfer {

// Where the ids of earlier tokens stand: [slots, length, 1] with strides in elements.
struct TokenHistory {
  const void* data;
  bool is_int64;  // else int32
  int64_t length, slot_stride, entry_stride;
  int64_t token(int64_t slot, int64_t position) const {
    int64_t index = slot * slot_stride + position % length * entry_stride;
    return is_int64 ? static_cast<const int64_t*>(data)[index] : static_cast<const int32_t*>(data)[index];
  }
};

struct HashTables {
  const int64_t *token_map, *multipliers, *primes, *offsets;
  int64_t map_size, ngram, columns, pad;  // pad is a compressed id
};

struct TokenRows {
  const int64_t *token_ids, *positions, *request_index, *slot_ids, *num_computed_tokens;
};

// -> ids [rows, columns]; zeros where the position is negative
void engram_ids(const TokenRows& rows, const TokenHistory& history, const HashTables& tables, int64_t count,
                int64_t* ids);

// embed: records of `size` E4M3 codes and size / 32 scales; ids [rows, columns] -> y [rows, columns, size]
template <class T>
void engram_gather(const uint8_t* embed, const int64_t* ids, int64_t rows, int64_t columns, int64_t size,
                   T* y);

// residual [rows, n, D], key_and_value [rows, (n + 1) D], qk_weight [n, D] -> y [rows, n, D]
template <class T>
void engram_gate(const T* residual, const T* key_and_value, const float* qk_weight, float eps, int64_t rows,
                 int64_t streams, int64_t width, T* y);

}  // namespace deepinfer
