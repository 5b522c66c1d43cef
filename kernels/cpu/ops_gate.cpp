// Registration of the router.

#include "gate.h"
#include "gemm_checks.h"

namespace deepinfer {

namespace {

std::tuple<Tensor, Tensor, Tensor> moe_gate_op(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                               const Tensor& positions, int64_t top_k, bool norm_topk_prob,
                                               double routed_scaling_factor) {
  const char* op = "moe_gate";
  check_floats(op, "x", x);
  check_shape(op, "x", x, {kAny, kAny});
  int64_t rows = x.size(0);
  LinearWeight matrix = linear_weight(op, "weight", weight, x.size(1));
  check_dtype(op, "bias", bias, {at::kFloat});
  check_shape(op, "bias", bias, {matrix.outputs});
  check_dtype(op, "positions", positions, {at::kLong});
  check_shape(op, "positions", positions, {rows});
  TORCH_CHECK(top_k >= 1 && top_k <= matrix.outputs, op, ": top_k must lie in 1 .. ", matrix.outputs,
              ", got ", top_k);
  Tensor logits = empty({rows, matrix.outputs}, at::kFloat);
  Tensor ids = empty({rows, top_k}, at::kLong), weights = empty({rows, top_k}, at::kFloat);
  GateSettings settings{top_k, norm_topk_prob, float(routed_scaling_factor)};
  by_dtype(x.scalar_type(), op, [&](auto* t) {
    moe_gate(in<TYPE(t)>(x), matrix, in<float>(bias), in<int64_t>(positions), settings, rows,
             out<float>(logits), out<int64_t>(ids), out<float>(weights));
  });
  return {logits, ids, weights};
}

std::tuple<Tensor, Tensor, Tensor> moe_hash_gate_op(const Tensor& x, const Tensor& weight,
                                                    const Tensor& table, const Tensor& token_ids,
                                                    const Tensor& positions, bool norm_topk_prob,
                                                    double routed_scaling_factor) {
  const char* op = "moe_hash_gate";
  check_floats(op, "x", x);
  check_shape(op, "x", x, {kAny, kAny});
  int64_t rows = x.size(0);
  LinearWeight matrix = linear_weight(op, "weight", weight, x.size(1));
  check_dtype(op, "table", table, {at::kLong});
  check_shape(op, "table", table, {kAny, kAny});
  for (auto [name, t] : {std::pair{"token_ids", &token_ids}, {"positions", &positions}}) {
    check_dtype(op, name, *t, {at::kLong});
    check_shape(op, name, *t, {rows});
  }
  int64_t top_k = table.size(1), tokens = table.size(0);
  TORCH_CHECK(top_k >= 1 && top_k <= matrix.outputs, op, ": table must have 1 to ", matrix.outputs,
              " experts per token, got ", top_k);
  const int64_t *ids_of = in<int64_t>(table), *token = in<int64_t>(token_ids), *place = in<int64_t>(positions);
  for (int64_t row = 0; row < rows; ++row) {
    if (place[row] < 0) continue;
    TORCH_CHECK(token[row] >= 0 && token[row] < tokens, op, ": token_ids must lie in 0 .. ", tokens - 1,
                ", got ", token[row]);
    for (int64_t k = 0; k < top_k; ++k) {
      int64_t id = ids_of[token[row] * top_k + k];
      TORCH_CHECK(id >= 0 && id < matrix.outputs, op, ": table must hold ids in 0 .. ", matrix.outputs - 1,
                  ", got ", id);
    }
  }
  Tensor logits = empty({rows, matrix.outputs}, at::kFloat);
  Tensor ids = empty({rows, top_k}, at::kLong), weights = empty({rows, top_k}, at::kFloat);
  GateSettings settings{top_k, norm_topk_prob, float(routed_scaling_factor)};
  by_dtype(x.scalar_type(), op, [&](auto* t) {
    moe_hash_gate(in<TYPE(t)>(x), matrix, ids_of, token, place, settings, rows, out<float>(logits),
                  out<int64_t>(ids), out<float>(weights));
  });
  return {logits, ids, weights};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(deepinfer, m) {
  const std::vector<at::Tag> tags = op_tags();
  m.def(
      "moe_gate(Tensor x, Tensor weight, Tensor bias, Tensor positions, int top_k, bool norm_topk_prob, "
      "float routed_scaling_factor) -> (Tensor logits, Tensor expert_ids, Tensor expert_weights)",
      tags);
  m.def(
      "moe_hash_gate(Tensor x, Tensor weight, Tensor table, Tensor token_ids, Tensor positions, "
      "bool norm_topk_prob, float routed_scaling_factor) "
      "-> (Tensor logits, Tensor expert_ids, Tensor expert_weights)",
      tags);
}

TORCH_LIBRARY_IMPL(deepinfer, CPU, m) {
  m.impl("moe_gate", moe_gate_op);
  m.impl("moe_hash_gate", moe_hash_gate_op);
}

}  // namespace deepinfer
