// Compressed entries and their index: kernels on raw pointers, free of torch (`ops_index.cpp` checks and calls).
//
// Callers guarantee: lines, slots, blocks and table rows that a row with a position >= 0 leads to lie in range.
// Rows with a negative position are padding. Work is split over output elements only.
#pragma once

#include <cstdint>

#include "formats.h"
#include "gemm.h"

namespace deepinfer {

// Records [blocks, entries, record] or [slots, entries, record] behind strides in items of T; a record is dense.
template <class T>
struct RecordView {
  T* data;
  int64_t entries, outer_stride, entry_stride;
  T* at(int64_t outer, int64_t entry) const { return data + outer * outer_stride + entry * entry_stride; }
};

// Values of either dtype.
struct FloatView {
  const void* data;
  bool is_bf16;
  void widen(int64_t first, int64_t count, float* out) const {
    if (is_bf16) {
      const bf16* values = static_cast<const bf16*>(data) + first;
      for (int64_t i = 0; i < count; ++i) out[i] = to_float(values[i]);
    } else if (count) {
      std::memcpy(out, static_cast<const float*>(data) + first, size_t(count) * sizeof(float));
    }
  }
};

// Who the rows are and where their entries lie; block_table [lines, columns].
struct EntryRows {
  int64_t rows, columns, ratio;
  const int64_t *positions, *request_index, *block_table;
  const int64_t* blocks_of(int64_t row) const { return block_table + request_index[row] * columns; }
  int64_t visible(int64_t row) const { return positions[row] < 0 ? 0 : (positions[row] + 1) / ratio; }
  bool closes_group(int64_t row) const { return positions[row] >= 0 && (positions[row] + 1) % ratio == 0; }
};

struct IndexSettings {
  int64_t heads, dim, top_k, block_size, topk_blocks;
  const int64_t* candidates;  // [rows, num_candidates] block numbers, ascending, -1 padded; 0: no limit
  int64_t num_candidates;
};

// Where a row's request keeps its open groups, and which rows of the step are the request's.
struct OpenGroups {
  RecordView<float> ring;  // a value and a gate per position, behind each other
  const int64_t *slot_ids, *num_computed_tokens, *row_counts;
};

// How a vector becomes a record: RMSNorm, then rotation of its last `rotated` values.
struct RecordSettings {
  FloatView norm_weight;
  float eps;
  const float* table;  // [any, rotated]
  int64_t rotated;
};

// x [rows, wkv.inputs] -> latent [rows, wkv.outputs]: normed, not rotated, zero in rows that close no group.
// Writes the entries that close, as FP4 with E4M3 scales or float32, and (ratio > 1) the rings.
template <class T, class Record>
void compress(const T* x, const LinearWeight& wkv, const LinearWeight& wgate, RecordSettings settings,
              OpenGroups open, RecordView<Record> region, EntryRows rows, T* latent);

// bias [ratio, wkv.outputs] of the gates; with overlap the outputs are two halves.
struct BiasedSettings {
  const float* bias;
  bool overlap, index;  // index: keys of an index, which have records of their own
};

// As compress, with members and records as in kernels/compress_biased.py.
template <class T, class Record>
void compress_biased(const T* x, const LinearWeight& wkv, const LinearWeight& wgate, BiasedSettings biased,
                     RecordSettings settings, OpenGroups open, RecordView<Record> region, EntryRows rows,
                     T* latent);

// latent [rows, wk.inputs]: writes the keys of the entries that close, as FP4 with E8M0 scales or float32.
template <class T, class Record>
void index_key(const T* latent, const LinearWeight& wk, RecordSettings settings, RecordView<Record> region,
               EntryRows rows);

// query [rows, heads, dim], head_weights [rows, heads] -> picks [rows, top_k], blocks [rows, topk_blocks],
// scores [rows, columns * entries] unless null. Records are FP4 bytes or float32.
template <class Record>
void index_topk(FloatView query, FloatView head_weights, RecordView<const Record> keys, EntryRows rows,
                IndexSettings settings, int64_t* picks, int64_t* blocks, float* scores);

}  // namespace deepinfer
