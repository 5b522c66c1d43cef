// Index scores of the visible entries and the selection among them. Sixteen entries are scored at a time, one
// in each lane, and rows of one request share their decoded keys.
//
// FP4: doubled E2M1 values are whole numbers up to 12, so a group of 32 products is summed exactly in integers,
// in any order; one factor per group, groups in ascending order. Float32: one chain of fused multiply-adds per
// entry over ascending elements. Either order depends on the row, the head and the entry alone.

#include <algorithm>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "index.h"
#include "kernels.h"
#include "simd.h"

namespace deepinfer {

namespace {

constexpr int64_t kRowsPerTask = 8;
constexpr int64_t kTaskProducts = 1 << 20;   // multiply-adds worth another thread
constexpr int64_t kScratchScores = 1 << 22;  // scores kept at a time, over all rows
constexpr int64_t kGroup = 32;
constexpr float kNever = -std::numeric_limits<float>::infinity();

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Bit i: lane i of values is greater than (equal to) the limit; a NaN is neither.
#ifdef __AVX512F__
uint32_t lanes_above(Lanes values, Lanes limit) {
  return _mm512_cmp_ps_mask(values.v, limit.v, _CMP_GT_OQ);
}
uint32_t lanes_equal(Lanes values, Lanes limit) {
  return _mm512_cmp_ps_mask(values.v, limit.v, _CMP_EQ_OQ);
}
#else
uint32_t lanes_above(Lanes values, Lanes limit) {
  return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(values.low, limit.low, _CMP_GT_OQ)) |
                  _mm256_movemask_ps(_mm256_cmp_ps(values.high, limit.high, _CMP_GT_OQ)) << 8);
}
uint32_t lanes_equal(Lanes values, Lanes limit) {
  return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(values.low, limit.low, _CMP_EQ_OQ)) |
                  _mm256_movemask_ps(_mm256_cmp_ps(values.high, limit.high, _CMP_EQ_OQ)) << 8);
}
#endif

// Sum over heads, first to last, of relu(dot) * weight, product and sum rounded apart. A NaN stays.
struct HeadSum {
  __m256 low, high;
  void add(__m256 dot_low, __m256 dot_high, float weight, bool first) {
    __m256 zero = _mm256_setzero_ps(), factor = _mm256_set1_ps(weight);
    __m256 l = _mm256_mul_ps(_mm256_max_ps(zero, dot_low), factor);
    __m256 h = _mm256_mul_ps(_mm256_max_ps(zero, dot_high), factor);
    low = first ? l : _mm256_add_ps(low, l);
    high = first ? h : _mm256_add_ps(high, h);
  }
  void store(float* out) const {
    _mm256_storeu_ps(out, low);
    _mm256_storeu_ps(out + 8, high);
  }
};

// Queries and one tile of keys in FP4.
class PackedQueries {
 public:
  PackedQueries(int64_t rows, int64_t heads, int64_t dim)
      : heads_(heads), groups_(dim / kGroup), codes_(new int32_t[size_t(rows * heads * dim / 4) + 1]),
        factors_(new float[size_t(rows * heads * groups_) + 1]),
        offsets_(new int32_t[size_t(rows * heads * groups_) + 1]) {}

  // The key format's rounding of a query (spec 12.3), as doubled values: within eight elements first the
  // even ones, then the odd ones, as the nibbles of a record come apart.
  void set(int64_t row, const float* query) {
    for (int64_t g = 0; g < heads_ * groups_; ++g) {
      const float* x = query + g * kGroup;
      int64_t index = row * heads_ * groups_ + g;
      int8_t doubled[kGroup] = {};
      int32_t total = 0;
      bool has_nan = false;
      for (int i = 0; i < kGroup; ++i) has_nan |= (bits_of(x[i]) & 0x7FFFFFFF) > 0x7F800000;
      uint8_t byte = kE8M0NaN;
      if (!has_nan) {
        byte = float_to_e8m0_ceil(group_amax<kGroup>(x, 6.0f * 0x1p-126f) * (1.0f / 6.0f));
        float inverse = e8m0_to_float(uint8_t(254 - byte));
        uint8_t codes[kGroup];
        for (int i = 0; i < kGroup; ++i) codes[i] = float_to_e2m1(x[i] * inverse);
        for (int i = 0; i < kGroup; ++i) {
          int8_t value = int8_t(e2m1_to_float(codes[i]) * 2.0f);
          doubled[i / 8 * 8 + i % 2 * 4 + i % 8 / 2] = value;
          total += value;
        }
      }
      std::memcpy(codes_.get() + index * (kGroup / 4), doubled, sizeof doubled);
      factors_[index] = e8m0_to_float(byte) * 0.25f;  // both operands are doubled
      offsets_[index] = 12 * total;                   // keys are stored 12 too large, to be unsigned
    }
  }

