// Vectors of activations as float32, through the FP8 quantiser where asked.
#pragma once

#include <memory>

#include "kernels.h"

namespace deepinfer {

// 32 values through the FP8 quantiser and back.
template <class T>
inline void round_to_fp8(const T* x, float* out) {
  uint8_t byte = fp8_scale(x);
  float scale = e8m0_to_float(byte), inverse = e8m0_to_float(uint8_t(254 - byte));
  for (int i = 0; i < kFp8Group; ++i) {
    out[i] = e4m3_to_float(float_to_e4m3(to_float(x[i]) * inverse)) * scale;
  }
}

class Activations {
 public:
  // x [vectors, inputs] must outlive this: floats that need no rounding stay where they are.
  template <class T>
  Activations(const T* x, int64_t vectors, int64_t inputs, bool quantize) : inputs_(inputs) {
    if constexpr (std::is_same_v<T, float>) {
      if (!quantize) {
        base_ = x;
        return;
      }
    }
    data_.reset(new float[size_t(vectors * inputs) + 1]);
    base_ = data_.get();
    parallel_for(vectors, (1 << 15) / (inputs + 1) + 1, [=, this](int64_t begin, int64_t end) {
      const T* in = x + begin * inputs;
      float* out = data_.get() + begin * inputs;
      int64_t count = (end - begin) * inputs;
      if (quantize) {
        for (int64_t k = 0; k < count; k += kFp8Group) round_to_fp8(in + k, out + k);
      } else {
        for (int64_t k = 0; k < count; ++k) out[k] = to_float(in[k]);
      }
    });
  }

  const float* vector(int64_t index) const { return base_ + index * inputs_; }

 private:
  int64_t inputs_;
  const float* base_;
  std::unique_ptr<float[]> data_;
};

}  // namespace deepinfer
