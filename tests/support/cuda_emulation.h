// Enough of CUDA to run a kernel's source on the host: the lanes of a warp are fibers that take turns.
//
// A lane runs until it reaches a shuffle and waits there until every lane of its warp has. A lane that ends
// or takes another way while others wait would hang a card; here it ends the process with a message.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __device__
#define __global__
#define __launch_bounds__(...)

struct uint4 { unsigned x, y, z, w; };
struct dim3_ { unsigned x, y, z; };
static dim3_ threadIdx, blockIdx, blockDim, gridDim;

inline float __uint_as_float(unsigned bits) { float value; std::memcpy(&value, &bits, 4); return value; }
inline int __float_as_int(float value) { int bits; std::memcpy(&bits, &value, 4); return bits; }

namespace emulation {

constexpr int kWarp = 32;

struct Lane {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(1 << 17);
  bool done = false;
  int shuffles = 0;
};

static ucontext_t scheduler;
static Lane lanes[kWarp];
static int current = 0;
static unsigned long long deposits[2][kWarp];  // of this shuffle and the one before: some lanes still read it
static const std::function<void()>* body = nullptr;

inline void enter() {
  (*body)();
  lanes[current].done = true;
  swapcontext(&lanes[current].context, &scheduler);
}

template <class T>
T exchange(T value, int source) {
  static_assert(sizeof(T) <= 8);
  int lane = current, parity = lanes[lane].shuffles++ % 2;
  std::memcpy(&deposits[parity][lane], &value, sizeof(T));
  swapcontext(&lanes[lane].context, &scheduler);
  T other;
  std::memcpy(&other, &deposits[parity][source], sizeof(T));
  return other;
}

inline void run_warp(unsigned first_thread, const std::function<void()>& kernel) {
  body = &kernel;
  for (int i = 0; i < kWarp; ++i) {
    Lane& lane = lanes[i];
    lane.done = false;
    lane.shuffles = 0;
    getcontext(&lane.context);
    lane.context.uc_stack.ss_sp = lane.stack.data();
    lane.context.uc_stack.ss_size = lane.stack.size();
    lane.context.uc_link = nullptr;
    makecontext(&lane.context, enter, 0);
  }
  while (true) {
    int waiting = 0;
    for (current = 0; current < kWarp; ++current) {
      if (lanes[current].done) continue;
      threadIdx.x = first_thread + unsigned(current);
      swapcontext(&scheduler, &lanes[current].context);
      waiting += !lanes[current].done;
    }
    if (waiting == 0) return;
    for (int i = 0; i < kWarp; ++i) {
      if (lanes[i].done || lanes[i].shuffles != lanes[0].shuffles) {
        std::fprintf(stderr, "lane %d is not at the shuffle that the others wait at\n", i);
        std::abort();
      }
    }
  }
}

// Every block of the grid, warp after warp. The number of threads is a multiple of 32.
inline void launch(dim3_ grid, unsigned threads, const std::function<void()>& kernel) {
  gridDim = grid;
  blockDim = {threads, 1, 1};
  for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y) {
    for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) {
      for (unsigned thread = 0; thread < threads; thread += kWarp) run_warp(thread, kernel);
    }
  }
}

}  // namespace emulation

template <class T>
T __shfl_xor_sync(unsigned, T value, int distance) {
  return emulation::exchange(value, emulation::current ^ distance);
}
