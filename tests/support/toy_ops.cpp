// Operations for tests of lowering and loading: one pure, one that writes a region, one that can wait.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>

namespace {

std::atomic<bool> armed{false};
std::atomic<bool> opened{false};

at::Tensor toy_scale(const at::Tensor& x, const at::Tensor& weight, double factor) {
  at::Tensor y = at::empty_like(x);
  const float* from = x.const_data_ptr<float>();
  const float* scale = weight.const_data_ptr<float>();
  float* to = y.mutable_data_ptr<float>();
  for (int64_t i = 0; i < x.numel(); ++i) {
    to[i] = from[i] * scale[i % weight.numel()] * static_cast<float>(factor);
  }
  return y;
}

void toy_write(at::Tensor region, const at::Tensor& block, const at::Tensor& entry, const at::Tensor& record) {
  uint8_t* bytes = region.mutable_data_ptr<uint8_t>();
  for (int64_t row = 0; row < block.numel(); ++row) {
    int64_t at = block.const_data_ptr<int64_t>()[row] * region.stride(0) +
                 entry.const_data_ptr<int64_t>()[row] * region.stride(1);
    std::memcpy(bytes + at, record.const_data_ptr<uint8_t>() + row * record.size(1), record.size(1));
  }
}

// Identity; when armed, waits up to ten seconds for the gate to open and gives NaN if it did not.
at::Tensor toy_gate(const at::Tensor& x) {
  at::Tensor y = x.clone();
  if (armed) {
    for (int tick = 0; tick < 10000 && !opened; ++tick) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (!opened) y.fill_(NAN);
  }
  return y;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void toy_gate_set(int arm, int open) {
  armed = arm != 0;
  opened = open != 0;
}

TORCH_LIBRARY_FRAGMENT(deepinfer, library) {
  library.def("toy_scale(Tensor x, Tensor weight, float factor) -> Tensor");
  library.def("toy_write(Tensor(a!) region, Tensor block, Tensor entry, Tensor record) -> ()");
  library.def("toy_gate(Tensor x) -> Tensor");
}

TORCH_LIBRARY_IMPL(deepinfer, CPU, library) {
  library.impl("toy_scale", toy_scale);
  library.impl("toy_write", toy_write);
  library.impl("toy_gate", toy_gate);
}
