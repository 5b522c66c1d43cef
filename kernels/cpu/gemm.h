// The product of the `linear` operation, for every kernel that contains one: same weights, same bits.
#pragma once

#include <cstdint>

#include "formats.h"

namespace deepinfer {

constexpr int64_t kPanel = 16;  // outputs of a packed panel

// bf16 or float [outputs, inputs]; packed: panels of kPanel outputs as kernels/packing.py lays them out.
struct LinearWeight {
  const void* data;
  bool is_bf16, packed;
  int64_t outputs, inputs;
};

// y[r][n] = sum_k W[n][k] * x[r][k] for x [rows, K] and y [rows, N]; T and Out are bf16 or float.
template <class T, class Out>
void linear(const T* x, const LinearWeight& weight, int64_t rows, Out* y);

}  // namespace deepinfer
