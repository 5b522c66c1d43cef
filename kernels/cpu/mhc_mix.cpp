// Hyper-connection coefficients: a product with few outputs and many inputs, then a little work per row.
//
// Product: lane l of 16 takes k = l, 16 + l, ... in ascending order by fused multiply-add from zero, then
// Lanes::sum. Rows and outputs are tiled and K is cut into chunks whose accumulators are parked in between;
// none of that changes the order. A row of activations is widened once per chunk.
//
// Sinkhorn passes of four streams run for two rows at a time, one in each half of a register; for other
// numbers of streams they are scalar. Sums go in index order in both.

#include <algorithm>
#include <vector>

#include "kernels.h"
#include "row_lanes.h"

namespace deepinfer {

namespace {

constexpr int64_t kChunk = 1024;
constexpr int64_t kRowBlock = 64;
constexpr int64_t kFewRows = 8;  // up to here the outputs are split over threads, above the rows
constexpr int64_t kTileOutputs = 6;
constexpr int64_t kTaskWork = 1 << 18;  // multiply-adds worth another thread
constexpr int64_t kMaxStreams = 16, kMaxOutputs = (2 + kMaxStreams) * kMaxStreams;

// Adds the products of `count` inputs to kRows x kOutputs accumulators of sixteen lanes. x is zero from
// `count` on to the next multiple of 16; w is not read there.
template <int kRows, int kOutputs>
void multiply_tile(const float* const* x, const float* const* w, int64_t count, float* const* parked) {
  Lanes acc[kRows][kOutputs];
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kOutputs; ++c) acc[r][c] = Lanes::load(parked[r] + c * kLanes);
  }
  auto step = [&](int64_t k, auto load_weight) {
    for (int c = 0; c < kOutputs; ++c) {
      Lanes weight = load_weight(w[c] + k);
      for (int r = 0; r < kRows; ++r) acc[r][c] = fma(Lanes::load(x[r] + k), weight, acc[r][c]);
    }
  };
  int64_t k = 0;
  for (; k + kLanes <= count; k += kLanes) step(k, [](const float* p) { return Lanes::load(p); });
  if (k < count) step(k, [&](const float* p) { return load_part(p, count - k); });
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kOutputs; ++c) acc[r][c].store(parked[r] + c * kLanes);
  }
}

// Widens `count` values into `buffer` and adds their squares to sixteen lanes, as sum_of_squares.h does.
template <class T>
void widen(const T* x, int64_t count, float* buffer, float* squares) {
  Lanes sum = Lanes::load(squares);
  for (int64_t i = 0; i < count; i += kLanes) {
    Lanes value = load_row(x + i, count - i);
    value.store(buffer + i);
    sum = sum + value * value;
  }
  sum.store(squares);
}

template <class T>
struct Product {
  const T* x;       // [rows, inputs]
  const float* fn;  // [outputs, inputs]
  int64_t outputs, inputs;
  float *mixes, *squares;  // results: [rows, outputs], [rows]

  // At most kRowBlock rows from `row`, outputs first .. last.
  void run(int64_t row, int64_t rows, int64_t first, int64_t last) const {
    int64_t width = (last - first + kTileOutputs - 1) / kTileOutputs * kTileOutputs * kLanes;
    std::vector<float> parked(size_t(rows * (width + kLanes)), 0.0f);
    float* sums = parked.data() + rows * width;
    alignas(64) float wide[2][kChunk];
    for (int64_t begin = 0; begin < inputs; begin += kChunk) {
      int64_t count = std::min(kChunk, inputs - begin);
      for (int64_t r = 0; r < rows; r += 2) {
        bool two = r + 1 < rows;
        for (int64_t i = r; i < r + 1 + two; ++i) {
          widen(x + (row + i) * inputs + begin, count, wide[i - r], sums + i * kLanes);
        }
        two ? columns<2, 3>(wide, begin, count, first, last, parked.data() + r * width, width)
            : columns<1, 6>(wide, begin, count, first, last, parked.data() + r * width, width);
      }
    }
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = first; c < last; ++c) {
        mixes[(row + r) * outputs + c] = Lanes::load(parked.data() + r * width + (c - first) * kLanes).sum();
      }
      if (first == 0) squares[row + r] = Lanes::load(sums + r * kLanes).sum();
    }
  }

  template <int kRows, int kOutputs>
  void columns(const float (*wide)[kChunk], int64_t begin, int64_t count, int64_t first, int64_t last,
               float* parked, int64_t width) const {
    for (int64_t c = first; c < last; c += kOutputs) {
      const float *rows[kRows], *weights[kOutputs];
      float* sums[kRows];
      for (int r = 0; r < kRows; ++r) {
        rows[r] = wide[r];
        sums[r] = parked + r * width + (c - first) * kLanes;
      }
      // Beyond the last output the last one is computed again, into a place that nobody reads.
      for (int o = 0; o < kOutputs; ++o) weights[o] = fn + std::min(c + o, last - 1) * inputs + begin;
      multiply_tile<kRows, kOutputs>(rows, weights, count, sums);
    }
  }
};

