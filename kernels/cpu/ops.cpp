// Registration with torch: schemas, argument checks, allocation of results. Other files of operations look alike.
//
// Schemas are the same text as in the Op records of the Python side; the loader compares them.

#include <ATen/Parallel.h>

#include "torch_checks.h"

namespace deepinfer {

void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
  at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) { body(begin, end); });
}

namespace {

Tensor rms_norm_op(const Tensor& x, const Tensor& weight, double eps) {
  check_floats("rms_norm", "x", x);
  check_floats("rms_norm", "weight", weight);
  TORCH_CHECK(x.dim() > 0, "rms_norm: x must have at least one axis");
  int64_t size = x.size(-1);
  check_shape("rms_norm", "weight", weight, {size});
  Tensor y = empty(x.sizes(), x.scalar_type());
  if (x.numel() == 0) return y;
  by_dtype(x.scalar_type(), "rms_norm", [&](auto* t) {
    by_dtype(weight.scalar_type(), "rms_norm", [&](auto* w) {
      rms_norm(in<TYPE(t)>(x), in<TYPE(w)>(weight), float(eps), x.numel() / size, size, out<TYPE(t)>(y));
    });
  });
  return y;
}

std::tuple<Tensor, Tensor, Tensor> mhc_mix_op(const Tensor& residual, const Tensor& fn, const Tensor& base,
                                              const Tensor& scale, int64_t sinkhorn_iters, double rms_eps,
                                              double hc_eps) {
  const char* op = "mhc_mix";
  check_floats(op, "residual", residual);
  check_dtype(op, "fn", fn, {at::kFloat});
  check_dtype(op, "base", base, {at::kFloat});
  check_dtype(op, "scale", scale, {at::kFloat});
  check_shape(op, "residual", residual, {kAny, kAny, kAny});
  int64_t rows = residual.size(0), streams = residual.size(1), width = residual.size(2);
  TORCH_CHECK(streams >= 1 && streams <= 16, op, ": residual must have 1 to 16 streams, got ", streams);
  int64_t outputs = (2 + streams) * streams;
  check_shape(op, "fn", fn, {outputs, streams * width});
  check_shape(op, "base", base, {outputs});
  check_shape(op, "scale", scale, {3});
  TORCH_CHECK(sinkhorn_iters >= 1, op, ": sinkhorn_iters must be at least 1, got ", sinkhorn_iters);
  Tensor pre = empty({rows, streams}, at::kFloat), post = empty({rows, streams}, at::kFloat);
  Tensor comb = empty({rows, streams, streams}, at::kFloat);
  MixSettings settings{sinkhorn_iters, float(rms_eps), float(hc_eps)};
  by_dtype(residual.scalar_type(), op, [&](auto* t) {
    mhc_mix(in<TYPE(t)>(residual), in<float>(fn), in<float>(base), in<float>(scale), settings, rows, streams,
            width, out<float>(pre), out<float>(post), out<float>(comb));
  });
  return {pre, post, comb};
}

Tensor quantize_fp8_op(const Tensor& x) {
  check_floats("quantize_fp8", "x", x);
  int64_t size = last_multiple("quantize_fp8", "x", x, kFp8Group);
  Tensor record = empty_with_last(x, size + size / kFp8Group, at::kByte);
  by_dtype(x.scalar_type(), "quantize_fp8", [&](auto* t) {
    quantize_fp8(in<TYPE(t)>(x), x.numel() / size, size, out<uint8_t>(record));
  });
  return record;
}

Tensor dequantize_fp8_op(const Tensor& record, ScalarType out_dtype) {
  check_bytes("dequantize_fp8", "record", record);
  int64_t bytes = last_multiple("dequantize_fp8", "record", record, kFp8Group + 1);
  int64_t size = bytes / (kFp8Group + 1) * kFp8Group;
  Tensor y = empty_with_last(record, size, out_dtype);
  by_dtype(out_dtype, "dequantize_fp8", [&](auto* t) {
    dequantize_fp8(in<uint8_t>(record), record.numel() / bytes, size, out<TYPE(t)>(y));
  });
  return y;
}

Tensor quantize_fp4_op(const Tensor& x, c10::string_view scale_format) {
  ScaleFormat format = scale_format_of("quantize_fp4", scale_format);
  check_floats("quantize_fp4", "x", x);
  int64_t group = format == ScaleFormat::kE8M0 ? 32 : 16;
  int64_t size = last_multiple("quantize_fp4", "x", x, group);
  Tensor record = empty_with_last(x, size / 2 + size / group, at::kByte);
  by_dtype(x.scalar_type(), "quantize_fp4", [&](auto* t) {
    quantize_fp4(in<TYPE(t)>(x), format, x.numel() / size, size, out<uint8_t>(record));
  });
  return record;
}

Tensor dequantize_fp4_op(const Tensor& record, c10::string_view scale_format, ScalarType out_dtype) {
  ScaleFormat format = scale_format_of("dequantize_fp4", scale_format);
  check_bytes("dequantize_fp4", "record", record);
  int64_t group = format == ScaleFormat::kE8M0 ? 32 : 16;
  int64_t bytes = last_multiple("dequantize_fp4", "record", record, group / 2 + 1);
  int64_t size = bytes / (group / 2 + 1) * group;
  Tensor y = empty_with_last(record, size, out_dtype);
  by_dtype(out_dtype, "dequantize_fp4", [&](auto* t) {
    dequantize_fp4(in<uint8_t>(record), format, record.numel() / bytes, size, out<TYPE(t)>(y));
  });
  return y;
}

}  // namespace

TORCH_LIBRARY(deepinfer, m) {
  const std::vector<at::Tag> tags = op_tags();
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", tags);
  m.def(
      "mhc_mix(Tensor residual, Tensor fn, Tensor base, Tensor scale, int sinkhorn_iters, float rms_eps, "
      "float hc_eps) -> (Tensor, Tensor, Tensor)",
      tags);
  m.def("quantize_fp8(Tensor x) -> Tensor", tags);
  m.def("dequantize_fp8(Tensor record, ScalarType out_dtype) -> Tensor", tags);
  m.def("quantize_fp4(Tensor x, str scale_format) -> Tensor", tags);
  m.def("dequantize_fp4(Tensor record, str scale_format, ScalarType out_dtype) -> Tensor", tags);
}

TORCH_LIBRARY_IMPL(deepinfer, CPU, m) {
  m.impl("rms_norm", rms_norm_op);
  m.impl("mhc_mix", mhc_mix_op);
  m.impl("quantize_fp8", quantize_fp8_op);
  m.impl("dequantize_fp8", dequantize_fp8_op);
  m.impl("quantize_fp4", quantize_fp4_op);
  m.impl("dequantize_fp4", dequantize_fp4_op);
}

}  // namespace deepinfer