  // Keys of sixteen entries: vector ((g * 8) + 2 c + odd) * 2 + half holds, for each of eight entries, four
  // elements of group g.
  class Tile {
   public:
    using Record = uint8_t;
    Tile(int64_t, int64_t dim)
        : groups_(dim / kGroup), keys_(size_t(groups_ * 16)), scales_(size_t(groups_ * 2)) {}

    void load(const uint8_t* const* records) {
      for (int64_t g = 0; g < groups_; ++g) {
        for (int half = 0; half < 2; ++half) load_half(records + half * 8, g, half);
      }
    }

    void score(const PackedQueries& queries, int64_t row, const float* weights, float* out) const {
      HeadSum sum;
      const int32_t* codes = queries.codes_.get() + row * queries.heads_ * groups_ * 8;
      for (int64_t h = 0; h < queries.heads_; ++h) {
        __m256 dot_low = _mm256_setzero_ps(), dot_high = _mm256_setzero_ps();
        for (int64_t g = 0; g < groups_; ++g, codes += 8) {
          __m256i low = _mm256_setzero_si256(), high = low;
          const Packed* key = &keys_[size_t(g * 16)];
          for (int c = 0; c < 8; ++c) {
            __m256i four = _mm256_set1_epi32(codes[c]);
            low = _mm256_add_epi16(low, _mm256_maddubs_epi16(key[2 * c].v, four));
            high = _mm256_add_epi16(high, _mm256_maddubs_epi16(key[2 * c + 1].v, four));
          }
          int64_t index = (row * queries.heads_ + h) * groups_ + g;
          __m256 factor = _mm256_set1_ps(queries.factors_[index]);
          __m256i offset = _mm256_set1_epi32(queries.offsets_[index]);
          dot_low = _mm256_add_ps(dot_low, scaled(low, offset, factor, scales_[size_t(2 * g)]));
          dot_high = _mm256_add_ps(dot_high, scaled(high, offset, factor, scales_[size_t(2 * g + 1)]));
        }
        sum.add(dot_low, dot_high, weights[h], h == 0);
      }
      sum.store(out);
    }

   private:
    struct alignas(32) Packed {
      __m256i v;
    };
    struct alignas(32) Scale {
      __m256 v;
    };

    static __m256 scaled(__m256i pairs, __m256i offset, __m256 factor, const Scale& scale) {
      __m256i total = _mm256_sub_epi32(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)), offset);
      return _mm256_mul_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(total), factor), scale.v);
    }

    void load_half(const uint8_t* const* records, int64_t g, int half) {
      auto both = [&](int i) {
        __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(records[i] + g * 16));
        __m128i second = _mm_loadu_si128(reinterpret_cast<const __m128i*>(records[i + 4] + g * 16));
        return _mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1);
      };
      __m256i a = both(0), b = both(1), c = both(2), d = both(3);
      __m256i ab_low = _mm256_unpacklo_epi32(a, b), ab_high = _mm256_unpackhi_epi32(a, b);
      __m256i cd_low = _mm256_unpacklo_epi32(c, d), cd_high = _mm256_unpackhi_epi32(c, d);
      Packed* out = &keys_[size_t(g * 16 + half)];
      split(_mm256_unpacklo_epi64(ab_low, cd_low), out);
      split(_mm256_unpackhi_epi64(ab_low, cd_low), out + 4);
      split(_mm256_unpacklo_epi64(ab_high, cd_high), out + 8);
      split(_mm256_unpackhi_epi64(ab_high, cd_high), out + 12);
      alignas(32) float scale[8];
      for (int i = 0; i < 8; ++i) scale[i] = e8m0_to_float(records[i][groups_ * 16 + g]);
      scales_[size_t(2 * g + half)].v = _mm256_load_ps(scale);
    }

    static void split(__m256i pairs, Packed* out) {
      const __m256i raised = _mm256_broadcastsi128_si256(
          _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
      __m256i nibble = _mm256_set1_epi8(15);
      out[0].v = _mm256_shuffle_epi8(raised, _mm256_and_si256(pairs, nibble));
      out[2].v = _mm256_shuffle_epi8(raised, _mm256_and_si256(_mm256_srli_epi16(pairs, 4), nibble));
    }

    int64_t groups_;
    std::vector<Packed> keys_;
    std::vector<Scale> scales_;
  };

 private:
  int64_t heads_, groups_;
  std::unique_ptr<int32_t[]> codes_;
  std::unique_ptr<float[]> factors_;
  std::unique_ptr<int32_t[]> offsets_;
};

