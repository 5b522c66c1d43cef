// The k largest of a long row without sorting it: one pass for maxima of groups, a threshold by counting, one pass
// that packs what reaches it. The result is the set of a full sort, in ascending order of the index.
//
// Counting replaces sorting since 16 lanes count 8,000 values in less time than one mispredicted branch per value
// would take. A threshold is found by halving the range of float bits, so no distribution of values is slow.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "vector_math.h"

namespace deepinfer {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLowest = std::numeric_limits<float>::lowest();
constexpr int64_t kGroup = 16;              // values per maximum
constexpr int64_t kBlock = kGroup * kLanes;  // a block of the row gives kLanes maxima, one per lane

#ifdef __AVX512F__

struct Flags {
  __mmask16 set = 0;
  // NaN counts as not below.
  void add_not_below(Lanes x, Lanes bound) { set |= _mm512_cmp_ps_mask(x.v, bound.v, _CMP_NLT_UQ); }
  bool any() const { return set != 0; }
};

struct Counter {
  int64_t total = 0;
  void add_at_least(Lanes x, Lanes edge) {
    total += std::popcount(uint32_t(_mm512_cmp_ps_mask(x.v, edge.v, _CMP_GE_OQ)));
  }
  int64_t sum() const { return total; }
};

// Bit per lane that reaches the edge.
inline uint64_t lanes_at_least(Lanes x, Lanes edge) { return _mm512_cmp_ps_mask(x.v, edge.v, _CMP_GE_OQ); }

// floor(x) as unsigned for x in 0 .. 2^31; 2^31 itself is the pattern that an overflow gives.
inline void store_truncated(Lanes x, uint32_t* p) { _mm512_storeu_si512(p, _mm512_cvttps_epi32(x.v)); }

#else

struct Flags {
  __m256 set = _mm256_setzero_ps();
  // NaN counts as not below.
  void add_not_below(Lanes x, Lanes bound) {
    set = _mm256_or_ps(set, _mm256_cmp_ps(x.low, bound.low, _CMP_NLT_UQ));
    set = _mm256_or_ps(set, _mm256_cmp_ps(x.high, bound.high, _CMP_NLT_UQ));
  }
  bool any() const { return _mm256_movemask_ps(set) != 0; }
};

struct Counter {
  __m256i low = _mm256_setzero_si256(), high = _mm256_setzero_si256();
  void add_at_least(Lanes x, Lanes edge) {
    low = _mm256_sub_epi32(low, _mm256_castps_si256(_mm256_cmp_ps(x.low, edge.low, _CMP_GE_OQ)));
    high = _mm256_sub_epi32(high, _mm256_castps_si256(_mm256_cmp_ps(x.high, edge.high, _CMP_GE_OQ)));
  }
  int64_t sum() const {
    alignas(32) int32_t lanes[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), _mm256_add_epi32(low, high));
    int64_t total = 0;
    for (int32_t lane : lanes) total += lane;
    return total;
  }
};

// Bit per lane that reaches the edge.
inline uint64_t lanes_at_least(Lanes x, Lanes edge) {
  auto half = [](__m256 a, __m256 b) { return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ))); };
  return half(x.low, edge.low) | half(x.high, edge.high) << 8;
}

// floor(x) as unsigned for x in 0 .. 2^31; 2^31 itself is the pattern that an overflow gives.
inline void store_truncated(Lanes x, uint32_t* p) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_cvttps_epi32(x.low));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p) + 1, _mm256_cvttps_epi32(x.high));
}

#endif

// Float bits as integers of the same order; -0 just below +0.
inline int64_t key_of(float x) {
  int32_t bits = std::bit_cast<int32_t>(x);
  return bits >= 0 ? int64_t(bits) : int64_t(std::numeric_limits<int32_t>::min()) - bits - 1;
}

inline float of_key(int64_t key) {
  return std::bit_cast<float>(int32_t(key >= 0 ? key : int64_t(std::numeric_limits<int32_t>::min()) - key - 1));
}

