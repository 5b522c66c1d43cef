// The native kernels on raw pointers, free of torch: `ops.cpp` checks arguments and calls them.
//
// All arrays are dense and row-major. T is bf16 or float. Work is split over output elements only, so neither
// the split nor the number of threads can change a bit of any result.
#pragma once

#include <cstdint>
#include <functional>

#include "formats.h"

namespace deepinfer {

// Runs body(begin, end) over disjoint pieces of 0..count; `grain` is the least useful piece. In `ops.cpp`.
void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body);

enum class ScaleFormat { kE8M0, kE4M3 };

template <class T, class W>
void rms_norm(const T* x, const W* weight, float eps, int64_t rows, int64_t size, T* y);

template <class T>
void quantize_fp8(const T* x, int64_t rows, int64_t size, uint8_t* record);
template <class T>
void dequantize_fp8(const uint8_t* record, int64_t rows, int64_t size, T* y);
template <class T>
void quantize_fp4(const T* x, ScaleFormat format, int64_t rows, int64_t size, uint8_t* record);
template <class T>
void dequantize_fp4(const uint8_t* record, ScaleFormat format, int64_t rows, int64_t size, T* y);

struct MixSettings {
  int64_t sinkhorn_iters;
  float rms_eps, hc_eps;
};

// residual [rows, n, D], fn [(2 + n) n, n D] -> pre [rows, n], post [rows, n], comb [rows, n, n]
template <class T>
void mhc_mix(const T* residual, const float* fn, const float* base, const float* scale, MixSettings settings,
             int64_t rows, int64_t streams, int64_t width, float* pre, float* post, float* comb);

}  // namespace deepinfer
