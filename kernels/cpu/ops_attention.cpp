// Registration of the attention operations. Every index that is used as an address is checked here.

#include <algorithm>
#include <cstring>

#include "attention.h"
#include "records.h"
#include "tail_records.h"
#include "torch_checks.h"

namespace deepinfer {

namespace {

// A region [blocks or slots, entries, record]: inner axes dense, the outer one at any stride.
void check_region(const char* op, const char* name, const Tensor& t,
                  std::initializer_list<ScalarType> dtypes) {
  bool found = false;
  for (ScalarType dtype : dtypes) found |= t.scalar_type() == dtype;
  TORCH_CHECK(found, op, ": ", name, " has an unsupported dtype, ", c10::toString(t.scalar_type()));
  check_shape(op, name, t, {kAny, kAny, kAny});
  bool dense = (t.size(2) <= 1 || t.stride(2) == 1) && (t.size(1) <= 1 || t.stride(1) == t.size(2));
  TORCH_CHECK(dense, op, ": ", name, " must be contiguous within a block or slot, got strides ", t.strides());
}

void check_ints(const char* op, const char* name, const Tensor& t, std::initializer_list<int64_t> shape) {
  check_dtype(op, name, t, {at::kLong});
  check_shape(op, name, t, shape);
}

void check_tail(const char* op, int64_t width, int64_t tail) {
  TORCH_CHECK(tail >= 0 && tail < width, op, ": tail must lie in 0 .. ", width - 1, ", got ", tail);
}

RecordRegion region_of(const Tensor& t) {
  int64_t item = t.element_size();
  return {in<uint8_t>(t), t.stride(0) * item, t.size(1), t.size(2) * item};
}

Tensor window_record_op(const Tensor& kv, const Tensor& norm_weight, double eps, const Tensor& table,
                        const Tensor& positions, bool quantize, int64_t tail) {
  const char* op = "window_record";
  check_floats(op, "kv", kv);
  check_floats(op, "norm_weight", norm_weight);
  check_dtype(op, "table", table, {at::kFloat});
  check_shape(op, "kv", kv, {kAny, kAny});
  int64_t rows = kv.size(0), width = kv.size(1);
  check_shape(op, "norm_weight", norm_weight, {width});
  check_shape(op, "table", table, {kAny, kAny});
  int64_t rope_width = table.size(1);
  TORCH_CHECK(rope_width <= width && rope_width % 2 == 0, op, ": table must have an even width of at most ",
              width, ", got ", rope_width);
  check_ints(op, "positions", positions, {rows});
  if (quantize && !tail) last_multiple(op, "kv", kv, kFp8Group);
  check_tail(op, width, tail);
  const int64_t* at = in<int64_t>(positions);
  for (int64_t row = 0; row < rows; ++row) {
    TORCH_CHECK(at[row] >= -1 && at[row] < table.size(0), op, ": positions must lie in -1 .. ",
                table.size(0) - 1, ", got ", at[row]);
  }
  int64_t size = width;
  if (quantize) size = tail ? tail_record_bytes(width, tail) : fp8_record_bytes(width);
  Tensor record = empty({rows, size}, quantize ? at::kByte : at::kFloat);
  by_dtype(kv.scalar_type(), op, [&](auto* t) {
    by_dtype(norm_weight.scalar_type(), op, [&](auto* w) {
      window_record(in<TYPE(t)>(kv), in<TYPE(w)>(norm_weight), float(eps), in<float>(table), at, rows, width,
                    rope_width, quantize, tail, record.mutable_data_ptr());
    });
  });
  return record;
}

void ring_write_op(const Tensor& ring, const Tensor& values, const Tensor& positions,
                   const Tensor& request_index, const Tensor& slot_ids, const Tensor& num_computed_tokens,
                   const Tensor& row_counts) {
  const char* op = "ring_write";
  check_region(op, "ring", ring, {at::kByte, at::kInt, at::kFloat});
  check_dtype(op, "values", values, {at::kByte, at::kInt, at::kFloat, at::kLong});
  bool narrow = values.scalar_type() == at::kLong && ring.scalar_type() == at::kInt;
  TORCH_CHECK(narrow || values.scalar_type() == ring.scalar_type(), op, ": values must be like ring, ",
              c10::toString(ring.scalar_type()), ", got ", c10::toString(values.scalar_type()));
  int64_t length = ring.size(1), width = ring.size(2);
  check_shape(op, "values", values, {kAny, width});
  int64_t rows = values.size(0);
  check_ints(op, "positions", positions, {rows});
  check_ints(op, "request_index", request_index, {rows});
  check_ints(op, "slot_ids", slot_ids, {kAny});
  int64_t lines = slot_ids.size(0);
  check_ints(op, "num_computed_tokens", num_computed_tokens, {lines});
  check_ints(op, "row_counts", row_counts, {lines});
  const int64_t *at = in<int64_t>(positions), *line_of = in<int64_t>(request_index);
  const int64_t *slots = in<int64_t>(slot_ids), *starts = in<int64_t>(num_computed_tokens);
  const int64_t* counts = in<int64_t>(row_counts);
  // All is checked before the first row is written.
  for (int64_t row = 0; row < rows; ++row) {
    TORCH_CHECK(at[row] >= -1, op, ": positions must be at least -1, got ", at[row]);
    if (at[row] < 0) continue;
    int64_t line = line_of[row];
    TORCH_CHECK(line >= 0 && line < lines, op, ": request_index must lie in 0 .. ", lines - 1, ", got ",
                line);
    TORCH_CHECK(slots[line] >= 1 && slots[line] < ring.size(0), op, ": slot_ids must lie in 1 .. ",
                ring.size(0) - 1, ", got ", slots[line]);
    TORCH_CHECK(length > 0, op, ": ring must have entries");
  }
  int64_t stride = ring.stride(0) * ring.element_size(), bytes = width * ring.element_size();
  auto* base = static_cast<uint8_t*>(ring.mutable_data_ptr());
  const uint8_t* source = in<uint8_t>(values);
  for (int64_t row = 0; row < rows; ++row) {
    int64_t position = at[row], line = line_of[row];
    if (position < 0 || position < starts[line] + counts[line] - length) continue;
    uint8_t* out = base + slots[line] * stride + position % length * bytes;
    if (!narrow) {
      std::memcpy(out, source + row * bytes, size_t(bytes));
      continue;
    }
    for (int64_t i = 0; i < width; ++i) {
      auto value = int32_t(in<int64_t>(values)[row * width + i]);
      std::memcpy(out + i * int64_t(sizeof value), &value, sizeof value);
    }
  }
}

// Checks a row's picks; returns how many there are.
int64_t check_picks(const char* op, const int64_t* picks, int64_t count, int64_t position,
                    const int64_t* table, int64_t table_width, int64_t blocks, int64_t entries) {
  int64_t visible = 0;
  for (int64_t i = 0; i < count; ++i) {
    int64_t pick = picks[i];
    if (pick == -1) continue;
    // A request has at most one entry per position.
    TORCH_CHECK(pick >= 0 && pick <= position && pick / entries < table_width, op,
                ": picks of position ", position, " must lie in -1 .. ",
                std::min(position, table_width * entries - 1), ", got ", pick);
    int64_t block = table[pick / entries];
    TORCH_CHECK(block >= 1 && block < blocks, op, ": block_table must hold 1 .. ", blocks - 1, " for entry ",
                pick, ", got ", block);
    ++visible;
  }
  return visible;
}

// Checks what the rows say of each other and of the caches; returns the number of visible keys of all rows.
int64_t check_rows(const char* op, const AttentionInputs& a, int64_t lines, int64_t slots, int64_t blocks) {
  int64_t keys = 0;
  for (int64_t row = 0; row < a.rows; ++row) {
    int64_t position = a.positions[row];
    TORCH_CHECK(position >= -1, op, ": positions must be at least -1, got ", position);
    if (position < 0) continue;
    int64_t line = a.request_index[row];
    TORCH_CHECK(line >= 0 && line < lines, op, ": request_index must lie in 0 .. ", lines - 1, ", got ",
                line);
    int64_t start = a.num_computed_tokens[line], first = std::max<int64_t>(0, position - a.window + 1);
    TORCH_CHECK(start >= 0 && start <= position, op, ": num_computed_tokens must lie in 0 .. ", position,
                " for a row of that position, got ", start);
    bool follows = row > 0 && a.request_index[row - 1] == line && a.positions[row - 1] == position - 1;
    TORCH_CHECK(position == start || follows, op, ": row ", row, " must follow the row of position ",
                position - 1, " of its request");
    int64_t slot = a.slot_ids[line];
    TORCH_CHECK(first >= start || (slot >= 1 && slot < slots), op, ": slot_ids must lie in 1 .. ", slots - 1,
                ", got ", slot);
    keys += position - first + 1;
    keys += check_picks(op, a.picks + row * a.picks_per_row, a.picks_per_row, position,
                        a.block_table + line * a.blocks_per_request, a.blocks_per_request, blocks,
                        a.compressed.entries);
  }
  return keys;
}

std::tuple<Tensor, Tensor> sparse_attention_op(
    const Tensor& query, const Tensor& record, const Tensor& ring, const Tensor& compressed,
    const Tensor& picks, const Tensor& sink, double scale, int64_t window, const Tensor& positions,
    const Tensor& request_index, const Tensor& block_table, const Tensor& slot_ids,
    const Tensor& num_computed_tokens, bool quantize, bool with_mass, int64_t tail) {
  const char* op = "sparse_attention";
  check_floats(op, "query", query);
  check_shape(op, "query", query, {kAny, kAny, kAny});
  int64_t rows = query.size(0), heads = query.size(1), width = query.size(2);
  TORCH_CHECK(heads > 0 && width > 0, op, ": query must have heads and a width, got ", query.sizes());
  if (quantize && !tail) last_multiple(op, "query", query, kFp8Group);
  check_tail(op, width, tail);
  ScalarType stored = quantize ? at::kByte : at::kFloat;
  int64_t size = width, compressed_size = width;
  if (quantize) {
    size = tail ? tail_record_bytes(width, tail) : fp8_record_bytes(width);
    compressed_size = tail ? size : fp4_record_bytes(width);
  }
  check_dtype(op, "record", record, {stored});
  check_shape(op, "record", record, {rows, size});
  check_region(op, "ring", ring, {stored});
  check_shape(op, "ring", ring, {kAny, kAny, size});
  TORCH_CHECK(window >= 1 && window <= ring.size(1), op, ": window must lie in 1 .. ", ring.size(1), ", got ",
              window);
  check_dtype(op, "sink", sink, {at::kFloat});
  check_shape(op, "sink", sink, {heads});
  check_ints(op, "picks", picks, {rows, kAny});
  check_region(op, "compressed", compressed, {stored});
  if (picks.size(1) > 0) {
    check_shape(op, "compressed", compressed, {kAny, kAny, compressed_size});
    TORCH_CHECK(compressed.size(1) > 0, op, ": compressed must have entries");
  }
  check_ints(op, "positions", positions, {rows});
  check_ints(op, "request_index", request_index, {rows});
  check_ints(op, "block_table", block_table, {kAny, kAny});
  int64_t lines = block_table.size(0);
  check_ints(op, "slot_ids", slot_ids, {lines});
  check_ints(op, "num_computed_tokens", num_computed_tokens, {lines});

  AttentionInputs inputs{rows,
                         heads,
                         width,
                         window,
                         picks.size(1),
                         block_table.size(1),
                         quantize,
                         tail,
                         float(scale),
                         in<float>(sink),
                         in<uint8_t>(record),
                         region_of(ring),
                         region_of(compressed),
                         in<int64_t>(picks),
                         in<int64_t>(positions),
                         in<int64_t>(request_index),
                         in<int64_t>(block_table),
                         in<int64_t>(slot_ids),
                         in<int64_t>(num_computed_tokens)};
  int64_t keys = check_rows(op, inputs, lines, ring.size(0), compressed.size(0));
  Tensor output = empty(query.sizes(), query.scalar_type());
  Tensor mass = empty({rows, with_mass ? window + picks.size(1) : 0}, at::kFloat);
  by_dtype(query.scalar_type(), op, [&](auto* t) {
    sparse_attention(inputs, in<TYPE(t)>(query), keys, out<TYPE(t)>(output),
                     with_mass ? out<float>(mass) : nullptr);
  });
  return {output, mass};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(deepinfer, m) {
  const std::vector<at::Tag> tags = op_tags();
  m.def(
      "window_record(Tensor kv, Tensor norm_weight, float eps, Tensor table, Tensor positions, "
      "bool quantize, int tail=0) -> Tensor",
      tags);
  m.def(
      "ring_write(Tensor(a!) ring, Tensor values, Tensor positions, Tensor request_index, Tensor slot_ids, "
      "Tensor num_computed_tokens, Tensor row_counts) -> ()",
      tags);
  m.def(
      "sparse_attention(Tensor query, Tensor record, Tensor ring, Tensor compressed, Tensor picks, "
      "Tensor sink, float scale, int window, Tensor positions, Tensor request_index, "
      "Tensor block_table, Tensor slot_ids, Tensor num_computed_tokens, bool quantize, bool with_mass, "
      "int tail=0) -> (Tensor output, Tensor mass)",
      tags);
}

TORCH_LIBRARY_IMPL(deepinfer, CPU, m) {
  m.impl("window_record", window_record_op);
  m.impl("ring_write", ring_write_op);
  m.impl("sparse_attention", sparse_attention_op);
}

}  // namespace deepinfer
