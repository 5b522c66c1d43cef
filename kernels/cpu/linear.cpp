// Linear layers: activations are widened (and quantised) once, then `matmul.h` does the product.

#include <memory>

#include "gemm.h"
#include "kernels.h"
#include "matmul.h"

namespace deepinfer {

namespace {

constexpr int64_t kTaskColumns = 16;
constexpr int64_t kTaskWork = 1 << 18;  // multiply-adds worth another thread

// Vectors of x as float32, each padded with zeros to a multiple of 16.
class Activations {
 public:
  template <class T>
  Activations(const T* x, int64_t vectors, int64_t inputs, bool quantize)
      : stride_(round_up(inputs, kLanes)), data_(new float[size_t(vectors * stride_) + 1]) {
    float* base = data_.get();
    int64_t stride = stride_;
    parallel_for(vectors, (1 << 15) / (inputs + 1) + 1, [=](int64_t begin, int64_t end) {
      for (int64_t v = begin; v < end; ++v) {
        float* out = base + v * stride;
        const T* in = x + v * inputs;
        if (quantize) {
          for (int64_t k = 0; k < inputs; k += kFp8Group) quantize_group(in + k, out + k);
        } else {
          for (int64_t k = 0; k < inputs; ++k) out[k] = to_float(in[k]);
        }
        std::fill(out + inputs, out + stride, 0.0f);
      }
    });
  }

  const float* vector(int64_t index) const { return data_.get() + index * stride_; }

 private:
  // Through the FP8 quantiser and back.
  template <class T>
  static void quantize_group(const T* x, float* out) {
    uint8_t byte = fp8_scale(x);
    float scale = e8m0_to_float(byte), inverse = e8m0_to_float(uint8_t(254 - byte));
    for (int i = 0; i < kFp8Group; ++i) {
      out[i] = e4m3_to_float(float_to_e4m3(to_float(x[i]) * inverse)) * scale;
    }
  }

  int64_t stride_;
  std::unique_ptr<float[]> data_;
};

// One product with its own weights and rows; several make up a grouped or an expert linear.
template <class Weight, class Out>
struct Product {
  Weight weight;
  std::vector<const float*> x;
  std::vector<Out*> y;
};

template <class Weight, class Out>
void multiply(const std::vector<Product<Weight, Out>>& products, int64_t outputs) {
  if (products.empty() || outputs == 0) return;
  int64_t blocks = (outputs + kTaskColumns - 1) / kTaskColumns;
  int64_t rows = 1;
  for (const auto& product : products) rows = std::max(rows, int64_t(product.x.size()));
  int64_t work = rows * kTaskColumns * (products[0].weight.inputs + 1);
  parallel_for(int64_t(products.size()) * blocks, kTaskWork / work + 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end;) {
      // Neighbouring column blocks of one product run as one piece.
      int64_t index = task / blocks, until = std::min(end, (index + 1) * blocks);
      const auto& product = products[size_t(index)];
      int64_t first = task % blocks * kTaskColumns, last = (until - 1) % blocks * kTaskColumns + kTaskColumns;
      multiply_columns(product.weight, first, std::min(last, outputs), product.x.data(), product.y.data(),
                       int64_t(product.x.size()));
      task = until;
    }
  });
}

// Column n of packed panels; `step` inputs of one output lie side by side.
template <class W>
struct WeightPacked {
  const W* data;
  int64_t inputs, step;
  void decode(int64_t n, int64_t begin, int64_t count, float* out) const {
    const W* panel = data + n / kPanel * inputs * kPanel + n % kPanel * step;
    for (int64_t i = 0; i < count; ++i) {
      int64_t k = begin + i;
      out[i] = to_float(panel[k / step * step * kPanel + k % step]);
    }
  }
};

template <class T, class Weight, class Out>
void multiply_dense(const T* x, Weight weight, int64_t rows, int64_t outputs, Out* y) {
  Activations activations(x, rows, weight.inputs, false);
  Product<Weight, Out> product{weight, {}, {}};
  for (int64_t row = 0; row < rows; ++row) {
    product.x.push_back(activations.vector(row));
    product.y.push_back(y + row * outputs);
  }
  multiply(std::vector{std::move(product)}, outputs);
}

}  // namespace

