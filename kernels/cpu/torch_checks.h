// What the files that register operations share: argument checks, allocation, dispatch over dtypes.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "kernels.h"

namespace deepinfer {

using at::ScalarType;
using at::Tensor;

constexpr int64_t kAny = -1;

inline void check_dtype(const char* op, const char* name, const Tensor& t,
                        std::initializer_list<ScalarType> allowed) {
  bool found = false;
  for (ScalarType dtype : allowed) found |= t.scalar_type() == dtype;
  TORCH_CHECK(found, op, ": ", name, " has an unsupported dtype, ", c10::toString(t.scalar_type()));
  TORCH_CHECK(t.is_contiguous(), op, ": ", name, " must be contiguous, got strides ", t.strides());
}

inline void check_shape(const char* op, const char* name, const Tensor& t,
                        std::initializer_list<int64_t> shape) {
  bool same = t.dim() == int64_t(shape.size());
  int64_t axis = 0;
  for (int64_t size : shape) {
    same = same && (size == kAny || t.size(axis) == size);
    ++axis;
  }
  TORCH_CHECK(same, op, ": ", name, " must have shape ", at::IntArrayRef(shape), " (-1: any), got ",
              t.sizes());
}

inline void check_floats(const char* op, const char* name, const Tensor& t) {
  check_dtype(op, name, t, {at::kBFloat16, at::kFloat});
}

inline void check_bytes(const char* op, const char* name, const Tensor& t) {
  check_dtype(op, name, t, {at::kByte});
}

inline int64_t last_multiple(const char* op, const char* name, const Tensor& t, int64_t multiple) {
  TORCH_CHECK(t.dim() > 0, op, ": ", name, " must have at least one axis");
  int64_t size = t.size(-1);
  TORCH_CHECK(size > 0 && size % multiple == 0, op, ": last axis of ", name,
              " must be a positive multiple of ", multiple, ", got ", size);
  return size;
}

inline Tensor empty(at::IntArrayRef shape, ScalarType dtype) {
  return at::empty(shape, at::TensorOptions().dtype(dtype));
}

inline Tensor empty_with_last(const Tensor& like, int64_t last, ScalarType dtype) {
  std::vector<int64_t> shape = like.sizes().vec();
  shape.back() = last;
  return empty(shape, dtype);
}

template <class T>
const T* in(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}

template <class T>
T* out(Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

// Calls body with a null pointer to bf16 or float, by dtype.
template <class Body>
void by_dtype(ScalarType dtype, const char* op, const Body& body) {
  TORCH_CHECK(dtype == at::kBFloat16 || dtype == at::kFloat, op,
              ": out_dtype must be bfloat16 or float32, got ", c10::toString(dtype));
  dtype == at::kBFloat16 ? body(static_cast<bf16*>(nullptr)) : body(static_cast<float*>(nullptr));
}

inline ScaleFormat scale_format_of(const char* op, c10::string_view name) {
  TORCH_CHECK(name == "e8m0" || name == "e4m3", op, ": scale_format must be 'e8m0' or 'e4m3', got '", name,
              "'");
  return name == "e8m0" ? ScaleFormat::kE8M0 : ScaleFormat::kE4M3;
}

#define TYPE(pointer) std::remove_pointer_t<decltype(pointer)>

// Exact strides: a compiler may not hand over another layout than the traced one.
inline std::vector<at::Tag> op_tags() { return {at::Tag::pt2_compliant_tag, at::Tag::needs_exact_strides}; }

}  // namespace deepinfer
