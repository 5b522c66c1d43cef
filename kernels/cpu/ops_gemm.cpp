// Registration of the linear layers and the experts.

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

Tensor linear_fp8_op(const Tensor& x, const Tensor& weight, const Tensor& scale, bool quantize_activation) {
  const char* op = "linear_fp8";
  check_floats(op, "x", x);
  check_shape(op, "x", x, {kAny, kAny, kAny});
  int64_t rows = x.size(0), groups = x.size(1);
  ScaledWeight matrix = fp8_weight(op, "weight", weight, "scale", scale, groups, x.size(2));
  if (quantize_activation) last_multiple(op, "x", x, kFp8Group);
  Tensor y = empty({rows, groups, matrix.outputs}, x.scalar_type());
  by_dtype(x.scalar_type(), op, [&](auto* t) {
    linear_fp8(in<TYPE(t)>(x), matrix, quantize_activation, rows, out<TYPE(t)>(y));
  });
  return y;
}

Tensor linear_fp4_op(const Tensor& x, const Tensor& weight, const Tensor& scale, const Tensor& expert_ids,
                     bool quantize_activation) {
  const char* op = "linear_fp4";
  check_floats(op, "x", x);
  check_shape(op, "x", x, {kAny, kAny, kAny});
  int64_t rows = x.size(0), vectors = x.size(1), inputs = last_multiple(op, "x", x, kFp8Group);
  ScaledWeight matrix = fp4_weight(op, "weight", weight, "scale", scale, inputs);
  const int64_t* ids = expert_list(op, expert_ids, rows, matrix.count);
  int64_t picks = expert_ids.size(1);
  TORCH_CHECK(vectors == 1 || vectors == picks, op, ": x must have 1 or ", picks, " vectors per row, got ",
              vectors);
  Tensor y = empty({rows, picks, matrix.outputs}, x.scalar_type());
  by_dtype(x.scalar_type(), op, [&](auto* t) {
    linear_fp4(in<TYPE(t)>(x), matrix, ids, quantize_activation, rows, vectors, picks, out<TYPE(t)>(y));
  });
  return y;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(deepinfer, m) {
  const std::vector<at::Tag> tags = op_tags();
  m.def("linear(Tensor x, Tensor weight, ScalarType out_dtype) -> Tensor", tags);
  m.def("linear_fp8(Tensor x, Tensor weight, Tensor scale, bool quantize_activation) -> Tensor", tags);
  m.def(
      "linear_fp4(Tensor x, Tensor weight, Tensor scale, Tensor expert_ids, bool quantize_activation) "
      "-> Tensor",
      tags);
}

TORCH_LIBRARY_IMPL(deepinfer, CPU, m) {
  m.impl("linear", linear_op);
  m.impl("linear_fp8", linear_fp8_op);
  m.impl("linear_fp4", linear_fp4_op);
}

}  // namespace deepinfer
