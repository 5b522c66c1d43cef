// The kernels of kernels/cuda/moe_gate.cu, started on the host with the grids of their launcher.
#include "cuda_emulation.h"

#include KERNEL_SOURCE

extern "C" void emulate(const char* name, unsigned grid_x, unsigned grid_y, unsigned threads, void** arguments) {
  auto at = [=](int index) { return arguments[index]; };
  dim3_ grid = {grid_x, grid_y, 1};
  if (std::strcmp(name, "moe_gate_logits") == 0) {
    emulation::launch(grid, threads, [=] {
      moe_gate_logits(*(const uint4**)at(0), *(const uint4**)at(1), *(const int64**)at(2), *(float**)at(3),
                      *(int64*)at(4), *(int*)at(5), *(int*)at(6));
    });
  } else if (std::strcmp(name, "moe_gate_route") == 0) {
    emulation::launch(grid, threads, [=] {
      moe_gate_route(*(const float**)at(0), *(const float**)at(1), *(const int64**)at(2), *(int64**)at(3),
                     *(float**)at(4), *(float*)at(5), *(int*)at(6), *(int*)at(7), *(int*)at(8));
    });
  } else {
    std::abort();
  }
}
