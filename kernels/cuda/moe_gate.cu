// Router: logits of every expert, then the best of a row and their weights; see kernels/moe_gate.py.
//
// Triton gives a product of few rows to few programs and picks with a reduction over a whole row per pick. Here
// every expert has a warp of its own, and a row's picks are found in the registers of one warp.
//
// A logit is summed by 32 lanes, each over its own inputs in ascending order, then lane by lane at distances 16,
// 8, 4, 2, 1: an order that depends on nothing but the number of inputs. No header is needed.

typedef long long int64;
typedef unsigned long long uint64;

constexpr int kLanes = 32;
constexpr int kRows = 8;       // rows that share one reading of a row of the weight
constexpr int kPerLane = 16;   // experts of a lane: at most 512 in all
constexpr int kVector = 8;     // bfloat16 values of one load
constexpr unsigned kAll = 0xFFFFFFFFu;

// The two bfloat16 values of a word, exact.
__device__ inline float low_value(unsigned word) { return __uint_as_float(word << 16); }
__device__ inline float high_value(unsigned word) { return __uint_as_float(word & 0xFFFF0000u); }

__device__ inline float add_products(uint4 a, uint4 b, float total) {
  total = fmaf(low_value(a.x), low_value(b.x), total);
  total = fmaf(high_value(a.x), high_value(b.x), total);
  total = fmaf(low_value(a.y), low_value(b.y), total);
  total = fmaf(high_value(a.y), high_value(b.y), total);
  total = fmaf(low_value(a.z), low_value(b.z), total);
  total = fmaf(high_value(a.z), high_value(b.z), total);
  total = fmaf(low_value(a.w), low_value(b.w), total);
  return fmaf(high_value(a.w), high_value(b.w), total);
}

// log(1 + e^x) as torch has it: x itself above 20.
__device__ inline float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// Integers that compare as the floats do, zeros of either sign alike and NaN above everything.
__device__ inline int rank_key(float rank) {
  int bits = __float_as_int(rank + 0.0f);
  int key = bits ^ ((bits >> 31) & 0x7FFFFFFF);
  return rank == rank ? key : 0x7FFFFFFF;
}

// Grid: ceil(rows / 8) by ceil(experts / warps of a block). x [rows, inputs], weight [experts, inputs], bfloat16
// at addresses of whole vectors; inputs a multiple of 8. Padding rows get zeros.
extern "C" __global__ void moe_gate_logits(const uint4* x, const uint4* weight, const int64* positions,
                                           float* logits, int64 rows, int inputs, int experts) {
  int lane = threadIdx.x % kLanes;
  int expert = blockIdx.y * (blockDim.x / kLanes) + threadIdx.x / kLanes;
  if (expert >= experts) return;
  int64 first = int64(blockIdx.x) * kRows;
  int vectors = inputs / kVector;
  const uint4* column = weight + int64(expert) * vectors;
  float total[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) total[r] = 0.0f;
  for (int v = lane; v < vectors; v += kLanes) {
    uint4 b = column[v];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (first + r < rows) total[r] = add_products(x[(first + r) * vectors + v], b, total[r]);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
      total[r] += __shfl_xor_sync(kAll, total[r], distance);
    }
    if (lane == 0 && first + r < rows) {
      logits[(first + r) * experts + expert] = positions[first + r] >= 0 ? total[r] : 0.0f;
    }
  }
}

// Grid: one warp per row. At most 512 experts, at most 32 picks.
extern "C" __global__ void moe_gate_route(const float* logits, const float* bias, const int64* positions,
                                          int64* expert_ids, float* expert_weights, float factor, int experts,
                                          int top_k, int normalize) {
  int lane = threadIdx.x;
  int64 row = blockIdx.x;
  bool valid = positions[row] >= 0;
  float scores[kPerLane];
  uint64 ranks[kPerLane];  // key, then the id's complement: the larger wins, equal keys by lower id; 0: taken
#pragma unroll
  for (int slot = 0; slot < kPerLane; ++slot) {
    int expert = slot * kLanes + lane;
    scores[slot] = 0.0f;
    ranks[slot] = 0;
    if (expert < experts) {
      scores[slot] = sqrtf(softplus(logits[row * experts + expert]));
      unsigned key = unsigned(rank_key(scores[slot] + bias[expert])) ^ 0x80000000u;
      ranks[slot] = (uint64(key) << 32) | (0xFFFFFFFFu - unsigned(expert));
    }
  }
  int own_id = -1;
  float own_weight = 0.0f, total = 0.0f;
  for (int pick = 0; pick < top_k; ++pick) {
    uint64 best = 0;
    float score = 0.0f;
#pragma unroll
    for (int slot = 0; slot < kPerLane; ++slot) {
      if (ranks[slot] > best) {
        best = ranks[slot];
        score = scores[slot];
      }
    }
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
      uint64 other = __shfl_xor_sync(kAll, best, distance);
      float other_score = __shfl_xor_sync(kAll, score, distance);
      if (other > best) {
        best = other;
        score = other_score;
      }
    }
#pragma unroll
    for (int slot = 0; slot < kPerLane; ++slot) {
      if (ranks[slot] == best) ranks[slot] = 0;
    }
    total = total + score;  // best first
    if (lane == pick) {
      own_id = int(0xFFFFFFFFu - unsigned(best));
      own_weight = score;
    }
  }
  if (normalize) own_weight = own_weight / (total + 1e-20f);
  if (lane < top_k) {
    expert_ids[row * top_k + lane] = valid ? own_id : -1;
    expert_weights[row * top_k + lane] = valid ? own_weight * factor : 0.0f;
  }
}
