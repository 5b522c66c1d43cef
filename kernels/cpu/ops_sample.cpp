// Registration of sampling and of the verification of drafts: everything that is used as an index is checked here.

#include "philox.h"
#include "sample.h"
#include "torch_checks.h"

namespace deepinfer {

namespace {

struct Arguments {
  const char* op;
  const Tensor &logits, &seeds, &positions, &temperatures, &top_k, &top_p, &min_p, &penalties, &history_offsets,
      &history_ids, &history_counts, &bias_offsets, &bias_ids, &bias, &masks, &mask_index;
  int64_t forced_top_k, num_logprobs;
  bool raw_logprobs;
};

// A column with one entry per row, or with none at all: then a null pointer.
template <class T>
const T* column(const char* op, const char* name, const Tensor& t, ScalarType dtype, int64_t rows, bool optional) {
  check_dtype(op, name, t, {dtype});
  if (optional && t.dim() == 1 && t.size(0) == 0) return nullptr;
  check_shape(op, name, t, {rows});
  return in<T>(t);
}

// Bounds of every row's entries in a list of `count`; null where the list is not used.
const int64_t* offsets_of(const char* op, const char* name, const Tensor& t, int64_t rows, int64_t count) {
  const int64_t* offsets = column<int64_t>(op, name, t, at::kLong, rows + 1, true);
  TORCH_CHECK(offsets || count == 0, op, ": ", name, " must have shape [", rows + 1, "] where there are entries");
  if (!offsets) return nullptr;
  TORCH_CHECK(offsets[0] == 0 && offsets[rows] == count, op, ": ", name, " must run from 0 to ", count);
  for (int64_t i = 0; i < rows; ++i) {
    TORCH_CHECK(offsets[i] <= offsets[i + 1], op, ": ", name, " must not fall");
  }
  return offsets;
}

const int64_t* ids_of(const char* op, const char* name, const Tensor& t, const int64_t* offsets, int64_t rows,
                      int64_t vocab) {
  const int64_t* ids = in<int64_t>(t);
  for (int64_t row = 0; offsets && row < rows; ++row) {
    int64_t last = -1;
    for (int64_t i = offsets[row]; i < offsets[row + 1]; ++i) {
      TORCH_CHECK(ids[i] > last && ids[i] < vocab, op, ": ", name, " must rise within a row and lie in 0 .. ",
                  vocab - 1, ", got ", ids[i], " in row ", row);
      last = ids[i];
    }
  }
  return ids;
}

template <class T, class Test>
void check_values(const char* op, const char* name, const char* wanted, const T* values, int64_t count,
                  const Test& good) {
  for (int64_t i = 0; values && i < count; ++i) {
    TORCH_CHECK(good(values[i]), op, ": ", name, " must be ", wanted, ", got ", values[i], " at ", i);
  }
}

void read_lists(const Arguments& a, SampleRows& rows) {
  const char* op = a.op;
  check_dtype(op, "history_ids", a.history_ids, {at::kLong});
  check_shape(op, "history_ids", a.history_ids, {kAny});
  check_dtype(op, "bias_ids", a.bias_ids, {at::kLong});
  check_shape(op, "bias_ids", a.bias_ids, {kAny});
  int64_t history = a.history_ids.size(0), biases = a.bias_ids.size(0);
  rows.history_offsets = offsets_of(op, "history_offsets", a.history_offsets, rows.rows, history);
  rows.history_ids = ids_of(op, "history_ids", a.history_ids, rows.history_offsets, rows.rows, rows.vocab);
  rows.history_counts = column<int64_t>(op, "history_counts", a.history_counts, at::kLong, history, false);
  check_values(op, "history_counts", "at least 0", rows.history_counts, history, [](int64_t n) { return n >= 0; });
  rows.bias_offsets = offsets_of(op, "bias_offsets", a.bias_offsets, rows.rows, biases);
  rows.bias_ids = ids_of(op, "bias_ids", a.bias_ids, rows.bias_offsets, rows.rows, rows.vocab);
  rows.bias = column<float>(op, "bias", a.bias, at::kFloat, biases, false);
  check_values(op, "bias", "finite or -inf", rows.bias, biases, [](float x) { return x < INFINITY; });
  check_dtype(op, "penalties", a.penalties, {at::kFloat});
  check_shape(op, "penalties", a.penalties, {kAny, 3});
  if (a.penalties.size(0) == 0) return;
  check_shape(op, "penalties", a.penalties, {rows.rows, 3});
  rows.penalties = in<float>(a.penalties);
  for (int64_t i = 0; i < 3 * rows.rows; ++i) {
    float x = rows.penalties[i];
    TORCH_CHECK(std::isfinite(x) && (i % 3 || x > 0), op, ": penalties must be finite, repetition above 0, got ", x);
  }
}

void read_masks(const Arguments& a, SampleRows& rows) {
  rows.mask_words = (rows.vocab + 31) / 32;
  check_dtype(a.op, "masks", a.masks, {at::kInt});
  check_shape(a.op, "masks", a.masks, {kAny, a.masks.size(0) ? rows.mask_words : kAny});
  rows.masks = in<int32_t>(a.masks);
  rows.mask_index = column<int64_t>(a.op, "mask_index", a.mask_index, at::kLong, rows.rows, true);
  int64_t masks = a.masks.size(0);
  check_values(a.op, "mask_index", "-1 or a row of masks", rows.mask_index, rows.rows,
               [&](int64_t i) { return i >= -1 && i < masks; });
}

SampleRows read_arguments(const Arguments& a) {
  const char* op = a.op;
  check_dtype(op, "logits", a.logits, {at::kFloat});
  check_shape(op, "logits", a.logits, {kAny, kAny});
  SampleRows rows{};
  rows.rows = a.logits.size(0);
  rows.vocab = a.logits.size(1);
  TORCH_CHECK(rows.vocab > 0 && rows.vocab < (int64_t(1) << 31), op, ": logits must have 1 to 2^31 - 1 columns, got ",
              rows.vocab);
  rows.logits = in<float>(a.logits);
  rows.seeds = column<int64_t>(op, "seeds", a.seeds, at::kLong, rows.rows, false);
  rows.positions = column<int64_t>(op, "positions", a.positions, at::kLong, rows.rows, false);
  check_values(op, "positions", "at least 0", rows.positions, rows.rows, [](int64_t p) { return p >= 0; });
  rows.temperatures = column<double>(op, "temperatures", a.temperatures, at::kDouble, rows.rows, false);
  check_values(op, "temperatures", "finite and at least 0", rows.temperatures, rows.rows,
               [](double t) { return t >= 0.0 && t < INFINITY; });
  rows.top_k = column<int64_t>(op, "top_k", a.top_k, at::kLong, rows.rows, true);
  auto share = [](double p) { return p >= 0.0 && p <= 1.0; };
  rows.top_p = column<double>(op, "top_p", a.top_p, at::kDouble, rows.rows, true);
  check_values(op, "top_p", "in 0 .. 1", rows.top_p, rows.rows, share);
  rows.min_p = column<double>(op, "min_p", a.min_p, at::kDouble, rows.rows, true);
  check_values(op, "min_p", "in 0 .. 1", rows.min_p, rows.rows, share);
  read_lists(a, rows);
  read_masks(a, rows);
  TORCH_CHECK(a.forced_top_k >= 0, op, ": forced_top_k must be at least 0, got ", a.forced_top_k);
  TORCH_CHECK(a.num_logprobs >= -1, op, ": num_logprobs must be at least -1, got ", a.num_logprobs);
  rows.forced_top_k = a.forced_top_k;
  rows.num_logprobs = a.num_logprobs;
  rows.raw_logprobs = a.raw_logprobs;
  return rows;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sample_op(
    const Tensor& logits, const Tensor& seeds, const Tensor& positions, const Tensor& temperatures,
    const Tensor& top_k, const Tensor& top_p, const Tensor& min_p, const Tensor& penalties,
    const Tensor& history_offsets, const Tensor& history_ids, const Tensor& history_counts,
    const Tensor& bias_offsets, const Tensor& bias_ids, const Tensor& bias, const Tensor& masks,
    const Tensor& mask_index, int64_t forced_top_k, int64_t num_logprobs, bool raw_logprobs) {
  SampleRows rows = read_arguments({"sample", logits, seeds, positions, temperatures, top_k, top_p, min_p, penalties,
                                    history_offsets, history_ids, history_counts, bias_offsets, bias_ids, bias,
                                    masks, mask_index, forced_top_k, num_logprobs, raw_logprobs});
  Tensor token_ids = empty({rows.rows}, at::kLong), status = empty({rows.rows}, at::kChar);
  Tensor logprob_ids = empty({rows.rows, 1 + num_logprobs}, at::kLong);
  Tensor logprobs = empty({rows.rows, 1 + num_logprobs}, at::kFloat);
  sample(rows, {out<int64_t>(token_ids), out<int8_t>(status), out<int64_t>(logprob_ids), out<float>(logprobs)});
  return {token_ids, status, logprob_ids, logprobs};
}

Drafts read_drafts(const SampleRows& rows, const Tensor& row_offsets, const Tensor& draft_ids,
                   const Tensor& draft_log_probs, const Tensor& draft_index) {
  const char* op = "verify_drafts";
  check_dtype(op, "row_offsets", row_offsets, {at::kLong});
  check_shape(op, "row_offsets", row_offsets, {kAny});
  check_dtype(op, "draft_log_probs", draft_log_probs, {at::kFloat});
  check_shape(op, "draft_log_probs", draft_log_probs, {kAny, rows.vocab});
  Drafts drafts{};
  drafts.requests = row_offsets.size(0) - 1;
  drafts.row_offsets = in<int64_t>(row_offsets);
  drafts.draft_ids = column<int64_t>(op, "draft_ids", draft_ids, at::kLong, rows.rows, false);
  drafts.draft_index = column<int64_t>(op, "draft_index", draft_index, at::kLong, rows.rows, false);
  drafts.log_probs = in<float>(draft_log_probs);
  const int64_t* offsets = drafts.row_offsets;
  TORCH_CHECK(drafts.requests >= 0 && offsets[0] == 0 && offsets[drafts.requests] == rows.rows, op,
              ": row_offsets must run from 0 to ", rows.rows);
  for (int64_t r = 0; r < drafts.requests; ++r) {
    TORCH_CHECK(offsets[r] < offsets[r + 1] && offsets[r + 1] <= rows.rows, op,
                ": row_offsets must rise, every request has a row");
    for (int64_t i = offsets[r]; i + 1 < offsets[r + 1]; ++i) {
      int64_t id = drafts.draft_ids[i], line = drafts.draft_index[i];
      TORCH_CHECK(id >= 0 && id < rows.vocab, op, ": draft_ids must lie in 0 .. ", rows.vocab - 1, ", got ", id);
      TORCH_CHECK(line >= 0 && line < draft_log_probs.size(0), op, ": draft_index must lie in 0 .. ",
                  draft_log_probs.size(0) - 1, ", got ", line);
    }
  }
  for (int64_t i = 0; i < rows.rows; ++i) {
    TORCH_CHECK(rows.positions[i] < int64_t(kRowStride), op, ": positions must be below ", kRowStride, ", got ",
                rows.positions[i]);
  }
  return drafts;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> verify_drafts_op(
    const Tensor& logits, const Tensor& row_offsets, const Tensor& draft_ids, const Tensor& draft_log_probs,
    const Tensor& draft_index, const Tensor& seeds, const Tensor& positions, const Tensor& temperatures,
    const Tensor& top_k, const Tensor& top_p, const Tensor& min_p, const Tensor& penalties,
    const Tensor& history_offsets, const Tensor& history_ids, const Tensor& history_counts,
    const Tensor& bias_offsets, const Tensor& bias_ids, const Tensor& bias, const Tensor& masks,
    const Tensor& mask_index, int64_t forced_top_k, int64_t num_logprobs, bool raw_logprobs) {
  SampleRows rows = read_arguments({"verify_drafts", logits, seeds, positions, temperatures, top_k, top_p, min_p,
                                    penalties, history_offsets, history_ids, history_counts, bias_offsets, bias_ids,
                                    bias, masks, mask_index, forced_top_k, num_logprobs, raw_logprobs});
  Drafts drafts = read_drafts(rows, row_offsets, draft_ids, draft_log_probs, draft_index);
  Tensor token_ids = empty({rows.rows}, at::kLong), counts = empty({drafts.requests}, at::kLong);
  Tensor status = empty({drafts.requests}, at::kChar);
  Tensor logprob_ids = empty({rows.rows, 1 + num_logprobs}, at::kLong);
  Tensor logprobs = empty({rows.rows, 1 + num_logprobs}, at::kFloat);
  verify_drafts(rows, drafts,
                {out<int64_t>(token_ids), out<int8_t>(status), out<int64_t>(logprob_ids), out<float>(logprobs)},
                out<int64_t>(counts));
  return {token_ids, counts, status, logprob_ids, logprobs};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(deepinfer, m) {
  const std::vector<at::Tag> tags = op_tags();
  m.def(
      "sample(Tensor logits, Tensor seeds, Tensor positions, Tensor temperatures, Tensor top_k, Tensor top_p, "
      "Tensor min_p, Tensor penalties, Tensor history_offsets, Tensor history_ids, Tensor history_counts, "
      "Tensor bias_offsets, Tensor bias_ids, Tensor bias, Tensor masks, Tensor mask_index, int forced_top_k, "
      "int num_logprobs, bool raw_logprobs) -> (Tensor, Tensor, Tensor, Tensor)",
      tags);
  m.def(
      "verify_drafts(Tensor logits, Tensor row_offsets, Tensor draft_ids, Tensor draft_log_probs, "
      "Tensor draft_index, Tensor seeds, Tensor positions, Tensor temperatures, Tensor top_k, Tensor top_p, "
      "Tensor min_p, Tensor penalties, Tensor history_offsets, Tensor history_ids, Tensor history_counts, "
      "Tensor bias_offsets, Tensor bias_ids, Tensor bias, Tensor masks, Tensor mask_index, int forced_top_k, "
      "int num_logprobs, bool raw_logprobs) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
      tags);
}

TORCH_LIBRARY_IMPL(deepinfer, CPU, m) {
  m.impl("sample", sample_op);
  m.impl("verify_drafts", verify_drafts_op);
}

}  // namespace deepinfer