// Queries and one tile of keys in float32.
class FloatQueries {
 public:
  FloatQueries(int64_t rows, int64_t heads, int64_t dim)
      : heads_(heads), dim_(dim), values_(new float[size_t(rows * heads * dim) + 1]) {}

  void set(int64_t row, const float* query) {
    std::copy_n(query, heads_ * dim_, values_.get() + row * heads_ * dim_);
  }

  // Keys of sixteen entries, element by element.
  class Tile {
   public:
    using Record = float;
    Tile(int64_t, int64_t dim) : dim_(dim), keys_(new float[size_t(dim * kLanes)]) {}

    void load(const float* const* records) {
      int64_t k = 0;
      for (; k + 8 <= dim_; k += 8) {
        transpose8(records, k, keys_.get() + k * kLanes);
        transpose8(records + 8, k, keys_.get() + k * kLanes + 8);
      }
      for (; k < dim_; ++k) {
        for (int i = 0; i < kLanes; ++i) keys_[size_t(k * kLanes + i)] = records[i][k];
      }
    }

    void score(const FloatQueries& queries, int64_t row, const float* weights, float* out) const {
      HeadSum sum;
      const float* query = queries.values_.get() + row * queries.heads_ * dim_;
      int64_t h = 0;
      for (; h + 4 <= queries.heads_; h += 4) add_heads<4>(query + h * dim_, weights + h, h == 0, sum);
      for (; h < queries.heads_; ++h) add_heads<1>(query + h * dim_, weights + h, h == 0, sum);
      sum.store(out);
    }

   private:
    template <int kHeads>
    void add_heads(const float* query, const float* weights, bool first, HeadSum& sum) const {
      __m256 low[kHeads], high[kHeads];
      for (int h = 0; h < kHeads; ++h) low[h] = high[h] = _mm256_setzero_ps();
      for (int64_t k = 0; k < dim_; ++k) {
        __m256 key_low = _mm256_loadu_ps(keys_.get() + k * kLanes);
        __m256 key_high = _mm256_loadu_ps(keys_.get() + k * kLanes + 8);
        for (int h = 0; h < kHeads; ++h) {
          __m256 value = _mm256_set1_ps(query[h * dim_ + k]);
          low[h] = _mm256_fmadd_ps(value, key_low, low[h]);
          high[h] = _mm256_fmadd_ps(value, key_high, high[h]);
        }
      }
      for (int h = 0; h < kHeads; ++h) sum.add(low[h], high[h], weights[h], first && h == 0);
    }

    // Elements k .. k + 7 of eight records, written sixteen floats apart.
    static void transpose8(const float* const* records, int64_t k, float* out) {
      auto both = [&](int i, int64_t from) {
        __m128 first = _mm_loadu_ps(records[i] + from), second = _mm_loadu_ps(records[i + 4] + from);
        return _mm256_insertf128_ps(_mm256_castps128_ps256(first), second, 1);
      };
      for (int64_t from = 0; from < 8; from += 4) {
        __m256 a = both(0, k + from), b = both(1, k + from), c = both(2, k + from), d = both(3, k + from);
        __m256 ab_low = _mm256_unpacklo_ps(a, b), ab_high = _mm256_unpackhi_ps(a, b);
        __m256 cd_low = _mm256_unpacklo_ps(c, d), cd_high = _mm256_unpackhi_ps(c, d);
        float* to = out + from * kLanes;
        _mm256_storeu_ps(to, _mm256_shuffle_ps(ab_low, cd_low, 0x44));
        _mm256_storeu_ps(to + kLanes, _mm256_shuffle_ps(ab_low, cd_low, 0xEE));
        _mm256_storeu_ps(to + 2 * kLanes, _mm256_shuffle_ps(ab_high, cd_high, 0x44));
        _mm256_storeu_ps(to + 3 * kLanes, _mm256_shuffle_ps(ab_high, cd_high, 0xEE));
      }
    }

