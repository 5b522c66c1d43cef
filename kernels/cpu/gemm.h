// Products with weights that may be packed, for every kernel that has one: same weights, same bits.
//
// Layouts are those of kernels/packing.py, the order of sums that of gemm_tiles.h. T and Out: bf16 or float.
#pragma once

#include <cstdint>

#include "formats.h"

namespace deepinfer {

constexpr int64_t kPanel = 16;  // outputs of a packed panel

// bf16 or float [outputs, inputs].
struct LinearWeight {
  const void* data;
  bool is_bf16, packed;
  int64_t outputs, inputs;
};

// [count, outputs, inputs] in FP8 (groups) or FP4 (experts) with their scales, or unquantised without.
enum class Storage { kScaled, kBf16, kFloat };
struct ScaledWeight {
  const uint8_t *data, *scale;
  bool packed;
  int64_t count, outputs, inputs;
  Storage storage = Storage::kScaled;
};

// y[r][n] = sum_k W[n][k] * x[r][k] for x [rows, K] and y [rows, N]
template <class T, class Out>
void linear(const T* x, const LinearWeight& weight, int64_t rows, Out* y);

// x [rows, G, K] -> y [rows, G, N]; activation_group: values that share a scale of the FP8 quantiser, 0: none
template <class T>
void linear_fp8(const T* x, const ScaledWeight& weight, int64_t activation_group, int64_t rows, T* y);

// x [rows, vectors, K], ids [rows, picks] in -1 .. count - 1 -> y [rows, picks, N]; vectors is 1 or picks
template <class T>
void linear_fp4(const T* x, const ScaledWeight& weight, const int64_t* ids, int64_t activation_group,
                int64_t rows, int64_t vectors, int64_t picks, T* y);

}  // namespace deepinfer