template <class T, class Out>
void linear(const T* x, const LinearWeight& weight, int64_t rows, Out* y) {
  if (rows == 0) return;
  auto run = [&](auto format) { multiply_dense(x, format, rows, weight.outputs, y); };
  if (weight.is_bf16) {
    const bf16* data = static_cast<const bf16*>(weight.data);
    if (weight.packed) run(WeightPacked<bf16>{data, weight.inputs, 2});
    else run(WeightBf16{data, weight.inputs});
  } else {
    const float* data = static_cast<const float*>(weight.data);
    if (weight.packed) run(WeightPacked<float>{data, weight.inputs, 1});
    else run(WeightFloat{data, weight.inputs});
  }
}

template <class T>
void linear_fp8(const T* x, const uint8_t* weight, const uint8_t* scale, bool quantize_activation,
                int64_t rows, int64_t groups, int64_t outputs, int64_t inputs, T* y) {
  if (rows == 0) return;
  Activations activations(x, rows * groups, inputs, quantize_activation);
  int64_t scale_rows = (outputs + kFp8Group - 1) / kFp8Group;
  int64_t scale_stride = (inputs + kFp8Group - 1) / kFp8Group;
  std::vector<Product<WeightFp8, T>> products;
  for (int64_t g = 0; g < groups; ++g) {
    WeightFp8 matrix{weight + g * outputs * inputs, scale + g * scale_rows * scale_stride, inputs,
                     scale_stride};
    products.push_back({matrix, {}, {}});
    for (int64_t row = 0; row < rows; ++row) {
      products.back().x.push_back(activations.vector(row * groups + g));
      products.back().y.push_back(y + (row * groups + g) * outputs);
    }
  }
  multiply(products, outputs);
}

template <class T>
void linear_fp4(const T* x, const uint8_t* weight, const uint8_t* scale, const int64_t* ids,
                bool quantize_activation, int64_t rows, int64_t vectors, int64_t picks, int64_t experts,
                int64_t outputs, int64_t inputs, T* y) {
  if (rows == 0 || picks == 0) return;
  Activations activations(x, rows * vectors, inputs, quantize_activation);
  std::vector<int64_t> product_of(size_t(experts), -1);
  std::vector<Product<WeightFp4, T>> products;
  for (int64_t pair = 0; pair < rows * picks; ++pair) {
    int64_t expert = ids[pair];
    if (expert < 0) {
      std::fill_n(y + pair * outputs, outputs, T{});
      continue;
    }
    int64_t& index = product_of[size_t(expert)];
    if (index < 0) {
      index = int64_t(products.size());
      int64_t offset = expert * outputs * inputs;
      products.push_back({WeightFp4{weight + offset / 2, scale + offset / kFp8Group, inputs}, {}, {}});
    }
    int64_t row = pair / picks;
    products[size_t(index)].x.push_back(activations.vector(vectors == 1 ? row : pair));
    products[size_t(index)].y.push_back(y + pair * outputs);
  }
  multiply(products, outputs);
}

template void linear(const bf16*, const LinearWeight&, int64_t, bf16*);
template void linear(const bf16*, const LinearWeight&, int64_t, float*);
template void linear(const float*, const LinearWeight&, int64_t, bf16*);
template void linear(const float*, const LinearWeight&, int64_t, float*);
template void linear_fp8(const bf16*, const uint8_t*, const uint8_t*, bool, int64_t, int64_t, int64_t,
                         int64_t, bf16*);
template void linear_fp8(const float*, const uint8_t*, const uint8_t*, bool, int64_t, int64_t, int64_t,
                         int64_t, float*);
template void linear_fp4(const bf16*, const uint8_t*, const uint8_t*, const int64_t*, bool, int64_t, int64_t,
                         int64_t, int64_t, int64_t, int64_t, bf16*);
template void linear_fp4(const float*, const uint8_t*, const uint8_t*, const int64_t*, bool, int64_t, int64_t,
                         int64_t, int64_t, int64_t, int64_t, float*);

}  // namespace deepinfer
