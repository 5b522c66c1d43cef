// Window records and attention over window and picked entries, on raw pointers (no torch).
//
// Everything here trusts its indices: `ops_attention.cpp` has checked them.
#pragma once

#include <cstdint>

#include "formats.h"

namespace deepinfer {

// Records of equal size in a region `[blocks or slots, entries]`, the outer axis strided.
struct RecordRegion {
  const uint8_t* data;
  int64_t outer_stride, entries, record_bytes;  // the stride in bytes
  const uint8_t* at(int64_t outer, int64_t entry) const {
    return data + outer * outer_stride + entry * record_bytes;
  }
};

struct AttentionInputs {
  int64_t rows, heads, width, window, picks_per_row, blocks_per_request;
  bool quantize;  // records are FP8 (window) and FP4 (compressed), with a tail those of tail_records.h
  int64_t tail;
  float scale;
  const float* sink;
  const uint8_t* record;  // this step's rows, records of the ring's size
  RecordRegion ring, compressed;
  const int64_t *picks, *positions, *request_index, *block_table, *slot_ids, *num_computed_tokens;
};

// query [rows, heads, width] -> output like it; mass [rows, window + picks_per_row] or null. `keys` is the
// number of visible keys over all rows.
template <class T>
void sparse_attention(const AttentionInputs& inputs, const T* query, int64_t keys, T* output, float* mass);

// kv [rows, width], table [any, rope_width] -> record: bytes of FP8 records, or floats.
template <class T, class W>
void window_record(const T* kv, const W* norm_weight, float eps, const float* table, const int64_t* positions,
                   int64_t rows, int64_t width, int64_t rope_width, bool quantize, int64_t tail,
                   void* record);

}  // namespace deepinfer
