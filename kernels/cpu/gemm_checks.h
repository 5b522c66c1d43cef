// Argument checks for weights that may be plain or packed.
#pragma once

#include "gemm.h"
#include "torch_checks.h"

namespace deepinfer {

// A weight of the `linear` kind: [N, K], or packed [N/16, K, 16]; K must be `inputs`.
inline LinearWeight linear_weight(const char* op, const char* name, const Tensor& weight, int64_t inputs) {
  check_floats(op, name, weight);
  bool is_bf16 = weight.scalar_type() == at::kBFloat16, packed = weight.dim() == 3;
  if (packed) {
    check_shape(op, name, weight, {kAny, inputs, kPanel});
    TORCH_CHECK(!is_bf16 || inputs % 2 == 0, op, ": ", name, " is packed in pairs of inputs, got ", inputs);
  } else {
    check_shape(op, name, weight, {kAny, inputs});
  }
  int64_t outputs = packed ? weight.size(0) * kPanel : weight.size(0);
  return {weight.const_data_ptr(), is_bf16, packed, outputs, inputs};
}

}  // namespace deepinfer