template <class T>
void multiply(const Product<T>& product, int64_t rows) {
  int64_t outputs = product.outputs, inputs = product.inputs;
  if (rows <= kFewRows) {
    int64_t tiles = (outputs + kTileOutputs - 1) / kTileOutputs;
    parallel_for(tiles, kTaskWork / (rows * kTileOutputs * inputs + 1) + 1, [&](int64_t begin, int64_t end) {
      product.run(0, rows, begin * kTileOutputs, std::min(end * kTileOutputs, outputs));
    });
    return;
  }
  parallel_for(rows, kTaskWork / (outputs * inputs + 1) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row += kRowBlock) {
      product.run(row, std::min(kRowBlock, end - row), 0, outputs);
    }
  });
}

void normalise_columns(float* comb, int64_t n, float eps) {
  for (int64_t i = 0; i < n; ++i) {
    float sum = comb[i];
    for (int64_t j = 1; j < n; ++j) sum = sum + comb[j * n + i];
    sum = sum + eps;
    for (int64_t j = 0; j < n; ++j) comb[j * n + i] = comb[j * n + i] / sum;
  }
}

void normalise_rows(float* comb, int64_t n, float eps) {
  for (int64_t j = 0; j < n; ++j) {
    float sum = comb[j * n];
    for (int64_t i = 1; i < n; ++i) sum = sum + comb[j * n + i];
    sum = sum + eps;
    for (int64_t i = 0; i < n; ++i) comb[j * n + i] = comb[j * n + i] / sum;
  }
}

// comb [n, n] holds e^(logit - largest of its line); what is left of the softmax, then the passes.
void sinkhorn(float* comb, int64_t n, const MixSettings& settings) {
  for (int64_t j = 0; j < n; ++j) {
    float* line = comb + j * n;
    float sum = line[0];
    for (int64_t i = 1; i < n; ++i) sum = sum + line[i];
    for (int64_t i = 0; i < n; ++i) line[i] = line[i] / sum + settings.hc_eps;
  }
  normalise_columns(comb, n, settings.hc_eps);
  for (int64_t pass = 1; pass < settings.sinkhorn_iters; ++pass) {
    normalise_rows(comb, n, settings.hc_eps);
    normalise_columns(comb, n, settings.hc_eps);
  }
}

// The same for two 4 x 4 matrices: each register holds a line of the first and the same line of the second.
struct TwoMatrices {
  __m256 line[4];

  void transpose() {
    __m256 a = _mm256_unpacklo_ps(line[0], line[1]), b = _mm256_unpackhi_ps(line[0], line[1]);
    __m256 c = _mm256_unpacklo_ps(line[2], line[3]), d = _mm256_unpackhi_ps(line[2], line[3]);
    line[0] = _mm256_shuffle_ps(a, c, 0x44);
    line[1] = _mm256_shuffle_ps(a, c, 0xEE);
    line[2] = _mm256_shuffle_ps(b, d, 0x44);
    line[3] = _mm256_shuffle_ps(b, d, 0xEE);
  }

  __m256 sum() const {
    return _mm256_add_ps(_mm256_add_ps(_mm256_add_ps(line[0], line[1]), line[2]), line[3]);
  }

