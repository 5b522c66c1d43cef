// Registration of compress, compress_biased, index_key and index_topk. Everything that addresses memory is checked here.

#include <algorithm>

#include "gemm_checks.h"
#include "index.h"
#include "rope.h"
#include "tail_records.h"
#include "torch_checks.h"

namespace deepinfer {

namespace {

// Regions are views into an arena: only the record has to be dense.
template <class T>
RecordView<T> record_view(const char* op, const char* name, const Tensor& t, int64_t width) {
  ScalarType dtype = std::is_same_v<std::remove_const_t<T>, uint8_t> ? at::kByte : at::kFloat;
  TORCH_CHECK(t.scalar_type() == dtype, op, ": ", name, " has an unsupported dtype, ",
              c10::toString(t.scalar_type()));
  check_shape(op, name, t, {kAny, kAny, width});
  TORCH_CHECK(t.size(1) > 0, op, ": ", name, " must have entries");
  TORCH_CHECK(t.stride(2) == 1 || width == 1, op, ": ", name, " must have dense records, got strides ",
              t.strides());
  T* data;
  if constexpr (std::is_const_v<T>) {
    data = static_cast<T*>(t.const_data_ptr());
  } else {
    data = static_cast<T*>(t.mutable_data_ptr());
  }
  return {data, t.size(1), t.stride(0), t.stride(1)};
}

EntryRows entry_rows(const char* op, const Tensor& positions, const Tensor& request_index,
                     const Tensor& block_table, int64_t rows, int64_t ratio) {
  TORCH_CHECK(ratio >= 1, op, ": ratio must be at least 1, got ", ratio);
  check_dtype(op, "positions", positions, {at::kLong});
  check_dtype(op, "request_index", request_index, {at::kLong});
  check_dtype(op, "block_table", block_table, {at::kLong});
  check_shape(op, "positions", positions, {rows});
  check_shape(op, "request_index", request_index, {rows});
  check_shape(op, "block_table", block_table, {kAny, kAny});
  return {rows, block_table.size(1), ratio, in<int64_t>(positions), in<int64_t>(request_index),
          in<int64_t>(block_table)};
}

void check_line(const char* op, const EntryRows& rows, int64_t row, int64_t lines) {
  int64_t line = rows.request_index[row];
  TORCH_CHECK(line >= 0 && line < lines, op, ": request_index must lie in 0 .. ", lines - 1, ", got ", line);
}

void check_position(const char* op, const EntryRows& rows, int64_t row, int64_t entries) {
  TORCH_CHECK(rows.positions[row] < rows.columns * entries * rows.ratio, op, ": position ",
              rows.positions[row], " lies beyond the ", rows.columns, " blocks of the block table");
}

void check_block(const char* op, int64_t block, int64_t blocks) {
  TORCH_CHECK(block >= 0 && block < blocks, op, ": block_table must lie in 0 .. ", blocks - 1, ", got ",
              block);
}

// The blocks of every entry that a row sees; each block of a line once, however many rows it has.
void check_visible(const char* op, const EntryRows& rows, const Tensor& region, int64_t lines) {
  int64_t entries = region.size(1), blocks = region.size(0);
  std::vector<int64_t> checked(size_t(lines), 0);
  for (int64_t row = 0; row < rows.rows; ++row) {
    if (rows.positions[row] < 0) continue;
    check_line(op, rows, row, lines);
    check_position(op, rows, row, entries);
    int64_t needed = (rows.visible(row) + entries - 1) / entries;
    int64_t& done = checked[size_t(rows.request_index[row])];
    for (; done < needed; ++done) check_block(op, rows.blocks_of(row)[done], blocks);
  }
}

FloatView floats(const Tensor& t) { return {t.const_data_ptr(), t.scalar_type() == at::kBFloat16}; }

RecordSettings record_settings(const char* op, const Tensor& norm_weight, double eps, const Tensor& table,
                               int64_t size) {
  check_floats(op, "norm_weight", norm_weight);
  check_shape(op, "norm_weight", norm_weight, {size});
  check_dtype(op, "table", table, {at::kFloat});
  check_shape(op, "table", table, {kAny, kAny});
  int64_t rotated = table.size(1);
  TORCH_CHECK(rotated > 0 && rotated % 2 == 0 && rotated <= std::min(size, kMaxRotated), op,
              ": table must have an even number of columns, at most ", std::min(size, kMaxRotated), ", got ",
              rotated);
  return {floats(norm_weight), float(eps), in<float>(table), rotated};
}

// The block and the table row of every entry that closes.
void check_closing(const char* op, const EntryRows& rows, const Tensor& region, const Tensor& table,
                   int64_t lines) {
  int64_t entries = region.size(1);
  for (int64_t row = 0; row < rows.rows; ++row) {
    if (rows.positions[row] < 0) continue;
    check_line(op, rows, row, lines);
    check_position(op, rows, row, entries);
    if (!rows.closes_group(row)) continue;
    int64_t entry = rows.positions[row] / rows.ratio;
    check_block(op, rows.blocks_of(row)[entry / entries], region.size(0));
    TORCH_CHECK(entry * rows.ratio < table.size(0), op, ": position ", rows.positions[row],
                " lies beyond the ", table.size(0), " rows of the table");
  }
}

OpenGroups open_groups(const char* op, const EntryRows& rows, const Tensor& ring, const Tensor& slot_ids,
                       const Tensor& num_computed_tokens, const Tensor& row_counts, int64_t lines,
                       int64_t size, int64_t members) {
  for (auto [name, t] : {std::pair{"slot_ids", &slot_ids}, {"num_computed_tokens", &num_computed_tokens},
                         {"row_counts", &row_counts}}) {
    check_dtype(op, name, *t, {at::kLong});
    check_shape(op, name, *t, {lines});
  }
  OpenGroups open{{nullptr, 1, 0, 0}, in<int64_t>(slot_ids), in<int64_t>(num_computed_tokens),
                  in<int64_t>(row_counts)};
  if (members == 1) return open;
  open.ring = record_view<float>(op, "open_group", ring, 2 * size);
  TORCH_CHECK(ring.size(1) >= members, op, ": open_group must hold at least ", members,
              " positions, got ", ring.size(1));
  for (int64_t row = 0; row < rows.rows; ++row) {
    if (rows.positions[row] < 0) continue;
    int64_t line = rows.request_index[row], slot = open.slot_ids[line];
    TORCH_CHECK(slot >= 0 && slot < ring.size(0), op, ": slot_ids must lie in 0 .. ", ring.size(0) - 1,
                ", got ", slot);
    int64_t first = open.num_computed_tokens[line], count = open.row_counts[line];
    int64_t before = rows.positions[row] - first;  // rows of the request in this step
    TORCH_CHECK(first >= 0 && before >= 0 && before <= row && before < count && count <= rows.rows, op,
                ": position ", rows.positions[row], " of row ", row, " does not fit a request with ", count,
                " rows from position ", first);
  }
  return open;
}

Tensor compress_op(const Tensor& x, const Tensor& wkv, const Tensor& wgate, const Tensor& norm_weight,
                   double eps, Tensor open_group, const Tensor& table, Tensor region, const Tensor& positions,
                   const Tensor& request_index, const Tensor& block_table, const Tensor& slot_ids,
                   const Tensor& num_computed_tokens, const Tensor& row_counts, int64_t ratio,
                   bool quantize) {
  const char* op = "compress";
  check_floats(op, "x", x);
  check_shape(op, "x", x, {kAny, kAny});
  LinearWeight values = linear_weight(op, "wkv", wkv, x.size(1)), gates = values;
  int64_t size = values.outputs, count = x.size(0);
  EntryRows rows = entry_rows(op, positions, request_index, block_table, count, ratio);
  if (ratio > 1) {
    gates = linear_weight(op, "wgate", wgate, x.size(1));
    TORCH_CHECK(gates.outputs == size, op, ": wgate must have ", size, " outputs, got ", gates.outputs);
  }
  TORCH_CHECK(!quantize || (size > 0 && size % 16 == 0), op,
              ": outputs of wkv must be a positive multiple of 16, got ", size);
  RecordSettings settings = record_settings(op, norm_weight, eps, table, size);
  Tensor latent = empty({count, size}, x.scalar_type());
  auto run = [&](auto view) {
    check_closing(op, rows, region, table, block_table.size(0));
    OpenGroups open = open_groups(op, rows, open_group, slot_ids, num_computed_tokens, row_counts,
                                  block_table.size(0), size, ratio);
    by_dtype(x.scalar_type(), op, [&](auto* t) {
      compress(in<TYPE(t)>(x), values, gates, settings, open, view, rows, out<TYPE(t)>(latent));
    });
  };
  if (quantize) {
    run(record_view<uint8_t>(op, "region", region, size / 2 + size / 16));
  } else {
    run(record_view<float>(op, "region", region, size));
  }
  return latent;
}

Tensor compress_biased_op(const Tensor& x, const Tensor& wkv, const Tensor& wgate, const Tensor& bias,
                          const Tensor& norm_weight, double eps, Tensor open_group, const Tensor& table,
                          Tensor region, const Tensor& positions, const Tensor& request_index,
                          const Tensor& block_table, const Tensor& slot_ids,
                          const Tensor& num_computed_tokens, const Tensor& row_counts, int64_t ratio,
                          bool overlap, bool quantize, bool index) {
  const char* op = "compress_biased";
  check_floats(op, "x", x);
  check_shape(op, "x", x, {kAny, kAny});
  LinearWeight values = linear_weight(op, "wkv", wkv, x.size(1));
  LinearWeight gates = linear_weight(op, "wgate", wgate, x.size(1));
  int64_t width = values.outputs, size = overlap ? width / 2 : width, count = x.size(0);
  TORCH_CHECK(gates.outputs == width && size > 0 && (!overlap || width % 2 == 0), op,
              ": wkv and wgate must have one number of outputs, with overlap two halves, got ", width, " and ",
              gates.outputs);
  EntryRows rows = entry_rows(op, positions, request_index, block_table, count, ratio);
  TORCH_CHECK(ratio >= 2, op, ": ratio must be at least 2, got ", ratio);
  check_dtype(op, "bias", bias, {at::kFloat});
  check_shape(op, "bias", bias, {ratio, width});
  RecordSettings settings = record_settings(op, norm_weight, eps, table, size);
  TORCH_CHECK(!quantize || index || settings.rotated < size, op, ": table must have fewer than ", size,
              " columns");
  if (quantize && index) {
    TORCH_CHECK(size % 32 == 0 && (size & (size - 1)) == 0, op, ": an index key must have a power of two of ",
                "values, at least 32, got ", size);
  }
  BiasedSettings biased{in<float>(bias), overlap, index};
  Tensor latent = empty({count, size}, x.scalar_type());
  auto run = [&](auto view) {
    check_closing(op, rows, region, table, block_table.size(0));
    OpenGroups open = open_groups(op, rows, open_group, slot_ids, num_computed_tokens, row_counts,
                                  block_table.size(0), width, overlap ? 2 * ratio : ratio);
    by_dtype(x.scalar_type(), op, [&](auto* t) {
      compress_biased(in<TYPE(t)>(x), values, gates, biased, settings, open, view, rows, out<TYPE(t)>(latent));
    });
  };
  if (!quantize) {
    run(record_view<float>(op, "region", region, size));
  } else {
    int64_t bytes = index ? size / 2 + size / 32 : tail_record_bytes(size, settings.rotated);
    run(record_view<uint8_t>(op, "region", region, bytes));
  }
  return latent;
}

void index_key_op(const Tensor& latent, const Tensor& wk, const Tensor& norm_weight, double eps,
                  const Tensor& table, Tensor region, const Tensor& positions, const Tensor& request_index,
                  const Tensor& block_table, int64_t ratio, bool quantize) {
  const char* op = "index_key";
  check_floats(op, "latent", latent);
  check_shape(op, "latent", latent, {kAny, kAny});
  LinearWeight keys = linear_weight(op, "wk", wk, latent.size(1));
  int64_t size = keys.outputs;
  EntryRows rows = entry_rows(op, positions, request_index, block_table, latent.size(0), ratio);
  TORCH_CHECK(!quantize || (size > 0 && size % 32 == 0), op,
              ": outputs of wk must be a positive multiple of 32, got ", size);
  RecordSettings settings = record_settings(op, norm_weight, eps, table, size);
  auto run = [&](auto view) {
    check_closing(op, rows, region, table, block_table.size(0));
    by_dtype(latent.scalar_type(), op,
             [&](auto* t) { index_key(in<TYPE(t)>(latent), keys, settings, view, rows); });
  };
  if (quantize) {
    run(record_view<uint8_t>(op, "region", region, size / 2 + size / 32));
  } else {
    run(record_view<float>(op, "region", region, size));
  }
}

void check_candidates(const char* op, const Tensor& candidates, int64_t rows) {
  check_dtype(op, "candidates", candidates, {at::kLong});
  check_shape(op, "candidates", candidates, {rows, kAny});
  int64_t count = candidates.size(1);
  const int64_t* blocks = in<int64_t>(candidates);
  for (int64_t row = 0; row < rows; ++row, blocks += count) {
    for (int64_t c = 0; c < count; ++c) {
      TORCH_CHECK(blocks[c] >= -1, op, ": candidates must be at least -1, got ", blocks[c]);
      TORCH_CHECK(c == 0 || blocks[c] == -1 || blocks[c - 1] < blocks[c], op,
                  ": candidates must ascend, got ", blocks[c], " after ", blocks[c - 1]);
      TORCH_CHECK(c == 0 || blocks[c] == -1 || blocks[c - 1] != -1, op,
                  ": candidates must be padded at their end");
    }
  }
}

std::tuple<Tensor, Tensor, Tensor> index_topk_op(
    const Tensor& query, const Tensor& head_weights, const Tensor& region, const Tensor& candidates,
    const Tensor& positions, const Tensor& request_index, const Tensor& block_table, int64_t ratio,
    int64_t top_k, int64_t candidate_block_size, int64_t candidate_topk_blocks, bool quantize,
    bool with_scores) {
  const char* op = "index_topk";
  check_floats(op, "query", query);
  check_floats(op, "head_weights", head_weights);
  check_shape(op, "query", query, {kAny, kAny, kAny});
  int64_t count = query.size(0), heads = query.size(1), dim = query.size(2);
  check_shape(op, "head_weights", head_weights, {count, heads});
  TORCH_CHECK(heads > 0 && dim > 0, op, ": query must have heads of at least one element, got ",
              query.sizes());
  if (quantize) last_multiple(op, "query", query, 32);
  check_candidates(op, candidates, count);
  TORCH_CHECK(top_k >= 0 && candidate_topk_blocks >= 0, op,
              ": top_k and candidate_topk_blocks must not be negative");
  TORCH_CHECK(candidate_block_size >= 1, op, ": candidate_block_size must be at least 1, got ",
              candidate_block_size);
  TORCH_CHECK(candidate_topk_blocks == 0 || candidates.size(1) == 0, op,
              ": candidates cannot limit the layer that chooses them");
  EntryRows rows = entry_rows(op, positions, request_index, block_table, count, ratio);
  int64_t width = quantize ? dim / 2 + dim / 32 : dim;
  IndexSettings settings{heads, dim, top_k, candidate_block_size, candidate_topk_blocks,
                         in<int64_t>(candidates), candidates.size(1)};
  auto run = [&](auto view) {
    check_visible(op, rows, region, block_table.size(0));
    Tensor picks = empty({count, top_k}, at::kLong), blocks = empty({count, candidate_topk_blocks}, at::kLong);
    Tensor scores = empty({count, with_scores ? rows.columns * region.size(1) : 0}, at::kFloat);
    index_topk(floats(query), floats(head_weights), view, rows, settings, out<int64_t>(picks),
               out<int64_t>(blocks), with_scores ? out<float>(scores) : nullptr);
    return std::tuple{picks, blocks, scores};
  };
  return quantize ? run(record_view<const uint8_t>(op, "region", region, width))
                  : run(record_view<const float>(op, "region", region, width));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(deepinfer, m) {
  const std::vector<at::Tag> tags = op_tags();
  m.def(
      "compress(Tensor x, Tensor wkv, Tensor wgate, Tensor norm_weight, float eps, Tensor(a!) open_group, "
      "Tensor table, Tensor(b!) region, Tensor positions, Tensor request_index, Tensor block_table, "
      "Tensor slot_ids, Tensor num_computed_tokens, Tensor row_counts, int ratio, bool quantize) -> Tensor",
      tags);
  m.def(
      "compress_biased(Tensor x, Tensor wkv, Tensor wgate, Tensor bias, Tensor norm_weight, float eps, "
      "Tensor(a!) open_group, Tensor table, Tensor(b!) region, Tensor positions, Tensor request_index, "
      "Tensor block_table, Tensor slot_ids, Tensor num_computed_tokens, Tensor row_counts, int ratio, "
      "bool overlap, bool quantize, bool index) -> Tensor",
      tags);
  m.def(
      "index_key(Tensor latent, Tensor wk, Tensor norm_weight, float eps, Tensor table, Tensor(a!) region, "
      "Tensor positions, Tensor request_index, Tensor block_table, int ratio, bool quantize) -> ()",
      tags);
  m.def(
      "index_topk(Tensor query, Tensor head_weights, Tensor region, Tensor candidates, Tensor positions, "
      "Tensor request_index, Tensor block_table, int ratio, int top_k, int candidate_block_size, "
      "int candidate_topk_blocks, bool quantize, bool with_scores) -> (Tensor, Tensor, Tensor)",
      tags);
}

TORCH_LIBRARY_IMPL(deepinfer, CPU, m) {
  m.impl("compress", compress_op);
  m.impl("compress_biased", compress_biased_op);
  m.impl("index_key", index_key_op);
  m.impl("index_topk", index_topk_op);
}

}  // namespace deepinfer
