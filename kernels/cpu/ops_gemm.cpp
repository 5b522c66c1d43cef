// Registration of the linear layers and the experts.

#include "experts.h"
#include "gemm_checks.h"

namespace deepinfer {

namespace {

Tensor linear_op(const Tensor& x, const Tensor& weight, ScalarType out_dtype) {
  check_floats("linear", "x", x);
  check_shape("linear", "x", x, {kAny, kAny});
  LinearWeight matrix = linear_weight("linear", "weight", weight, x.size(1));
  int64_t rows = x.size(0);
  Tensor y = empty({rows, matrix.outputs}, out_dtype);
  by_dtype(x.scalar_type(), "linear", [&](auto* t) {
    by_dtype(out_dtype, "linear",
             [&](auto* o) { linear(in<TYPE(t)>(x), matrix, rows, out<TYPE(o)>(y)); });
  });
  return y;
}

// What the kernels take for "quantise in groups of so many"; inputs must be whole groups.
int64_t quantised_group(const char* op, bool quantize, int64_t group, int64_t inputs) {
  TORCH_CHECK(group > 0 && group % kFp8Group == 0, op, ": activation_group must be a positive multiple of 32, got ",
              group);
  TORCH_CHECK(!quantize || (inputs > 0 && inputs % group == 0), op, ": inputs must be a positive multiple of ",
              group, ", got ", inputs);
  return quantize ? group : 0;
}

Tensor linear_fp8_op(const Tensor& x, const Tensor& weight, const Tensor& scale, bool quantize_activation,
                     int64_t activation_group) {
  const char* op = "linear_fp8";
  check_floats(op, "x", x);
  check_shape(op, "x", x, {kAny, kAny, kAny});
  int64_t rows = x.size(0), groups = x.size(1);
  ScaledWeight matrix = fp8_weight(op, "weight", weight, "scale", scale, groups, x.size(2));
  int64_t group = quantised_group(op, quantize_activation, activation_group, x.size(2));
  Tensor y = empty({rows, groups, matrix.outputs}, x.scalar_type());
  by_dtype(x.scalar_type(), op, [&](auto* t) {
    linear_fp8(in<TYPE(t)>(x), matrix, group, rows, out<TYPE(t)>(y));
  });
  return y;
}

Tensor linear_fp4_op(const Tensor& x, const Tensor& weight, const Tensor& scale, const Tensor& expert_ids,
                     bool quantize_activation, int64_t activation_group) {
  const char* op = "linear_fp4";
  check_floats(op, "x", x);
  check_shape(op, "x", x, {kAny, kAny, kAny});
  int64_t rows = x.size(0), vectors = x.size(1), inputs = last_multiple(op, "x", x, kFp8Group);
  ScaledWeight matrix = fp4_weight(op, "weight", weight, "scale", scale, inputs);
  const int64_t* ids = expert_list(op, expert_ids, rows, matrix.count);
  int64_t picks = expert_ids.size(1);
  int64_t group = quantised_group(op, quantize_activation, activation_group, inputs);
  TORCH_CHECK(vectors == 1 || vectors == picks, op, ": x must have 1 or ", picks, " vectors per row, got ",
              vectors);
  Tensor y = empty({rows, picks, matrix.outputs}, x.scalar_type());
  by_dtype(x.scalar_type(), op, [&](auto* t) {
    linear_fp4(in<TYPE(t)>(x), matrix, ids, group, rows, vectors, picks, out<TYPE(t)>(y));
  });
  return y;
}

// What both kinds of experts demand of their second matrix, whose inputs are half the outputs of the first.
int64_t inner_width(const char* op, const ScaledWeight& w13) {
  TORCH_CHECK(w13.outputs > 0 && w13.outputs % (2 * kFp8Group) == 0, op,
              ": outputs of w13 must be a positive multiple of 64, got ", w13.outputs);
  return w13.outputs / 2;
}

void check_second(const char* op, const ScaledWeight& w13, const ScaledWeight& w2) {
  TORCH_CHECK(w2.count == w13.count && w2.outputs == w13.inputs, op, ": w2 must have ", w13.count,
              " experts with ", w13.inputs, " outputs, got ", w2.count, " with ", w2.outputs);
}

Tensor moe_experts_op(const Tensor& x, const Tensor& expert_ids, const Tensor& expert_weights,
                      const Tensor& w13, const Tensor& w13_scale, const Tensor& w2, const Tensor& w2_scale,
                      double swiglu_limit, bool quantize, int64_t activation_group) {
  const char* op = "moe_experts";
  check_floats(op, "x", x);
  check_shape(op, "x", x, {kAny, kAny});
  int64_t rows = x.size(0), width = last_multiple(op, "x", x, kFp8Group);
  ScaledWeight first = fp4_weight(op, "w13", w13, "w13_scale", w13_scale, width);
  ScaledWeight second = fp4_weight(op, "w2", w2, "w2_scale", w2_scale, inner_width(op, first));
  check_second(op, first, second);
  const int64_t* ids = expert_list(op, expert_ids, rows, first.count);
  int64_t picks = expert_ids.size(1);
  TORCH_CHECK(picks > 0, op, ": expert_ids must name at least one expert per row");
  check_dtype(op, "expert_weights", expert_weights, {at::kFloat});
  check_shape(op, "expert_weights", expert_weights, {rows, picks});
  quantised_group(op, quantize, activation_group, second.inputs);
  Tensor y = empty({rows, width}, at::kFloat);
  ExpertWeights experts{first, second, float(swiglu_limit),
                        quantised_group(op, quantize, activation_group, width)};
  by_dtype(x.scalar_type(), op, [&](auto* t) {
    moe_experts(in<TYPE(t)>(x), ids, in<float>(expert_weights), experts, rows, picks, out<float>(y));
  });
  return y;
}

Tensor shared_expert_op(const Tensor& x, const Tensor& routed, const Tensor& w13, const Tensor& w13_scale,
                        const Tensor& w2, const Tensor& w2_scale, double swiglu_limit, bool quantize, int64_t activation_group) {
  const char* op = "shared_expert";
  check_floats(op, "x", x);
  check_shape(op, "x", x, {kAny, kAny});
  int64_t rows = x.size(0), width = last_multiple(op, "x", x, kFp8Group);
  check_dtype(op, "routed", routed, {at::kFloat});
  check_shape(op, "routed", routed, {rows, width});
  ScaledWeight first = fp8_weight(op, "w13", w13, "w13_scale", w13_scale, 1, width);
  ScaledWeight second = fp8_weight(op, "w2", w2, "w2_scale", w2_scale, 1, inner_width(op, first));
  check_second(op, first, second);
  quantised_group(op, quantize, activation_group, second.inputs);
  int64_t group = quantised_group(op, quantize, activation_group, width);
  Tensor y = empty({rows, width}, x.scalar_type());
  by_dtype(x.scalar_type(), op, [&](auto* t) {
    shared_expert(in<TYPE(t)>(x), in<float>(routed), {first, second, float(swiglu_limit), group}, rows,
                  out<TYPE(t)>(y));
  });
  return y;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(deepinfer, m) {
  const std::vector<at::Tag> tags = op_tags();
  m.def("linear(Tensor x, Tensor weight, ScalarType out_dtype) -> Tensor", tags);
  m.def(
      "linear_fp8(Tensor x, Tensor weight, Tensor scale, bool quantize_activation, "
      "int activation_group=32) -> Tensor",
      tags);
  m.def(
      "linear_fp4(Tensor x, Tensor weight, Tensor scale, Tensor expert_ids, bool quantize_activation, "
      "int activation_group=32) -> Tensor",
      tags);
  m.def(
      "moe_experts(Tensor x, Tensor expert_ids, Tensor expert_weights, Tensor w13, Tensor w13_scale, "
      "Tensor w2, Tensor w2_scale, float swiglu_limit, bool quantize, "
      "int activation_group=32) -> Tensor",
      tags);
  m.def(
      "shared_expert(Tensor x, Tensor routed, Tensor w13, Tensor w13_scale, Tensor w2, Tensor w2_scale, "
      "float swiglu_limit, bool quantize, "
      "int activation_group=32) -> Tensor",
      tags);
}

TORCH_LIBRARY_IMPL(deepinfer, CPU, m) {
  m.impl("linear", linear_op);
  m.impl("linear_fp8", linear_fp8_op);
  m.impl("linear_fp4", linear_fp4_op);
  m.impl("moe_experts", moe_experts_op);
  m.impl("shared_expert", shared_expert_op);
}

}  // namespace deepinfer
