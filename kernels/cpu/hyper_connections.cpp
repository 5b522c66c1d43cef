// Collapse and expansion of the residual streams. Every product and every sum is rounded by itself, streams in
// index order, so the bits are those of the reference.

#include "hyper_connections.h"

#include "kernels.h"
#include "row_lanes.h"

namespace deepinfer {

namespace {

constexpr int64_t kTaskValues = 1 << 16;  // values of the residual worth another thread

// kStreams is the number of streams where it is known, 0 where it is not: then they are read again and again.
template <int kStreams, class T>
void expand_row(const T* x, const T* residual, const float* post, const float* comb, int64_t streams,
                int64_t width, T* y) {
  const int64_t n = kStreams ? kStreams : streams;
  Lanes kept[kStreams ? kStreams : 1];
  for (int64_t d = 0; d < width; d += kLanes) {
    auto stream = [&](int64_t j) { return load_row(residual + j * width + d, width - d); };
    if constexpr (kStreams != 0) {
      for (int j = 0; j < kStreams; ++j) kept[j] = stream(j);
    }
    auto source = [&](int64_t j) {
      if constexpr (kStreams != 0) return kept[j];
      return stream(j);
    };
    Lanes added = load_row(x + d, width - d);
    for (int64_t i = 0; i < n; ++i) {
      Lanes mixed = Lanes::fill(comb[i]) * source(0);
      for (int64_t j = 1; j < n; ++j) mixed = mixed + Lanes::fill(comb[j * n + i]) * source(j);
      store_row(Lanes::fill(post[i]) * added + mixed, y + i * width + d, width - d);
    }
  }
}

}  // namespace

template <class T, class W>
void mhc_collapse(const T* residual, const float* pre, const W* norm_weight, float eps, int64_t rows,
                  int64_t streams, int64_t width, T* y) {
  parallel_for(rows, kTaskValues / (streams * width + 1) + 1, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* in = residual + row * streams * width;
      const float* factor = pre + row * streams;
      T* out = y + row * width;
      for (int64_t d = 0; d < width; d += kLanes) {
        Lanes sum = Lanes::fill(factor[0]) * load_row(in + d, width - d);
        for (int64_t k = 1; k < streams; ++k) {
          sum = sum + Lanes::fill(factor[k]) * load_row(in + k * width + d, width - d);
        }
        store_row(sum, out + d, width - d);
      }
      rms_norm_row(out, norm_weight, eps, width, out);
    }
  });
}

template <class T>
void mhc_expand(const T* x, const T* residual, const float* post, const float* comb, int64_t rows,
                int64_t streams, int64_t width, T* y) {
  parallel_for(rows, kTaskValues / (streams * width + 1) + 1, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      auto expand = streams == 4 ? expand_row<4, T> : expand_row<0, T>;
      expand(x + row * width, residual + row * streams * width, post + row * streams,
             comb + row * streams * streams, streams, width, y + row * streams * width);
    }
  });
}

#define COLLAPSE(T, W) \
  template void mhc_collapse(const T*, const float*, const W*, float, int64_t, int64_t, int64_t, T*)
COLLAPSE(bf16, bf16);
COLLAPSE(bf16, float);
COLLAPSE(float, bf16);
COLLAPSE(float, float);
#undef COLLAPSE
template void mhc_expand(const bf16*, const bf16*, const float*, const float*, int64_t, int64_t, int64_t,
                         bf16*);
template void mhc_expand(const float*, const float*, const float*, const float*, int64_t, int64_t, int64_t,
                         float*);

}  // namespace deepinfer
