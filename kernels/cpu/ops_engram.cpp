// Registration of the operations on the n-gram memory.

#include "engram.h"
#include "torch_checks.h"

namespace deepinfer {

namespace {

// Every index that a row leads to is in range; `ngram - 1` tokens before it may be asked for.
void check_token_rows(const char* op, const TokenRows& rows, int64_t count, int64_t lines, int64_t slots,
                      int64_t ngram) {
  for (int64_t row = 0; row < count; ++row) {
    int64_t position = rows.positions[row];
    if (position < 0) continue;
    int64_t line = rows.request_index[row];
    TORCH_CHECK(line >= 0 && line < lines, op, ": request_index must lie in 0 .. ", lines - 1, ", got ",
                line);
    int64_t slot = rows.slot_ids[line], first = rows.num_computed_tokens[line];
    TORCH_CHECK(slot >= 0 && slot < slots, op, ": slot_ids must lie in 0 .. ", slots - 1, ", got ", slot);
    TORCH_CHECK(first >= 0, op, ": num_computed_tokens must not be negative, got ", first);
    int64_t back = std::min(ngram - 1, position - first);
    TORCH_CHECK(back <= row, op, ": row ", row, " of position ", position, " cannot follow ", back,
                " rows of its request");
  }
}

Tensor engram_ids_op(const Tensor& token_ids, const Tensor& history, const Tensor& token_map,
                     const Tensor& multipliers, const Tensor& primes, const Tensor& offsets,
                     int64_t pad_token_id, const Tensor& positions, const Tensor& request_index,
                     const Tensor& slot_ids, const Tensor& num_computed_tokens) {
  const char* op = "engram_ids";
  auto check_ids = [&](const char* name, const Tensor& t, int64_t size) {
    check_dtype(op, name, t, {at::kLong});
    check_shape(op, name, t, {size});
    return in<int64_t>(t);
  };
  TokenRows rows;
  HashTables tables;
  rows.token_ids = check_ids("token_ids", token_ids, kAny);
  int64_t count = token_ids.size(0);
  tables.token_map = check_ids("token_map", token_map, kAny);
  tables.multipliers = check_ids("multipliers", multipliers, kAny);
  tables.primes = check_ids("primes", primes, kAny);
  tables.columns = primes.size(0);
  tables.offsets = check_ids("offsets", offsets, tables.columns);
  rows.positions = check_ids("positions", positions, count);
  rows.request_index = check_ids("request_index", request_index, count);
  rows.slot_ids = check_ids("slot_ids", slot_ids, kAny);
  rows.num_computed_tokens = check_ids("num_computed_tokens", num_computed_tokens, slot_ids.size(0));
  tables.map_size = token_map.size(0);
  tables.ngram = multipliers.size(0);
  TORCH_CHECK(tables.ngram >= 2, op, ": multipliers must have at least 2 entries, got ", tables.ngram);
  TORCH_CHECK(tables.columns % (tables.ngram - 1) == 0, op, ": primes must have a multiple of ",
              tables.ngram - 1, " entries, got ", tables.columns);
  for (int64_t column = 0; column < tables.columns; ++column) {
    TORCH_CHECK(tables.primes[column] > 0, op, ": primes must be positive, got ", tables.primes[column]);
  }
  TORCH_CHECK(pad_token_id >= 0 && pad_token_id < tables.map_size, op, ": pad_token_id must lie in 0 .. ",
              tables.map_size - 1, ", got ", pad_token_id);
  tables.pad = tables.token_map[pad_token_id];
  TORCH_CHECK(history.scalar_type() == at::kInt || history.scalar_type() == at::kLong, op,
              ": history has an unsupported dtype, ", c10::toString(history.scalar_type()));
  check_shape(op, "history", history, {kAny, kAny, 1});
  TORCH_CHECK(history.size(1) >= tables.ngram - 1, op, ": history must hold at least ", tables.ngram - 1,
              " tokens, got ", history.size(1));
  TokenHistory ring{history.const_data_ptr(), history.scalar_type() == at::kLong, history.size(1),
                    history.stride(0), history.stride(1)};
  check_token_rows(op, rows, count, slot_ids.size(0), history.size(0), tables.ngram);
  Tensor ids = empty({count, tables.columns}, at::kLong);
  engram_ids(rows, ring, tables, count, out<int64_t>(ids));
  return ids;
}

Tensor engram_gather_op(const Tensor& embed, const Tensor& ids, ScalarType out_dtype) {
  const char* op = "engram_gather";
  check_bytes(op, "embed", embed);
  check_dtype(op, "ids", ids, {at::kLong});
  check_shape(op, "embed", embed, {kAny, kAny});
  check_shape(op, "ids", ids, {kAny, kAny});
  int64_t bytes = last_multiple(op, "embed", embed, kFp8Group + 1), lines = embed.size(0);
  int64_t size = bytes / (kFp8Group + 1) * kFp8Group;
  const int64_t* at = in<int64_t>(ids);
  for (int64_t i = 0; i < ids.numel(); ++i) {
    TORCH_CHECK(at[i] >= 0 && at[i] < lines, op, ": ids must lie in 0 .. ", lines - 1, ", got ", at[i]);
  }
  Tensor y = empty({ids.size(0), ids.size(1) * size}, out_dtype);
  by_dtype(out_dtype, op, [&](auto* t) {
    engram_gather(in<uint8_t>(embed), at, ids.size(0), ids.size(1), size, out<TYPE(t)>(y));
  });
  return y;
}

Tensor engram_gate_op(const Tensor& residual, const Tensor& key_and_value, const Tensor& qk_weight,
                      double eps) {
  const char* op = "engram_gate";
  check_floats(op, "residual", residual);
  check_dtype(op, "key_and_value", key_and_value, {residual.scalar_type()});
  check_dtype(op, "qk_weight", qk_weight, {at::kFloat});
  check_shape(op, "residual", residual, {kAny, kAny, kAny});
  int64_t rows = residual.size(0), streams = residual.size(1), width = residual.size(2);
  check_shape(op, "key_and_value", key_and_value, {rows, (streams + 1) * width});
  check_shape(op, "qk_weight", qk_weight, {streams, width});
  Tensor y = empty(residual.sizes(), residual.scalar_type());
  by_dtype(residual.scalar_type(), op, [&](auto* t) {
    engram_gate(in<TYPE(t)>(residual), in<TYPE(t)>(key_and_value), in<float>(qk_weight), float(eps), rows,
                streams, width, out<TYPE(t)>(y));
  });
  return y;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(deepinfer, m) {
  const std::vector<at::Tag> tags = op_tags();
  m.def(
      "engram_ids(Tensor token_ids, Tensor history, Tensor token_map, Tensor multipliers, Tensor primes, "
      "Tensor offsets, int pad_token_id, Tensor positions, Tensor request_index, Tensor slot_ids, "
      "Tensor num_computed_tokens) -> Tensor",
      tags);
  m.def("engram_gather(Tensor embed, Tensor ids, ScalarType out_dtype) -> Tensor", tags);
  m.def("engram_gate(Tensor residual, Tensor key_and_value, Tensor qk_weight, float eps) -> Tensor", tags);
}

TORCH_LIBRARY_IMPL(deepinfer, CPU, m) {
  m.impl("engram_ids", engram_ids_op);
  m.impl("engram_gather", engram_gather_op);
  m.impl("engram_gate", engram_gate_op);
}

}  // namespace deepinfer
