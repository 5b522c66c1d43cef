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

inline ScaledWeight packed_weight(const char* op, const char* name, const Tensor& weight,
                                  const char* scale_name, const Tensor& scale, int64_t count, int64_t inputs,
                                  int64_t panel_inputs) {
  TORCH_CHECK(inputs > 0 && inputs % kFp8Group == 0, op, ": inputs of the packed ", name,
              " must be a positive multiple of 32, got ", inputs);
  check_shape(op, name, weight, {count, kAny, panel_inputs, kPanel});
  int64_t panels = weight.size(1);
  check_shape(op, scale_name, scale, {weight.size(0), panels, inputs / kFp8Group, kPanel});
  return {weight.const_data_ptr<uint8_t>(), scale.const_data_ptr<uint8_t>(), true, weight.size(0),
          panels * kPanel, inputs};
}

// Unquantised: [G | E, N, K], or packed [G | E, N/16, K, 16], with scale [0, 0, 0].
inline ScaledWeight unquantised_weight(const char* op, const char* name, const Tensor& weight,
                                       const char* scale_name, const Tensor& scale, int64_t count,
                                       int64_t inputs) {
  check_floats(op, name, weight);
  check_bytes(op, scale_name, scale);
  check_shape(op, scale_name, scale, {0, 0, 0});
  bool is_bf16 = weight.scalar_type() == at::kBFloat16, packed = weight.dim() == 4;
  if (packed) {
    check_shape(op, name, weight, {count, kAny, inputs, kPanel});
    TORCH_CHECK(!is_bf16 || inputs % 2 == 0, op, ": ", name, " is packed in pairs of inputs, got ", inputs);
  } else {
    check_shape(op, name, weight, {count, kAny, inputs});
  }
  return {static_cast<const uint8_t*>(weight.const_data_ptr()), nullptr, packed, weight.size(0),
          weight.size(1) * (packed ? kPanel : 1), inputs, is_bf16 ? Storage::kBf16 : Storage::kFloat};
}

// FP8: [G, N, K] with scale [G, ceil(N/32), ceil(K/32)], or packed [G, N/16, K, 16] with [G, N/16, K/32, 16].
inline ScaledWeight fp8_weight(const char* op, const char* name, const Tensor& weight, const char* scale_name,
                               const Tensor& scale, int64_t groups, int64_t inputs) {
  if (weight.is_floating_point()) {
    return unquantised_weight(op, name, weight, scale_name, scale, groups, inputs);
  }
  check_bytes(op, name, weight);
  check_bytes(op, scale_name, scale);
  if (weight.dim() == 4) return packed_weight(op, name, weight, scale_name, scale, groups, inputs, inputs);
  check_shape(op, name, weight, {groups, kAny, inputs});
  int64_t outputs = weight.size(1);
  check_shape(op, scale_name, scale, {weight.size(0), (outputs + 31) / 32, (inputs + 31) / 32});
  return {weight.const_data_ptr<uint8_t>(), scale.const_data_ptr<uint8_t>(), false, weight.size(0), outputs,
          inputs};
}

// FP4: [E, N, K/2] with scale [E, N, K/32], or packed [E, N/16, K/2, 16] with [E, N/16, K/32, 16].
inline ScaledWeight fp4_weight(const char* op, const char* name, const Tensor& weight, const char* scale_name,
                               const Tensor& scale, int64_t inputs) {
  if (weight.is_floating_point()) {
    return unquantised_weight(op, name, weight, scale_name, scale, kAny, inputs);
  }
  check_bytes(op, name, weight);
  check_bytes(op, scale_name, scale);
  if (weight.dim() == 4) return packed_weight(op, name, weight, scale_name, scale, kAny, inputs, inputs / 2);
  check_shape(op, name, weight, {kAny, kAny, inputs / 2});
  int64_t experts = weight.size(0), outputs = weight.size(1);
  check_shape(op, scale_name, scale, {experts, outputs, inputs / kFp8Group});
  return {weight.const_data_ptr<uint8_t>(), scale.const_data_ptr<uint8_t>(), false, experts, outputs, inputs};
}

// Every id is an expert or -1.
inline const int64_t* expert_list(const char* op, const Tensor& ids, int64_t rows, int64_t experts) {
  check_dtype(op, "expert_ids", ids, {at::kLong});
  check_shape(op, "expert_ids", ids, {rows, kAny});
  const int64_t* list = ids.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < ids.numel(); ++i) {
    TORCH_CHECK(list[i] >= -1 && list[i] < experts, op, ": expert_ids must lie in -1 .. ", experts - 1,
                ", got ", list[i]);
  }
  return list;
}

}  // namespace deepinfer