    int64_t dim_;
    std::unique_ptr<float[]> keys_;
  };

 private:
  int64_t heads_, dim_;
  std::unique_ptr<float[]> values_;
};

// Walks ascending entries of one request; a division only where they are not neighbours.
template <class Record>
class EntryWalk {
 public:
  EntryWalk(const RecordView<const Record>& keys, const int64_t* blocks) : keys_(keys), blocks_(blocks) {}
  const Record* at(int64_t entry) {
    if (entry != next_) {
      column_ = entry / keys_.entries;
      offset_ = entry % keys_.entries;
    }
    const Record* record = keys_.at(blocks_[column_], offset_);
    next_ = entry + 1;
    if (++offset_ == keys_.entries) {
      offset_ = 0;
      ++column_;
    }
    return record;
  }

 private:
  const RecordView<const Record>& keys_;
  const int64_t* blocks_;
  int64_t next_ = -1, column_ = 0, offset_ = 0;
};

// The value that the `count` greatest reach, and how many equal to it are among them.
struct Threshold {
  float value;
  int64_t equals;
};

// Keeps what may still be among the greatest and halves it whenever it is full: linear in n. Values that are
// NaN or -inf do not count. `values` is padded with -inf to a multiple of 16.
Threshold find_threshold(const float* values, int64_t n, int64_t count) {
  if (n <= count) return {kNever, 0};
  int64_t capacity = count + std::max<int64_t>(count, 128), held = 0;
  std::unique_ptr<float[]> kept(new float[size_t(capacity)]);
  auto keep_best = [&] {
    std::nth_element(kept.get(), kept.get() + count - 1, kept.get() + held, std::greater<float>());
    held = count;
  };
  Lanes limit = Lanes::fill(kNever);
  for (int64_t i = 0; i < n; i += kLanes) {
    for (uint32_t above = lanes_above(Lanes::load(values + i), limit); above; above &= above - 1) {
      kept[size_t(held++)] = values[i + __builtin_ctz(above)];
      if (held == capacity) {
        keep_best();
        limit = Lanes::fill(kept[size_t(count - 1)]);
      }
    }
  }
  if (held < count) return {kNever, 0};
  keep_best();
  float value = kept[size_t(count - 1)];
  return {value, std::count(kept.get(), kept.get() + count, value)};
}

// Indices of the `count` greatest values in ascending order, -1 padded; ties go to the lower index.
void select(const float* values, int64_t n, int64_t count, int64_t* out) {
  int64_t written = 0;
  if (count > 0) {
    Threshold threshold = find_threshold(values, n, count);
    Lanes limit = Lanes::fill(threshold.value);
    for (int64_t i = 0; i < n; i += kLanes) {
      Lanes lanes = Lanes::load(values + i);
      uint32_t chosen = lanes_above(lanes, limit);
      if (threshold.equals > 0) chosen |= lanes_equal(lanes, limit);
      for (; chosen; chosen &= chosen - 1) {
        int64_t index = i + __builtin_ctz(chosen);
        if (values[index] == threshold.value && threshold.equals-- <= 0) continue;
        out[written++] = index;
      }
    }
  }
  std::fill(out + written, out + count, int64_t(-1));
}

// Rows of one request that are scored together, against entries 0 .. entries or against one row's own list.
struct Piece {
  int64_t first, count, entries;
  int64_t scores;   // of its first row, in the scratch; rows lie round_up(entries, 16) apart
  int64_t entries_at;  // of the list, -1: none
  int64_t stride() const { return round_up(entries, kLanes); }
};

template <class Queries>
class Search {
 public:
  using Record = typename Queries::Tile::Record;

