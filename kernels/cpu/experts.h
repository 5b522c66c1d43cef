// The feed-forward part of a layer on raw pointers; T is bf16 or float.
#pragma once

#include "gemm.h"

namespace deepinfer {

struct ExpertWeights {
  ScaledWeight w13, w2;  // w13: the gate's outputs, then those of the up projection
  float swiglu_limit;    // 0: no clamp
  // inputs of both go through the FP8 quantiser, so many per scale; 0: they do not
  int64_t activation_group;
};

// x [rows, D], ids and weights [rows, picks], ids in -1 .. E - 1 -> y [rows, D]
template <class T>
void moe_experts(const T* x, const int64_t* ids, const float* weights, const ExpertWeights& experts,
                 int64_t rows, int64_t picks, float* y);

// x [rows, D], routed [rows, D] -> y [rows, D]
template <class T>
void shared_expert(const T* x, const float* routed, const ExpertWeights& expert, int64_t rows, T* y);

}  // namespace deepinfer
