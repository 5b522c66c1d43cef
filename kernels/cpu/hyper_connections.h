// Collapse and expansion of the residual streams; no torch. T is bf16 or float, arrays dense and row-major.
#pragma once

#include <cstdint>

#include "formats.h"

namespace deepinfer {

// residual [rows, n, D], pre [rows, n], norm_weight [D] -> y [rows, D], weighted and normed
template <class T, class W>
void mhc_collapse(const T* residual, const float* pre, const W* norm_weight, float eps, int64_t rows,
                  int64_t streams, int64_t width, T* y);

// x [rows, D], residual [rows, n, D], post [rows, n], comb [rows, n, n] -> y [rows, n, D]
template <class T>
void mhc_expand(const T* x, const T* residual, const float* post, const float* comb, int64_t rows,
                int64_t streams, int64_t width, T* y);

}  // namespace deepinfer