  Search(FloatView query, FloatView head_weights, RecordView<const Record> keys, EntryRows rows,
         IndexSettings settings, int64_t* picks, int64_t* blocks, float* scores)
      : query_(query), head_weights_(head_weights), keys_(keys), rows_(rows), settings_(settings),
        picks_(picks), blocks_(blocks), out_scores_(scores) {}

  void run() {
    for (int64_t row = 0; row < rows_.rows;) row = run_from(row);
  }

 private:
  // As many rows as the scratch holds, at least one piece; returns the first row that is left.
  int64_t run_from(int64_t begin) {
    std::vector<Piece> pieces;
    listed_.clear();
    int64_t row = begin, total = 0;
    while (row < rows_.rows && total < kScratchScores) {
      Piece piece = piece_at(row, total);
      total += piece.count * piece.stride();
      row += piece.count;
      pieces.push_back(piece);
    }
    int64_t width = settings_.heads * settings_.dim;
    Queries queries(row - begin, settings_.heads, settings_.dim);
    std::vector<float> weights(size_t((row - begin) * settings_.heads));
    head_weights_.widen(begin * settings_.heads, (row - begin) * settings_.heads, weights.data());
    parallel_for(row - begin, 1 + 16384 / (width + 1), [&](int64_t from, int64_t until) {
      std::vector<float> wide((size_t(width)));
      for (int64_t r = from; r < until; ++r) {
        if (rows_.positions[begin + r] < 0) continue;
        query_.widen((begin + r) * width, width, wide.data());
        queries.set(r, wide.data());
      }
    });
    scratch_.reset(new float[size_t(total) + 1]);
    score_all(pieces, queries, weights.data(), begin);
    parallel_for(int64_t(pieces.size()), 1 + (1 << 16) / (total / int64_t(pieces.size()) + 1),
                 [&](int64_t from, int64_t until) {
                   for (int64_t p = from; p < until; ++p) finish(pieces[size_t(p)]);
                 });
    return row;
  }

  Piece piece_at(int64_t row, int64_t scores) {
    if (settings_.num_candidates) {
      int64_t start = int64_t(listed_.size()), visible = rows_.visible(row);
      for (int64_t c = 0; c < settings_.num_candidates; ++c) {
        int64_t block = settings_.candidates[row * settings_.num_candidates + c];
        if (block < 0 || block > visible / settings_.block_size) continue;
        int64_t first = block * settings_.block_size, last = std::min(first + settings_.block_size, visible);
        for (int64_t entry = first; entry < last; ++entry) listed_.push_back(entry);
      }
      return {row, 1, int64_t(listed_.size()) - start, scores, start};
    }
    Piece piece{row, 1, rows_.visible(row), scores, -1};
    if (rows_.positions[row] < 0) return piece;
    for (int64_t next = row + 1; next < rows_.rows && piece.count < kRowsPerTask; ++next) {
      if (rows_.positions[next] < 0 || rows_.request_index[next] != rows_.request_index[row]) break;
      piece.entries = std::max(piece.entries, rows_.visible(next));
      ++piece.count;
    }
    return piece;
  }

  void score_all(const std::vector<Piece>& pieces, const Queries& queries, const float* weights,
                 int64_t begin) {
    struct Task {
      const Piece* piece;
      int64_t from, until;
    };
    std::vector<Task> tasks;
    for (const Piece& piece : pieces) {
      int64_t products = piece.count * settings_.heads * settings_.dim;
      int64_t length = round_up(kTaskProducts / (products + 1) + 1, kLanes);
      for (int64_t from = 0; from < piece.entries; from += length) {
        tasks.push_back({&piece, from, std::min(from + length, piece.entries)});
      }
    }
    int64_t mean = 0;
    for (const Task& task : tasks) mean += (task.until - task.from) * task.piece->count;
    mean = tasks.empty() ? 0 : mean / int64_t(tasks.size()) * settings_.heads * settings_.dim;
    parallel_for(int64_t(tasks.size()), kTaskProducts / 2 / (mean + 1) + 1,
                 [&](int64_t first, int64_t last) {
                   typename Queries::Tile tile(settings_.heads, settings_.dim);
                   for (int64_t t = first; t < last; ++t) {
                     const Task& task = tasks[size_t(t)];
                     score(*task.piece, task.from, task.until, queries, weights, begin, tile);
                   }
                 });
  }