  void divide(__m256 sums) {
    for (__m256& values : line) values = _mm256_div_ps(values, sums);
  }
};

void sinkhorn_of_four(float* first, float* second, const MixSettings& settings) {
  TwoMatrices m;
  for (int j = 0; j < 4; ++j) m.line[j] = _mm256_loadu2_m128(second + 4 * j, first + 4 * j);
  __m256 eps = _mm256_set1_ps(settings.hc_eps);
  m.transpose();
  m.divide(m.sum());
  for (__m256& values : m.line) values = _mm256_add_ps(values, eps);
  for (int64_t pass = 0; pass < 2 * settings.sinkhorn_iters - 1; ++pass) {
    m.transpose();
    m.divide(_mm256_add_ps(m.sum(), eps));
  }
  for (int j = 0; j < 4; ++j) _mm256_storeu2_m128(second + 4 * j, first + 4 * j, m.line[j]);
}

// From the products of one row: pre and post, and in comb the exponentials that `sinkhorn` starts from.
void coefficients(const float* mixes, float square, const float* base, const float* scale,
                  const MixSettings& settings, int64_t n, int64_t inputs, float* pre, float* post,
                  float* comb) {
  float rms = 1.0f / std::sqrt(square / float(inputs) + settings.rms_eps);
  float logits[kMaxOutputs];
  auto fill_logits = [&](int64_t begin, int64_t end, float factor) {
    for (int64_t i = begin; i < end; ++i) logits[i] = mixes[i] * rms * factor + base[i];
  };
  fill_logits(0, n, scale[0]);
  fill_logits(n, 2 * n, scale[1]);
  fill_logits(2 * n, 2 * n + n * n, scale[2]);
  for (int64_t i = 0; i < 2 * n; i += kLanes) {
    store_part(sigmoid(load_part(logits + i, 2 * n - i)), logits + i, 2 * n - i);
  }
  for (int64_t k = 0; k < n; ++k) {
    pre[k] = logits[k] + settings.hc_eps;
    post[k] = 2.0f * logits[n + k];
  }
  float* matrix = logits + 2 * n;
  for (int64_t j = 0; j < n; ++j) {
    float* line = matrix + j * n;
    float most = line[0];
    for (int64_t i = 1; i < n; ++i) most = line[i] > most ? line[i] : most;
    for (int64_t i = 0; i < n; ++i) line[i] = line[i] - most;
  }
  for (int64_t i = 0; i < n * n; i += kLanes) {
    store_part(exp(load_part(matrix + i, n * n - i)), comb + i, n * n - i);
  }
}

}  // namespace

template <class T>
void mhc_mix(const T* residual, const float* fn, const float* base, const float* scale, MixSettings settings,
             int64_t rows, int64_t streams, int64_t width, float* pre, float* post, float* comb) {
  if (rows == 0) return;
  int64_t n = streams, inputs = n * width, outputs = (2 + n) * n;
  std::vector<float> results(size_t(rows * (outputs + 1)));
  float *mixes = results.data(), *squares = mixes + rows * outputs;
  multiply(Product<T>{residual, fn, outputs, inputs, mixes, squares}, rows);
  parallel_for((rows + 1) / 2, 32, [=](int64_t begin, int64_t end) {
    for (int64_t row = 2 * begin; row < std::min(2 * end, rows); row += 2) {
      int64_t last = std::min(row + 1, rows - 1);
      for (int64_t r = row; r <= last; ++r) {
        coefficients(mixes + r * outputs, squares[r], base, scale, settings, n, inputs, pre + r * n,
                     post + r * n, comb + r * n * n);
      }
      if (n == 4) {
        sinkhorn_of_four(comb + row * 16, comb + last * 16, settings);
      } else {
        for (int64_t r = row; r <= last; ++r) sinkhorn(comb + r * n * n, n, settings);
      }
    }
  });
}

template void mhc_mix(const bf16*, const float*, const float*, const float*, MixSettings, int64_t, int64_t,
                      int64_t, float*, float*, float*);
template void mhc_mix(const float*, const float*, const float*, const float*, MixSettings, int64_t, int64_t,
                      int64_t, float*, float*, float*);

}  // namespace deepinfer
