#include "gate.h"

#include <algorithm>
#include <vector>

#include "kernels.h"
#include "row_lanes.h"

namespace deepinfer {

namespace {

// Integers that compare as the floats do, zeros of either sign alike and NaN above everything.
int32_t rank_key(float rank) {
  float positive_zero = rank + 0.0f;
  int32_t bits = int32_t(bits_of(positive_zero));
  int32_t key = bits ^ ((bits >> 31) & 0x7FFFFFFF);
  return rank == rank ? key : std::numeric_limits<int32_t>::max();
}

class Chooser {
 public:
  Chooser(int64_t experts, const GateSettings& settings)
      : settings_(settings),
        scores_(size_t(experts)),
        keys_(size_t(experts)),
        best_(size_t(settings.top_k)) {}

  void run(const float* logits, const float* bias, int64_t* ids, float* weights) {
    int64_t experts = int64_t(scores_.size()), top_k = settings_.top_k;
    score(logits);
    for (int64_t e = 0; e < experts; ++e) keys_[size_t(e)] = rank_key(scores_[size_t(e)] + bias[e]);
    // Ids come in ascending order and only a greater key overtakes, so equal ranks leave the lower id ahead.
    int64_t found = 0;
    for (int64_t e = 0; e < experts; ++e) {
      int32_t key = keys_[size_t(e)];
      if (found == top_k && key <= best_[size_t(top_k - 1)]) continue;
      int64_t place = found < top_k ? found++ : top_k - 1;
      for (; place > 0 && key > best_[size_t(place - 1)]; --place) {
        best_[size_t(place)] = best_[size_t(place - 1)];
        ids[place] = ids[place - 1];
      }
      best_[size_t(place)] = key;
      ids[place] = e;
    }
    weigh(ids, weights);
  }

  void run_given(const float* logits, const int64_t* ids, float* weights) {
    score(logits);
    weigh(ids, weights);
  }

 private:
  void score(const float* logits) {
    int64_t experts = int64_t(scores_.size());
    for (int64_t e = 0; e < experts; e += kLanes) {
      store_part(sqrt(softplus(load_part(logits + e, experts - e))), scores_.data() + e, experts - e);
    }
  }

  void weigh(const int64_t* ids, float* weights) const {
    int64_t top_k = settings_.top_k;
    float sum = 0.0f;
    for (int64_t k = 0; k < top_k; ++k) {
      weights[k] = scores_[size_t(ids[k])];
      sum = sum + weights[k];
    }
    if (settings_.norm_topk_prob && top_k > 1) {
      for (int64_t k = 0; k < top_k; ++k) weights[k] = weights[k] / (sum + 1e-20f);
    }
    for (int64_t k = 0; k < top_k; ++k) weights[k] = weights[k] * settings_.routed_scaling_factor;
  }

  GateSettings settings_;
  std::vector<float> scores_;
  std::vector<int32_t> keys_, best_;
};

// choose(chooser, row, logits, ids, weights) fills ids and weights of a row.
template <class T, class Choose>
void route_rows(const T* x, const LinearWeight& weight, const int64_t* positions, const GateSettings& settings,
                int64_t rows, float* logits, int64_t* ids, float* weights, const Choose& choose) {
  if (rows == 0) return;
  int64_t experts = weight.outputs, top_k = settings.top_k;
  linear(x, weight, rows, logits);
  parallel_for(rows, 64, [=, &choose](int64_t begin, int64_t end) {
    Chooser chooser(experts, settings);
    for (int64_t row = begin; row < end; ++row) {
      float *row_logits = logits + row * experts, *row_weights = weights + row * top_k;
      int64_t* row_ids = ids + row * top_k;
      if (positions[row] >= 0) {
        choose(chooser, row, row_logits, row_ids, row_weights);
        continue;
      }
      std::fill_n(row_logits, experts, 0.0f);
      std::fill_n(row_weights, top_k, 0.0f);
      std::fill_n(row_ids, top_k, int64_t(-1));
    }
  });
}

}  // namespace

template <class T>
void moe_gate(const T* x, const LinearWeight& weight, const float* bias, const int64_t* positions,
              const GateSettings& settings, int64_t rows, float* logits, int64_t* ids, float* weights) {
  route_rows(x, weight, positions, settings, rows, logits, ids, weights,
             [=](Chooser& chooser, int64_t, const float* row_logits, int64_t* row_ids, float* row_weights) {
               chooser.run(row_logits, bias, row_ids, row_weights);
             });
}

template <class T>
void moe_hash_gate(const T* x, const LinearWeight& weight, const int64_t* table, const int64_t* tokens,
                   const int64_t* positions, const GateSettings& settings, int64_t rows, float* logits,
                   int64_t* ids, float* weights) {
  int64_t top_k = settings.top_k;
  route_rows(x, weight, positions, settings, rows, logits, ids, weights,
             [=](Chooser& chooser, int64_t row, const float* row_logits, int64_t* row_ids, float* row_weights) {
               std::copy_n(table + tokens[row] * top_k, top_k, row_ids);
               chooser.run_given(row_logits, row_ids, row_weights);
             });
}

template void moe_gate(const bf16*, const LinearWeight&, const float*, const int64_t*, const GateSettings&,
                       int64_t, float*, int64_t*, float*);
template void moe_gate(const float*, const LinearWeight&, const float*, const int64_t*, const GateSettings&,
                       int64_t, float*, int64_t*, float*);

template void moe_hash_gate(const bf16*, const LinearWeight&, const int64_t*, const int64_t*, const int64_t*,
                            const GateSettings&, int64_t, float*, int64_t*, float*);
template void moe_hash_gate(const float*, const LinearWeight&, const int64_t*, const int64_t*, const int64_t*,
                            const GateSettings&, int64_t, float*, int64_t*, float*);

}  // namespace deepinfer
