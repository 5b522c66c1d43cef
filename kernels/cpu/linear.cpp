// Linear layers of every weight format: activations become float32 tiles, `gemm_tiles.h` does the product.

#include "activations.h"
#include "gemm.h"
#include "gemm_tiles.h"
#include "scaled_products.h"

namespace deepinfer {

namespace {

template <class T, class Matrix, class Out>
void multiply_dense(const T* x, Matrix weight, int64_t rows, Out* y) {
  Activations activations(x, rows, weight.inputs, 0);
  std::vector<const float*> vectors;
  std::vector<Out*> results;
  for (int64_t row = 0; row < rows; ++row) {
    vectors.push_back(activations.vector(row));
    results.push_back(y + row * weight.outputs);
  }
  std::vector<Product<Matrix, Out>> products;
  products.push_back({weight, Tiles(vectors, weight.inputs), std::move(results)});
  multiply(products);
}

}  // namespace

template <class T, class Out>
void linear(const T* x, const LinearWeight& weight, int64_t rows, Out* y) {
  if (rows == 0) return;
  int64_t outputs = weight.outputs, inputs = weight.inputs;
  const uint8_t* bytes = static_cast<const uint8_t*>(weight.data);
  auto run = [&](auto matrix) { multiply_dense(x, matrix, rows, y); };
  if (weight.packed) {
    weight.is_bf16 ? run(PackedMatrix<Bf16Codec>{bytes, nullptr, outputs, inputs})
                   : run(PackedMatrix<FloatCodec>{bytes, nullptr, outputs, inputs});
  } else if (weight.is_bf16) {
    run(PlainMatrix<Bf16Rows>{{static_cast<const bf16*>(weight.data), outputs, inputs}});
  } else {
    run(PlainMatrix<FloatRows>{{static_cast<const float*>(weight.data), outputs, inputs}});
  }
}

template <class T>
void linear_fp8(const T* x, const ScaledWeight& weight, int64_t activation_group, int64_t rows, T* y) {
  if (rows == 0) return;
  Activations activations(x, rows * weight.count, weight.inputs, activation_group);
  by_fp8_form(weight, [&](auto matrix_of) {
    std::vector<Product<decltype(matrix_of(0)), T>> products;
    for (int64_t g = 0; g < weight.count; ++g) {
      std::vector<const float*> vectors;
      std::vector<T*> results;
      for (int64_t row = 0; row < rows; ++row) {
        vectors.push_back(activations.vector(row * weight.count + g));
        results.push_back(y + (row * weight.count + g) * weight.outputs);
      }
      products.push_back({matrix_of(g), Tiles(vectors, weight.inputs), std::move(results)});
    }
    multiply(products);
  });
}

template <class T>
void linear_fp4(const T* x, const ScaledWeight& weight, const int64_t* ids, int64_t activation_group,
                int64_t rows, int64_t vectors, int64_t picks, T* y) {
  if (rows == 0 || picks == 0) return;
  Activations activations(x, rows * vectors, weight.inputs, activation_group);
  for (int64_t pair = 0; pair < rows * picks; ++pair) {
    if (ids[pair] < 0) std::fill_n(y + pair * weight.outputs, weight.outputs, T{});
  }
  multiply_experts(
      weight, pairs_by_expert(ids, rows * picks, weight.count),
      [&](int64_t pair) { return activations.vector(vectors == 1 ? pair / picks : pair); },
      [&](int64_t pair) { return y + pair * weight.outputs; });
}

FOR_SHARED_PRODUCTS(MULTIPLY, bf16)
FOR_SHARED_PRODUCTS(MULTIPLY, float)
template void linear(const bf16*, const LinearWeight&, int64_t, bf16*);
template void linear(const bf16*, const LinearWeight&, int64_t, float*);
template void linear(const float*, const LinearWeight&, int64_t, bf16*);
template void linear(const float*, const LinearWeight&, int64_t, float*);
template void linear_fp8(const bf16*, const ScaledWeight&, int64_t, int64_t, bf16*);
template void linear_fp8(const float*, const ScaledWeight&, int64_t, int64_t, float*);
template void linear_fp4(const bf16*, const ScaledWeight&, const int64_t*, int64_t, int64_t, int64_t, int64_t,
                         bf16*);
template void linear_fp4(const float*, const ScaledWeight&, const int64_t*, int64_t, int64_t, int64_t, int64_t,
                         float*);

}  // namespace deepinfer
