// Registration of the operations on residual streams and of the rotation.

#include "hyper_connections.h"
#include "rope.h"
#include "torch_checks.h"

namespace deepinfer {

namespace {

Tensor rope_op(const Tensor& x, const Tensor& table, const Tensor& positions, bool inverse) {
  const char* op = "rope";
  check_floats(op, "x", x);
  check_dtype(op, "table", table, {at::kFloat});
  check_dtype(op, "positions", positions, {at::kLong});
  TORCH_CHECK(x.dim() == 2 || x.dim() == 3, op, ": x must have two or three axes, got ", x.sizes());
  int64_t rows = x.size(0), size = x.size(-1), heads = x.dim() == 3 ? x.size(1) : 1;
  check_shape(op, "table", table, {kAny, kAny});
  check_shape(op, "positions", positions, {rows});
  int64_t lines = table.size(0), rotated = table.size(1);
  TORCH_CHECK(rotated > 0 && rotated % 2 == 0, op, ": table must have an even number of columns, got ",
              rotated);
  TORCH_CHECK(rotated <= size && rotated <= kMaxRotated, op, ": table has ", rotated,
              " columns, more than the last axis of x, ", size, ", or than ", kMaxRotated);
  const int64_t* at = in<int64_t>(positions);
  for (int64_t row = 0; row < rows; ++row) {
    TORCH_CHECK(at[row] < lines && lines > 0, op, ": positions must lie below ", lines, ", got ", at[row]);
  }
  Tensor y = empty(x.sizes(), x.scalar_type());
  by_dtype(x.scalar_type(), op, [&](auto* t) {
    rope(in<TYPE(t)>(x), in<float>(table), at, inverse, rows, heads, size, rotated, out<TYPE(t)>(y));
  });
  return y;
}

Tensor mhc_collapse_op(const Tensor& residual, const Tensor& pre, const Tensor& norm_weight, double eps) {
  const char* op = "mhc_collapse";
  check_floats(op, "residual", residual);
  check_dtype(op, "pre", pre, {at::kFloat});
  check_floats(op, "norm_weight", norm_weight);
  check_shape(op, "residual", residual, {kAny, kAny, kAny});
  int64_t rows = residual.size(0), streams = residual.size(1), width = residual.size(2);
  TORCH_CHECK(streams >= 1, op, ": residual must have at least 1 stream, got 0");
  check_shape(op, "pre", pre, {rows, streams});
  check_shape(op, "norm_weight", norm_weight, {width});
  Tensor y = empty({rows, width}, residual.scalar_type());
  by_dtype(residual.scalar_type(), op, [&](auto* t) {
    by_dtype(norm_weight.scalar_type(), op, [&](auto* w) {
      mhc_collapse(in<TYPE(t)>(residual), in<float>(pre), in<TYPE(w)>(norm_weight), float(eps), rows, streams,
                   width, out<TYPE(t)>(y));
    });
  });
  return y;
}

Tensor mhc_expand_op(const Tensor& y, const Tensor& residual, const Tensor& post, const Tensor& comb) {
  const char* op = "mhc_expand";
  check_floats(op, "y", y);
  check_dtype(op, "residual", residual, {y.scalar_type()});
  check_dtype(op, "post", post, {at::kFloat});
  check_dtype(op, "comb", comb, {at::kFloat});
  check_shape(op, "y", y, {kAny, kAny});
  int64_t rows = y.size(0), width = y.size(1);
  check_shape(op, "residual", residual, {rows, kAny, width});
  int64_t streams = residual.size(1);
  TORCH_CHECK(streams >= 1, op, ": residual must have at least 1 stream, got 0");
  check_shape(op, "post", post, {rows, streams});
  check_shape(op, "comb", comb, {rows, streams, streams});
  Tensor result = empty(residual.sizes(), residual.scalar_type());
  by_dtype(y.scalar_type(), op, [&](auto* t) {
    mhc_expand(in<TYPE(t)>(y), in<TYPE(t)>(residual), in<float>(post), in<float>(comb), rows, streams, width,
               out<TYPE(t)>(result));
  });
  return result;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(deepinfer, m) {
  const std::vector<at::Tag> tags = op_tags();
  m.def("rope(Tensor x, Tensor table, Tensor positions, bool inverse) -> Tensor", tags);
  m.def("mhc_collapse(Tensor residual, Tensor pre, Tensor norm_weight, float eps) -> Tensor", tags);
  m.def("mhc_expand(Tensor y, Tensor residual, Tensor post, Tensor comb) -> Tensor", tags);
}

TORCH_LIBRARY_IMPL(deepinfer, CPU, m) {
  m.impl("rope", rope_op);
  m.impl("mhc_collapse", mhc_collapse_op);
  m.impl("mhc_expand", mhc_expand_op);
}

}  // namespace deepinfer
