// Quantised weights as matrices for `gemm_tiles.h`, and the products of the experts that a step uses.
#pragma once

#include "gemm_tiles.h"

namespace deepinfer {

// Products of experts are products of single layers too: both are compiled once, in linear.cpp.
#define FOR_SHARED_PRODUCTS(each, out) \
  each(PackedMatrix<Bf16Codec>, out)   \
  each(PackedMatrix<FloatCodec>, out)  \
  each(PackedMatrix<Fp4Codec>, out)    \
  each(PlainMatrix<Bf16Rows>, out)     \
  each(PlainMatrix<FloatRows>, out)    \
  each(PlainMatrix<Fp4Rows>, out)
#define MULTIPLY(matrix, out) template void multiply(const std::vector<Product<matrix, out>>&);
#define MULTIPLY_ELSEWHERE(matrix, out) extern MULTIPLY(matrix, out)

FOR_SHARED_PRODUCTS(MULTIPLY_ELSEWHERE, bf16)
FOR_SHARED_PRODUCTS(MULTIPLY_ELSEWHERE, float)

// As the two below, for weights without scales.
template <class Body>
void by_unquantised_form(const ScaledWeight& w, const Body& body) {
  int64_t values = w.outputs * w.inputs;
  if (w.storage == Storage::kBf16) {
    const bf16* data = reinterpret_cast<const bf16*>(w.data);
    if (w.packed) {
      body([=](int64_t i) {
        return PackedMatrix<Bf16Codec>{w.data + i * values * 2, nullptr, w.outputs, w.inputs};
      });
    } else {
      body([=](int64_t i) { return PlainMatrix<Bf16Rows>{{data + i * values, w.outputs, w.inputs}}; });
    }
  } else {
    const float* data = reinterpret_cast<const float*>(w.data);
    if (w.packed) {
      body([=](int64_t i) {
        return PackedMatrix<FloatCodec>{w.data + i * values * 4, nullptr, w.outputs, w.inputs};
      });
    } else {
      body([=](int64_t i) { return PlainMatrix<FloatRows>{{data + i * values, w.outputs, w.inputs}}; });
    }
  }
}

// Calls body with a function from the index of a group to its matrix, for the form that the weight has.
template <class Body>
void by_fp8_form(const ScaledWeight& w, const Body& body) {
  if (w.storage != Storage::kScaled) return by_unquantised_form(w, body);
  int64_t codes = w.outputs * w.inputs, in_groups = (w.inputs + kFp8Group - 1) / kFp8Group;
  int64_t scales = (w.packed ? w.outputs : (w.outputs + kFp8Group - 1) / kFp8Group) * in_groups;
  if (w.packed) {
    body([=](int64_t g) {
      return PackedMatrix<Fp8Codec>{w.data + g * codes, w.scale + g * scales, w.outputs, w.inputs};
    });
  } else {
    body([=](int64_t g) {
      return PlainMatrix<Fp8Rows>{{w.data + g * codes, w.scale + g * scales, w.outputs, w.inputs}};
    });
  }
}

template <class Body>
void by_fp4_form(const ScaledWeight& w, const Body& body) {
  if (w.storage != Storage::kScaled) return by_unquantised_form(w, body);
  int64_t codes = w.outputs * w.inputs / 2, scales = w.outputs * w.inputs / kFp8Group;
  if (w.packed) {
    body([=](int64_t e) {
      return PackedMatrix<Fp4Codec>{w.data + e * codes, w.scale + e * scales, w.outputs, w.inputs};
    });
  } else {
    body([=](int64_t e) {
      return PlainMatrix<Fp4Rows>{{w.data + e * codes, w.scale + e * scales, w.outputs, w.inputs}};
    });
  }
}

// The pairs of a row and an expert, grouped by expert; those of expert -1 are left out.
struct ExpertPairs {
  std::vector<int64_t> experts;             // in use, in order of first use
  std::vector<std::vector<int64_t>> pairs;  // of each of them, ascending
};

inline ExpertPairs pairs_by_expert(const int64_t* ids, int64_t count, int64_t experts) {
  std::vector<int64_t> place(size_t(experts), -1);
  ExpertPairs result;
  for (int64_t pair = 0; pair < count; ++pair) {
    if (ids[pair] < 0) continue;
    int64_t& index = place[size_t(ids[pair])];
    if (index < 0) {
      index = int64_t(result.experts.size());
      result.experts.push_back(ids[pair]);
      result.pairs.emplace_back();
    }
    result.pairs[size_t(index)].push_back(pair);
  }
  return result;
}

// For every pair: vector_of(pair) times the weights of its expert, to result_of(pair).
template <class VectorOf, class ResultOf>
void multiply_experts(const ScaledWeight& weight, const ExpertPairs& used, const VectorOf& vector_of,
                      const ResultOf& result_of) {
  using Result = decltype(result_of(0));
  by_fp4_form(weight, [&](auto matrix_of) {
    std::vector<Product<decltype(matrix_of(0)), std::remove_pointer_t<Result>>> products;
    for (size_t i = 0; i < used.experts.size(); ++i) {
      std::vector<const float*> vectors;
      std::vector<Result> results;
      for (int64_t pair : used.pairs[i]) {
        vectors.push_back(vector_of(pair));
        results.push_back(result_of(pair));
      }
      products.push_back({matrix_of(used.experts[i]), Tiles(vectors, weight.inputs), std::move(results)});
    }
    multiply(products);
  });
}

}  // namespace deepinfer
