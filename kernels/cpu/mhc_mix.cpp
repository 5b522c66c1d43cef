// Hyper-connection coefficients. The product with fn is the ordinary linear kernel; the rest is scalar code
// with one exp for every element, so that a value never depends on its place in a vector loop.

#include <vector>

#include "kernels.h"
#include "sum_of_squares.h"

namespace deepinfer {

namespace {

// exp by the Cephes polynomial: x = n ln 2 + r, products and sums rounded one by one. About 2 ulp.
float exp_scalar(float x) {
  if (!(x == x)) return x;
  x = x < -87.3f ? -87.3f : (x > 88.3f ? 88.3f : x);
  float n = std::floor(x * 1.44269504088896341f + 0.5f);
  float r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  float y = p * (r * r) + r;
  y = y + 1.0f;
  return y * float_of(uint32_t(int32_t(n) + 127) << 23);
}

float sigmoid(float x) { return 1.0f / (1.0f + exp_scalar(-x)); }

void normalise_columns(float* comb, int64_t n, float eps) {
  for (int64_t i = 0; i < n; ++i) {
    float sum = 0.0f;
    for (int64_t j = 0; j < n; ++j) sum = sum + comb[j * n + i];
    sum = sum + eps;
    for (int64_t j = 0; j < n; ++j) comb[j * n + i] = comb[j * n + i] / sum;
  }
}

void normalise_rows(float* comb, int64_t n, float eps) {
  for (int64_t j = 0; j < n; ++j) {
    float sum = 0.0f;
    for (int64_t i = 0; i < n; ++i) sum = sum + comb[j * n + i];
    sum = sum + eps;
    for (int64_t i = 0; i < n; ++i) comb[j * n + i] = comb[j * n + i] / sum;
  }
}

void softmax_rows(float* comb, int64_t n, float eps) {
  for (int64_t j = 0; j < n; ++j) {
    float* row = comb + j * n;
    float most = row[0], sum = 0.0f;
    for (int64_t i = 1; i < n; ++i) most = row[i] > most ? row[i] : most;
    for (int64_t i = 0; i < n; ++i) {
      row[i] = exp_scalar(row[i] - most);
      sum = sum + row[i];
    }
    for (int64_t i = 0; i < n; ++i) row[i] = row[i] / sum + eps;
  }
}

}  // namespace

template <class T>
void mhc_mix(const T* residual, const float* fn, const float* base, const float* scale, MixSettings settings,
             int64_t rows, int64_t streams, int64_t width, float* pre, float* post, float* comb) {
  int64_t n = streams, inputs = n * width, outputs = (2 + n) * n;
  std::vector<float> products(size_t(rows * outputs));
  linear(residual, fn, rows, outputs, inputs, products.data());
  const float* mixes = products.data();
  parallel_for(rows, 16, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float mean = sum_of_squares(residual + row * inputs, inputs) / float(inputs);
      float rms = 1.0f / std::sqrt(mean + settings.rms_eps);
      auto logit = [&](int64_t index, int part) {
        return mixes[row * outputs + index] * rms * scale[part] + base[index];
      };
      for (int64_t k = 0; k < n; ++k) {
        pre[row * n + k] = sigmoid(logit(k, 0)) + settings.hc_eps;
        post[row * n + k] = 2.0f * sigmoid(logit(n + k, 1));
      }
      float* matrix = comb + row * n * n;
      for (int64_t k = 0; k < n * n; ++k) matrix[k] = logit(2 * n + k, 2);
      softmax_rows(matrix, n, settings.hc_eps);
      normalise_columns(matrix, n, settings.hc_eps);
      for (int64_t pass = 1; pass < settings.sinkhorn_iters; ++pass) {
        normalise_rows(matrix, n, settings.hc_eps);
        normalise_columns(matrix, n, settings.hc_eps);
      }
    }
  });
}

template void mhc_mix(const bf16*, const float*, const float*, const float*, MixSettings, int64_t, int64_t,
                      int64_t, float*, float*, float*);
template void mhc_mix(const float*, const float*, const float*, const float*, MixSettings, int64_t, int64_t,
                      int64_t, float*, float*, float*);

}  // namespace deepinfer