// How many of the values reach the edge; `padded` is a multiple of kLanes, what pads is -inf, the edge finite.
inline int64_t count_at_least(const float* values, int64_t padded, float edge) {
  Counter even, odd;
  Lanes bound = Lanes::fill(edge);
  int64_t i = 0;
  for (; i + 2 * kLanes <= padded; i += 2 * kLanes) {
    even.add_at_least(Lanes::load(values + i), bound);
    odd.add_at_least(Lanes::load(values + i + kLanes), bound);
  }
  if (i < padded) even.add_at_least(Lanes::load(values + i), bound);
  return even.sum() + odd.sum();
}

struct Edge {
  float value;
  int64_t count;  // how many values reach it
};

// An edge in [low, high] that at least `wanted` values reach, and at most `enough`; if there is none, the
// highest edge that `wanted` reach. `low` must be reached by `wanted` or is returned.
inline Edge find_edge(const float* values, int64_t padded, float low, float high, int64_t wanted, int64_t enough) {
  Edge best{low, count_at_least(values, padded, low)};
  int64_t below = key_of(high) + 1, at = key_of(low);  // `at` is reached by `wanted`, `below` is not
  if (best.count <= enough) return best;
  while (below - at > 1) {
    int64_t middle = at + (below - at) / 2;
    int64_t count = count_at_least(values, padded, of_key(middle));
    if (count < wanted) {
      below = middle;
      continue;
    }
    at = middle;
    best = {of_key(middle), count};
    if (count <= enough) break;
  }
  return best;
}

// What one pass over a row tells.
struct Scan {
  float largest = -kInfinity;
  bool bad = false;  // a NaN or +inf
};