  // `from` is a multiple of 16. A last tile repeats its last record in the lanes that are left.
  void score(const Piece& piece, int64_t from, int64_t until, const Queries& queries, const float* weights,
             int64_t begin, typename Queries::Tile& tile) {
    EntryWalk<Record> walk(keys_, rows_.blocks_of(piece.first));
    const int64_t* listed = piece.entries_at < 0 ? nullptr : listed_.data() + piece.entries_at;
    const Record* records[kLanes];
    for (int64_t start = from; start < until; start += kLanes) {
      for (int64_t i = 0; i < kLanes; ++i) {
        int64_t index = start + i;
        records[i] = index < until ? walk.at(listed ? listed[index] : index) : records[i - 1];
      }
      tile.load(records);
      for (int64_t r = 0; r < piece.count; ++r) {
        int64_t row = piece.first + r;
        if (!listed && rows_.visible(row) <= start) continue;
        float* out = scratch_.get() + piece.scores + r * piece.stride() + start;
        tile.score(queries, row - begin, weights + (row - begin) * settings_.heads, out);
      }
    }
  }

  void finish(const Piece& piece) {
    for (int64_t r = 0; r < piece.count; ++r) {
      int64_t row = piece.first + r, shown = piece.entries_at < 0 ? rows_.visible(row) : piece.entries;
      float* scores = scratch_.get() + piece.scores + r * piece.stride();
      std::fill(scores + shown, scores + round_up(shown, kLanes), kNever);
      int64_t* picks = picks_ + row * settings_.top_k;
      select(scores, shown, settings_.top_k, picks);
      const int64_t* listed = piece.entries_at < 0 ? nullptr : listed_.data() + piece.entries_at;
      for (int64_t k = 0; listed && k < settings_.top_k && picks[k] >= 0; ++k) picks[k] = listed[picks[k]];
      if (settings_.topk_blocks) best_blocks(scores, shown, blocks_ + row * settings_.topk_blocks);
      if (out_scores_) publish(scores, shown, listed, row);
    }
  }

  // A block is as good as its best entry; the block of the newest entry counts as infinite.
  void best_blocks(const float* scores, int64_t shown, int64_t* out) {
    int64_t size = settings_.block_size, count = (shown + size - 1) / size;
    std::vector<float> best(size_t(round_up(count, kLanes)), kNever);
    for (int64_t b = 0; b < count; ++b) {
      float most = kNever;
      int64_t until = std::min((b + 1) * size, shown);
      for (int64_t i = b * size; i < until; ++i) most = scores[i] > most ? scores[i] : most;
      best[size_t(b)] = most;
    }
    if (count) best[size_t(count - 1)] = std::numeric_limits<float>::infinity();
    select(best.data(), count, settings_.topk_blocks, out);
  }

  void publish(const float* scores, int64_t shown, const int64_t* listed, int64_t row) {
    int64_t width = rows_.columns * keys_.entries;
    float* out = out_scores_ + row * width;
    std::fill(out, out + width, kNever);
    for (int64_t i = 0; i < shown; ++i) out[listed ? listed[i] : i] = scores[i];
  }

  FloatView query_, head_weights_;
  RecordView<const Record> keys_;
  EntryRows rows_;
  IndexSettings settings_;
  int64_t *picks_, *blocks_;
  float* out_scores_;
  std::vector<int64_t> listed_;
  std::unique_ptr<float[]> scratch_;
};

}  // namespace

template <class Record>
void index_topk(FloatView query, FloatView head_weights, RecordView<const Record> keys, EntryRows rows,
                IndexSettings settings, int64_t* picks, int64_t* blocks, float* scores) {
  using Queries = std::conditional_t<std::is_same_v<Record, uint8_t>, PackedQueries, FloatQueries>;
  Search<Queries>(query, head_weights, keys, rows, settings, picks, blocks, scores).run();
}

template void index_topk(FloatView, FloatView, RecordView<const uint8_t>, EntryRows, IndexSettings, int64_t*,
                         int64_t*, float*);
template void index_topk(FloatView, FloatView, RecordView<const float>, EntryRows, IndexSettings, int64_t*,
                         int64_t*, float*);

}  // namespace deepinfer
