// Routed and shared experts: two products of gemm_tiles.h around a clamped SwiGLU.

#include "experts.h"

#include <numeric>

#include "activations.h"
#include "scaled_products.h"
#include "vector_math.h"

namespace deepinfer {

namespace {

// Rows whose intermediate values are kept at once; each expert's weights are decoded once for them.
constexpr int64_t kRowsAtOnce = 512;
constexpr int64_t kElementGrain = 1 << 14;

int64_t rows_per_task(int64_t size) { return kElementGrain / (size + 1) + 1; }

template <class T>
Lanes load_values(const T* p, int64_t count) {
  float values[kLanes] = {};
  for (int64_t i = 0; i < std::min(count, int64_t(kLanes)); ++i) values[i] = to_float(p[i]);
  return Lanes::load(values);
}

// out[i] = weight * (gate * sigmoid(gate) * up), where a weight is given.
template <class T>
void swiglu(const T* gate_and_up, int64_t size, float limit, const float* weight, T* out) {
  for (int64_t i = 0; i < size; i += kLanes) {
    int64_t count = std::min(size - i, int64_t(kLanes));
    Lanes gate = load_values(gate_and_up + i, count), up = load_values(gate_and_up + size + i, count);
    if (limit > 0.0f) {
      // a NaN stays: it is the second operand
      gate = min(Lanes::fill(limit), gate);
      up = max(Lanes::fill(-limit), min(Lanes::fill(limit), up));
    }
    Lanes product = gate * sigmoid(gate) * up;
    if (weight) product = Lanes::fill(*weight) * product;
    float values[kLanes];
    product.store(values);
    for (int64_t k = 0; k < count; ++k) round_to(values[k], out[i + k]);
  }
}

template <class T>
void experts_of_rows(const T* x, const int64_t* ids, const float* weights, const ExpertWeights& experts,
                     int64_t rows, int64_t picks, float* y) {
  int64_t width = experts.w13.inputs, inner = experts.w2.inputs, pairs = rows * picks;
  ExpertPairs used = pairs_by_expert(ids, pairs, experts.w13.count);

  std::unique_ptr<T[]> gate_and_up(new T[size_t(pairs * 2 * inner)]);
  {
    Activations activations(x, rows, width, experts.activation_group);
    multiply_experts(
        experts.w13, used, [&](int64_t pair) { return activations.vector(pair / picks); },
        [&](int64_t pair) { return gate_and_up.get() + pair * 2 * inner; });
  }
  std::unique_ptr<T[]> hidden(new T[size_t(pairs * inner)]);
  parallel_for(pairs, rows_per_task(8 * inner), [&](int64_t begin, int64_t end) {
    for (int64_t pair = begin; pair < end; ++pair) {
      T* out = hidden.get() + pair * inner;
      if (ids[pair] < 0) {
        std::fill_n(out, inner, T{});
      } else {
        swiglu(gate_and_up.get() + pair * 2 * inner, inner, experts.swiglu_limit, weights + pair, out);
      }
    }
  });
  std::unique_ptr<T[]> results(new T[size_t(pairs * width)]);
  {
    Activations activations(hidden.get(), pairs, inner, experts.activation_group);
    multiply_experts(
        experts.w2, used, [&](int64_t pair) { return activations.vector(pair); },
        [&](int64_t pair) { return results.get() + pair * width; });
  }
  parallel_for(rows, rows_per_task(picks * width), [&](int64_t begin, int64_t end) {
    std::vector<int64_t> order(static_cast<size_t>(picks));
    for (int64_t row = begin; row < end; ++row) {
      std::iota(order.begin(), order.end(), row * picks);
      std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return ids[a] < ids[b]; });
      float* out = y + row * width;
      bool first = true;
      for (int64_t pair : order) {
        const T* in = results.get() + pair * width;
        if (ids[pair] < 0) {
          std::fill_n(out, width, 0.0f);
        } else if (first) {
          for (int64_t i = 0; i < width; ++i) out[i] = to_float(in[i]);
        } else {
          for (int64_t i = 0; i < width; ++i) out[i] = out[i] + to_float(in[i]);
        }
        first = false;
      }
    }
  });
}

}  // namespace

template <class T>
void moe_experts(const T* x, const int64_t* ids, const float* weights, const ExpertWeights& experts,
                 int64_t rows, int64_t picks, float* y) {
  int64_t width = experts.w13.inputs;
  for (int64_t row = 0; row < rows; row += kRowsAtOnce) {
    experts_of_rows(x + row * width, ids + row * picks, weights + row * picks, experts,
                    std::min(kRowsAtOnce, rows - row), picks, y + row * width);
  }
}

template <class T>
void shared_expert(const T* x, const float* routed, const ExpertWeights& expert, int64_t rows, T* y) {
  int64_t width = expert.w13.inputs, inner = expert.w2.inputs;
  for (int64_t row = 0; row < rows; row += kRowsAtOnce) {
    int64_t count = std::min(kRowsAtOnce, rows - row);
    std::unique_ptr<T[]> gate_and_up(new T[size_t(count * 2 * inner)]), hidden(new T[size_t(count * inner)]);
    linear_fp8(x + row * width, expert.w13, expert.activation_group, count, gate_and_up.get());
    parallel_for(count, rows_per_task(8 * inner), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T* in = gate_and_up.get() + r * 2 * inner;
        swiglu(in, inner, expert.swiglu_limit, nullptr, hidden.get() + r * inner);
      }
    });
    T* out = y + row * width;
    linear_fp8(hidden.get(), expert.w2, expert.activation_group, count, out);
    const float* base = routed + row * width;
    parallel_for(count, rows_per_task(width), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin * width; i < end * width; ++i) round_to(base[i] + to_float(out[i]), out[i]);
    });
  }
}

template void moe_experts(const bf16*, const int64_t*, const float*, const ExpertWeights&, int64_t, int64_t,
                          float*);
template void moe_experts(const float*, const int64_t*, const float*, const ExpertWeights&, int64_t, int64_t,
                          float*);
template void shared_expert(const bf16*, const float*, const ExpertWeights&, int64_t, bf16*);
template void shared_expert(const float*, const float*, const ExpertWeights&, int64_t, float*);

}  // namespace deepinfer
