// Registration of quantize_tail, dequantize_tail and hadamard.

#include <vector>

#include "tail_records.h"
#include "torch_checks.h"

namespace deepinfer {

namespace {

int64_t rows_at_once(int64_t size) { return 8192 / (size + 1) + 1; }

void check_record_tail(const char* op, int64_t size, int64_t tail) {
  TORCH_CHECK(tail > 0 && tail < size, op, ": tail must lie in 1 .. ", size - 1, ", got ", tail);
}

Tensor quantize_tail_op(const Tensor& x, int64_t tail) {
  const char* op = "quantize_tail";
  check_floats(op, "x", x);
  TORCH_CHECK(x.dim() > 0, op, ": x must have at least one axis");
  int64_t size = x.size(-1);
  check_record_tail(op, size, tail);
  int64_t bytes = tail_record_bytes(size, tail);
  Tensor record = empty_with_last(x, bytes, at::kByte);
  by_dtype(x.scalar_type(), op, [&](auto* t) {
    const auto* from = in<TYPE(t)>(x);
    uint8_t* to = out<uint8_t>(record);
    parallel_for(x.numel() / size, rows_at_once(size), [=](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        encode_tail_record(from + row * size, size, tail, to + row * bytes);
      }
    });
  });
  return record;
}

Tensor dequantize_tail_op(const Tensor& record, int64_t size, int64_t tail, ScalarType out_dtype) {
  const char* op = "dequantize_tail";
  check_bytes(op, "record", record);
  TORCH_CHECK(record.dim() > 0, op, ": record must have at least one axis");
  check_record_tail(op, size, tail);
  int64_t bytes = tail_record_bytes(size, tail);
  TORCH_CHECK(record.size(-1) == bytes, op, ": record must have ", bytes, " bytes, got ", record.size(-1));
  Tensor y = empty_with_last(record, size, out_dtype);
  by_dtype(out_dtype, op, [&](auto* t) {
    const uint8_t* from = in<uint8_t>(record);
    auto* to = out<TYPE(t)>(y);
    parallel_for(record.numel() / bytes, rows_at_once(size), [=](int64_t begin, int64_t end) {
      std::vector<float> values(static_cast<size_t>(size));
      for (int64_t row = begin; row < end; ++row) {
        decode_tail_record(from + row * bytes, size, tail, values.data());
        for (int64_t i = 0; i < size; ++i) round_to(values[size_t(i)], to[row * size + i]);
      }
    });
  });
  return y;
}

Tensor hadamard_op(const Tensor& x) {
  const char* op = "hadamard";
  check_floats(op, "x", x);
  TORCH_CHECK(x.dim() > 0, op, ": x must have at least one axis");
  int64_t size = x.size(-1);
  TORCH_CHECK(size > 0 && (size & (size - 1)) == 0, op, ": last axis of x must be a power of two, got ", size);
  Tensor y = empty(x.sizes(), x.scalar_type());
  by_dtype(x.scalar_type(), op, [&](auto* t) {
    const auto* from = in<TYPE(t)>(x);
    auto* to = out<TYPE(t)>(y);
    parallel_for(x.numel() / size, rows_at_once(size), [=](int64_t begin, int64_t end) {
      std::vector<float> values(static_cast<size_t>(size));
      for (int64_t row = begin; row < end; ++row) {
        hadamard_row(from + row * size, size, values.data(), to + row * size);
      }
    });
  });
  return y;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(deepinfer, m) {
  const std::vector<at::Tag> tags = op_tags();
  m.def("quantize_tail(Tensor x, int tail) -> Tensor", tags);
  m.def("dequantize_tail(Tensor record, int size, int tail, ScalarType out_dtype) -> Tensor", tags);
  m.def("hadamard(Tensor x) -> Tensor", tags);
}

TORCH_LIBRARY_IMPL(deepinfer, CPU, m) {
  m.impl("quantize_tail", quantize_tail_op);
  m.impl("dequantize_tail", dequantize_tail_op);
  m.impl("hadamard", hadamard_op);
}

}  // namespace deepinfer
