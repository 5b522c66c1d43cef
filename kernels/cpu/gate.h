// Router of the experts; no torch.
#pragma once

#include "gemm.h"

namespace deepinfer {

struct GateSettings {
  int64_t top_k;
  bool norm_topk_prob;
  float routed_scaling_factor;
};

// x [rows, inputs], bias [E] -> logits [rows, E], ids [rows, top_k] best first, weights [rows, top_k]; a row
// of negative position gets zeros, and -1 for ids. 1 <= top_k <= E.
template <class T>
void moe_gate(const T* x, const LinearWeight& weight, const float* bias, const int64_t* positions,
              const GateSettings& settings, int64_t rows, float* logits, int64_t* ids, float* weights);

// The same with ids given: table [any, top_k] by token; tokens of rows with positions >= 0 lie in range.
template <class T>
void moe_hash_gate(const T* x, const LinearWeight& weight, const int64_t* table, const int64_t* tokens,
                   const int64_t* positions, const GateSettings& settings, int64_t rows, float* logits,
                   int64_t* ids, float* weights);

}  // namespace deepinfer
