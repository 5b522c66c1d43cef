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

}  // namespace

TORCH_LIBRARY_FRAGMENT(deepinfer, m) {
  const std::vector<at::Tag> tags = op_tags();
  m.def(
      "moe_gate(Tensor x, Tensor weight, Tensor bias, Tensor positions, int top_k, bool norm_topk_prob, "
      "float routed_scaling_factor) -> (Tensor logits, Tensor expert_ids, Tensor expert_weights)",
      tags);
}

TORCH_LIBRARY_IMPL(deepinfer, CPU, m) { m.impl("moe_gate", moe_gate_op); }

}  // namespace deepinfer