inline int64_t padded_size(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

// maxima: one per group, kLanes for every started block of the row.
inline Scan scan_row(const float* row, int64_t size, float* maxima) {
  Flags bad;
  Lanes infinity = Lanes::fill(kInfinity), largest = Lanes::fill(-kInfinity);
  for (int64_t start = 0; start < size; start += kBlock, maxima += kLanes) {
    Lanes most = Lanes::fill(-kInfinity);
    if (start + kBlock <= size) {
      for (int64_t i = 0; i < kBlock; i += kLanes) {
        Lanes x = Lanes::load(row + start + i);
        bad.add_not_below(x, infinity);
        most = max(x, most);
      }
    } else {
      for (int64_t i = start; i < size; i += kLanes) {
        Lanes x = load_part(row + i, size - i, -kInfinity);
        bad.add_not_below(x, infinity);
        most = max(x, most);
      }
    }
    most.store(maxima);
    largest = max(most, largest);
  }
  float lanes[kLanes];
  largest.store(lanes);
  return {*std::max_element(lanes, lanes + kLanes), bad.any()};
}

// Lowest index of the largest value, which must be finite.
inline int64_t first_largest(const float* row, int64_t size, const float* maxima, float largest) {
  for (int64_t start = 0; start < size; start += kBlock, maxima += kLanes) {
    if (lanes_at_least(Lanes::load(maxima), Lanes::fill(largest)) != 0) {
      return std::find(row + start, row + std::min(size, start + kBlock), largest) - row;
    }
  }
  return -1;
}

// Writes first + i for every set bit i of the mask and returns their number; writes up to kSpare entries beyond.
// Always four at once, since the number of bits is what a branch would mispredict.
constexpr int64_t kSpare = 16;

inline int64_t write_bits(uint64_t mask, int32_t first, int32_t* out) {
  int64_t count = std::popcount(mask);
  for (int64_t i = 0; i < count; i += 4) {
    for (int64_t j = 0; j < 4; ++j) {
      out[i + j] = first + std::countr_zero(mask);
      mask &= mask - 1;
    }
  }
  return count;
}

// Values and their indices, ascending; the values are padded by -inf.
struct Picked {
  std::vector<float> values;
  std::vector<int32_t> ids, places;
  int64_t count = 0;

  void reserve(int64_t most) {
    size_t size = size_t(padded_size(most, 64) + kSpare);
    if (values.size() < size) {
      values.resize(size);
      ids.resize(size);
      places.resize(size);
    }
  }
  void pad() { std::fill_n(values.data() + count, padded_size(count, kLanes) - count, -kInfinity); }
  // Keeps the entries at the first `kept` of `places`, which ascend.
  void keep_places(int64_t kept) {
    for (int64_t i = 0; i < kept; ++i) {
      values[size_t(i)] = values[size_t(places[size_t(i)])];
      ids[size_t(i)] = ids[size_t(places[size_t(i)])];
    }
    count = kept;
    pad();
  }
};

// Indices of the values of one block of at most kBlock that reach the edge.
inline int64_t write_places(const float* block, int64_t size, Lanes edge, int32_t first, int32_t* out) {
  int64_t count = 0;
  for (int64_t start = 0; start < size; start += 64) {
    uint64_t mask = 0;
    for (int64_t lane = 0; lane < 64 && start + lane < size; lane += kLanes) {
      Lanes x = load_part(block + start + lane, size - start - lane, -kInfinity);
      mask |= lanes_at_least(x, edge) << lane;
    }
    count += write_bits(mask, first + int32_t(start), out + count);
  }
  return count;
}

inline void pack_row(const float* row, int64_t size, const float* maxima, float edge, Picked& out) {
  Lanes bound = Lanes::fill(edge);
  int64_t count = 0;
  int32_t* ids = out.ids.data();
  for (int64_t start = 0; start < size; start += kBlock, maxima += kLanes) {
    if (lanes_at_least(Lanes::load(maxima), bound) == 0) continue;
    if (start + kBlock > size) {
      count += write_places(row + start, size - start, bound, int32_t(start), ids + count);
      continue;
    }
    for (int64_t i = start; i < start + kBlock; i += 64) {
      uint64_t mask = lanes_at_least(Lanes::load(row + i), bound) |
                      lanes_at_least(Lanes::load(row + i + 16), bound) << 16 |
                      lanes_at_least(Lanes::load(row + i + 32), bound) << 32 |
                      lanes_at_least(Lanes::load(row + i + 48), bound) << 48;
      count += write_bits(mask, int32_t(i), ids + count);
    }
  }
  for (int64_t i = 0; i < count; ++i) out.values[size_t(i)] = row[ids[i]];
  out.count = count;
  out.pad();
}

// Every finite value that is at least the k-th largest, equal ones included; of those equal ones only the first by
// index where there are more than `most` in all. Needs k <= most and a finite largest value.
inline void select_largest(const float* row, int64_t size, const float* maxima, float largest, int64_t k,
                           int64_t most, Picked& out) {
  out.reserve(size);
  int64_t groups = (size + kBlock - 1) / kBlock * kLanes;
  // k groups reach the bound, so k values do; a little above k will do here
  float bound = kLowest;
  if (k < groups) bound = find_edge(maxima, groups, kLowest, largest, k, k + k / 8).value;
  pack_row(row, size, maxima, bound, out);
  if (out.count <= k) return;
  Edge edge = find_edge(out.values.data(), padded_size(out.count, kLanes), bound, largest, k, k);
  int64_t kept = 0;
  int32_t* places = out.places.data();
  if (edge.count <= most) {
    kept = write_places(out.values.data(), out.count, Lanes::fill(edge.value), 0, places);
  } else {
    const float* values = out.values.data();
    int64_t equal_left = std::count(values, values + out.count, edge.value) - (edge.count - most);
    for (int64_t i = 0; i < out.count; ++i) {
      if (values[i] > edge.value || (values[i] == edge.value && equal_left-- > 0)) places[kept++] = int32_t(i);
    }
  }
  out.keep_places(kept);
}

}  // namespace deepinfer
