// Attention over the window and the picked compressed entries, one shared key = value vector per position.
//
// Order of sums, which rests on a row's own list of visible keys (window oldest to newest, then picks):
// * logit of a head and a key: per 64 elements of the width fused multiply-adds in ascending order from zero;
//   those sums are added in order; then times scale;
// * sum of the exponentials: lane l of 16 adds keys l, 16 + l, ..., then Lanes::sum, then the sink's;
// * output: likewise, per 64 keys in list order; then divided by that sum;
// * mass of a key: shares added over the heads in ascending order.
// Heads, keys (for logits) and elements (for outputs) lie in different lanes or registers and never mix, so
// tiles, splits over threads and what else is decoded beside a row's keys cannot change a bit.
//
// Keys are decoded in blocks of sixteen: as rows for the output, and transposed for the logits. A worker
// keeps the blocks of its last row: window blocks are cut by position and filled as far as the step's rows
// allow, so that neighbouring rows find them ready; a block of picks is kept while its entries stay the same.

#include "attention.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "kernels.h"
#include "records.h"
#include "sum_of_squares.h"
#include "tail_records.h"
#include "vector_math.h"

namespace deepinfer {

namespace {

#ifdef __AVX512F__
constexpr int kHeadTile = 12;  // accumulators of the 32 registers
#else
constexpr int kHeadTile = 6;  // 12 registers of 16, two for a key, one for a head's factor
#endif
constexpr int64_t kDepth = 64;          // elements of a logit that are summed in one go
constexpr int64_t kKeyRun = 64;         // keys of an output that are; their slice stays in the first cache
constexpr int64_t kTaskWork = 1 << 20;  // multiply-adds worth another thread
constexpr float kLowest = -1e30f;       // what an empty maximum starts from (spec 5.3)

int64_t round_to_lanes(int64_t value) { return (value + kLanes - 1) / kLanes * kLanes; }

// c[h][0..16) (+)= sum_i a[h][i] * b(i)[0..16) for kHeads heads; the sum is complete before it is added.
template <int kHeads, class Row>
inline void multiply_tile(const float* a, int64_t a_stride, int64_t count, const Row& b, float* c,
                          int64_t c_stride, bool add) {
  Lanes acc[kHeads];
  for (int h = 0; h < kHeads; ++h) acc[h] = Lanes::zero();
  for (int64_t i = 0; i < count; ++i) {
    Lanes row = Lanes::load(b(i));
    for (int h = 0; h < kHeads; ++h) acc[h] = fma(Lanes::fill(a[h * a_stride + i]), row, acc[h]);
  }
#pragma GCC unroll 16
  for (int h = 0; h < kHeads; ++h) {
    float* sum = c + h * c_stride;
    (add ? Lanes::load(sum) + acc[h] : acc[h]).store(sum);
  }
}

template <int kHeads, class Row>
inline void multiply_rest(int64_t heads, const float* a, int64_t a_stride, int64_t count, const Row& b,
                          float* c, int64_t c_stride, bool add) {
  if (heads == kHeads) return multiply_tile<kHeads>(a, a_stride, count, b, c, c_stride, add);
  if constexpr (kHeads > 1) multiply_rest<kHeads - 1>(heads, a, a_stride, count, b, c, c_stride, add);
}

template <class Row>
inline void multiply(int64_t heads, const float* a, int64_t a_stride, int64_t count, const Row& b, float* c,
                     int64_t c_stride, bool add) {
  int64_t h = 0;
  for (; h + kHeadTile <= heads; h += kHeadTile) {
    multiply_tile<kHeadTile>(a + h * a_stride, a_stride, count, b, c + h * c_stride, c_stride, add);
  }
  if (h < heads) {
    multiply_rest<kHeadTile - 1>(heads - h, a + h * a_stride, a_stride, count, b, c + h * c_stride, c_stride,
                                 add);
  }
}

// from [8][from_stride] -> to [8][to_stride], transposed.
inline void transpose8(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  __m256 r[8], pairs[8], quads[8];
  for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(from + i * from_stride);
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    quads[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
    quads[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xEE);
    quads[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
    quads[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xEE);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(to + i * to_stride, _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x20));
    _mm256_storeu_ps(to + (i + 4) * to_stride, _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x31));
  }
}

// Memory of one thread, kept between calls.
struct Scratch {
  std::vector<float> rows, columns, query, logits, sums, totals, mass;
  std::vector<const float*> keys;
  std::vector<int64_t> columns_of_keys;
};

template <class Value>
Value* at_least(std::vector<Value>& memory, int64_t size) {
  if (int64_t(memory.size()) < size) memory.resize(size_t(size));
  return memory.data();
}

// Decoded keys, by blocks of sixteen.
class KeyBlocks {
 public:
  KeyBlocks(Scratch& scratch, int64_t blocks, int64_t width)
      : padded_(round_to_lanes(width)),
        stride_(padded_ + kLanes),  // not a power of two, which would crowd few sets of the cache
        rows_(at_least(scratch.rows, blocks * kLanes * stride_)),
        columns_(at_least(scratch.columns, blocks * kLanes * padded_)) {}

  int64_t padded() const { return padded_; }
  int64_t stride() const { return stride_; }
  float* row(int64_t block, int64_t lane) { return rows_ + (block * kLanes + lane) * stride_; }
  // [padded width][16]
  const float* columns(int64_t block) const { return columns_ + block * kLanes * padded_; }
  void transpose(int64_t block) {
    float* to = columns_ + block * kLanes * padded_;
    for (int64_t i = 0; i < padded_; i += 8) {
      transpose8(row(block, 0) + i, stride_, to + i * kLanes, kLanes);
      transpose8(row(block, 8) + i, stride_, to + i * kLanes + 8, kLanes);
    }
  }

 private:
  int64_t padded_, stride_;
  float *rows_, *columns_;
};

template <class T>
class Worker {
 public:
  Worker(const AttentionInputs& inputs, const T* query, T* output, float* mass, Scratch& scratch)
      : in_(inputs),
        query_(query),
        output_(output),
        mass_(mass),
        scratch_(scratch),
        window_blocks_((inputs.window + kLanes - 2) / kLanes + 1),
        blocks_(scratch, window_blocks_ + round_to_lanes(inputs.picks_per_row) / kLanes, inputs.width),
        held_window_(size_t(window_blocks_)),
        held_picks_(size_t(round_to_lanes(inputs.picks_per_row)), -1) {}

  // The heads [begin, end) of one row.
  void attend(int64_t row, int64_t begin, int64_t end) {
    int64_t position = in_.positions[row], mass_size = in_.window + in_.picks_per_row;
    T* output = output_ + (row * in_.heads + begin) * in_.width;
    if (mass_) std::fill_n(mass_ + row * mass_size, mass_size, 0.0f);
    if (position < 0) {
      std::memset(static_cast<void*>(output), 0, size_t((end - begin) * in_.width) * sizeof(T));
      return;
    }
    enter(row, position);
    heads_ = end - begin;
    load_query(query_ + (row * in_.heads + begin) * in_.width);
    int64_t first = std::max<int64_t>(0, position - in_.window + 1), in_window = position - first + 1;
    int64_t picked = list_picks(row);
    count_ = in_window + picked;
    keys_ = at_least(scratch_.keys, round_to_lanes(count_));
    logit_stride_ = round_to_lanes(count_) + 2 * kLanes;  // whole blocks may begin early and end late
    logits_ = at_least(scratch_.logits, heads_ * logit_stride_) + kLanes;
    for (int64_t number = first / kLanes; number <= position / kLanes; ++number) {
      int64_t block = window_block(row, position, number, first), offset = number * kLanes - first;
      for (int64_t lane = std::max<int64_t>(0, -offset); lane < kLanes && offset + lane < in_window; ++lane) {
        keys_[offset + lane] = blocks_.row(block, lane);
      }
      multiply_block(block, offset);
    }
    for (int64_t done = 0; done < picked; done += kLanes) {
      int64_t block = pick_block(done, std::min<int64_t>(kLanes, picked - done));
      for (int64_t lane = 0; lane < kLanes && done + lane < picked; ++lane) {
        keys_[in_window + done + lane] = blocks_.row(block, lane);
      }
      multiply_block(block, in_window + done);
    }
    float* totals = at_least(scratch_.totals, heads_);
    for (int64_t h = 0; h < heads_; ++h) totals[h] = exponentiate(logits_ + h * logit_stride_, begin + h);
    write_output(totals, output);
    if (mass_) write_mass(totals, in_window, mass_ + row * mass_size);
  }

 private:
  struct HeldBlock {
    int64_t line = -1, number = 0, first = 0, last = 0;
  };

  // Moves to the request of a row; finds how far its rows go.
  void enter(int64_t row, int64_t position) {
    int64_t line = in_.request_index[row];
    if (line == line_ && position <= last_position_) return;
    line_ = line;
    last_position_ = position;
    for (int64_t next = row + 1; next < in_.rows && in_.request_index[next] == line &&
                                 in_.positions[next] == last_position_ + 1;
         ++next) {
      ++last_position_;
    }
    std::fill(held_picks_.begin(), held_picks_.end(), -1);
  }

  void load_query(const T* query) {
    query_stride_ = blocks_.stride();
    query32_ = at_least(scratch_.query, heads_ * query_stride_);
    for (int64_t h = 0; h < heads_; ++h) {
      const T* from = query + h * in_.width;
      float* to = query32_ + h * query_stride_;
      for (int64_t i = 0; i < in_.width; ++i) to[i] = to_float(from[i]);
    }
  }

  // Visible picks of a row and their place in the mass; returns their number.
  int64_t list_picks(int64_t row) {
    picks_ = at_least(scratch_.columns_of_keys, 2 * in_.picks_per_row);
    pick_columns_ = picks_ + in_.picks_per_row;
    const int64_t* picks = in_.picks + row * in_.picks_per_row;
    int64_t count = 0;
    for (int64_t i = 0; i < in_.picks_per_row; ++i) {
      if (picks[i] < 0) continue;
      picks_[count] = picks[i];
      pick_columns_[count++] = in_.window + i;
    }
    return count;
  }

  // The block of positions 16 number .. with those the row needs: from `first`, up to `position`.
  int64_t window_block(int64_t row, int64_t position, int64_t number, int64_t first) {
    int64_t block = number % window_blocks_;
    int64_t from = std::max(first, number * kLanes), end = number * kLanes + kLanes - 1;
    HeldBlock& held = held_window_[size_t(block)];
    bool ready = held.line == line_ && held.number == number && held.first <= from &&
                 held.last >= std::min(end, position);
    if (ready) return block;
    held = {line_, number, from, std::min(end, last_position_)};
    int64_t start = in_.num_computed_tokens[line_], slot = in_.slot_ids[line_];
    for (int64_t p = held.first; p <= held.last; ++p) {
      const uint8_t* record = p >= start ? in_.record + (row + p - position) * in_.ring.record_bytes
                                         : in_.ring.at(slot, p % in_.ring.entries);
      float* out = blocks_.row(block, p - number * kLanes);
      decode(record, decode_fp8_record, out);
    }
    blocks_.transpose(block);
    return block;
  }

  // The block of the visible picks done .. done + count.
  int64_t pick_block(int64_t done, int64_t count) {
    int64_t block = window_blocks_ + done / kLanes, lane = 0;
    int64_t* held = held_picks_.data() + done;
    while (lane < count && held[lane] == picks_[done + lane]) ++lane;
    if (lane == count) return block;
    const int64_t* table = in_.block_table + line_ * in_.blocks_per_request;
    for (; lane < count; ++lane) {
      int64_t pick = held[lane] = picks_[done + lane], entries = in_.compressed.entries;
      const uint8_t* record = in_.compressed.at(table[pick / entries], pick % entries);
      float* out = blocks_.row(block, lane);
      decode(record, decode_fp4_record, out);
    }
    blocks_.transpose(block);
    return block;
  }

  void decode(const uint8_t* record, void (*without_tail)(const uint8_t*, int64_t, float*), float* out) const {
    if (!in_.quantize) {
      std::memcpy(out, record, size_t(in_.width) * sizeof(float));
    } else if (in_.tail) {
      decode_tail_record(record, in_.width, in_.tail, out);
    } else {
      without_tail(record, in_.width, out);
    }
  }

  // Logits of a block's sixteen keys, used or not; those of later blocks overwrite what is not.
  void multiply_block(int64_t block, int64_t offset) {
    for (int64_t i = 0; i < in_.width; i += kDepth) {
      const float* columns = blocks_.columns(block) + i * kLanes;
      auto column = [=](int64_t k) { return columns + k * kLanes; };
      multiply(heads_, query32_ + i, query_stride_, std::min(kDepth, in_.width - i), column,
               logits_ + offset, logit_stride_, i > 0);
    }
  }

  // Logits -> exponentials relative to the largest; returns their sum with the sink's.
  float exponentiate(float* x, int64_t head) const {
    Lanes scale = Lanes::fill(in_.scale), most = Lanes::fill(kLowest);
    for (int64_t j = 0; j < count_; j += kLanes) {
      (Lanes::load(x + j) * scale).store(x + j);
      if (j + kLanes > count_) {
        std::fill(x + count_, x + j + kLanes, -std::numeric_limits<float>::infinity());
      }
      most = max(Lanes::load(x + j), most);  // passes over NaN, whose exponential is NaN
    }
    float each[kLanes];
    most.store(each);
    float top = *std::max_element(each, each + kLanes);
    Lanes sum = Lanes::zero();
    for (int64_t j = 0; j < count_; j += kLanes) {
      Lanes weight = exp(Lanes::load(x + j) - Lanes::fill(top));
      weight.store(x + j);
      sum = sum + weight;
    }
    return sum.sum() + exp_one(in_.sink[head] - top);
  }

  void write_output(const float* totals, T* output) {
    int64_t padded = blocks_.padded(), stride = blocks_.stride();
    float* sums = at_least(scratch_.sums, heads_ * stride);
    for (int64_t done = 0; done < count_; done += kKeyRun) {
      for (int64_t i = 0; i < padded; i += kLanes) {
        auto element = [keys = keys_ + done, i](int64_t j) { return keys[j] + i; };
        multiply(heads_, logits_ + done, logit_stride_, std::min(kKeyRun, count_ - done), element, sums + i,
                 stride, done > 0);
      }
    }
    for (int64_t h = 0; h < heads_; ++h) {
      for (int64_t i = 0; i < in_.width; ++i) {
        round_to(sums[h * stride + i] / totals[h], output[h * in_.width + i]);
      }
    }
  }

  void write_mass(const float* totals, int64_t in_window, float* mass) {
    int64_t padded = round_to_lanes(count_);
    float* sums = at_least(scratch_.mass, padded);
    std::fill_n(sums, padded, 0.0f);
    for (int64_t h = 0; h < heads_; ++h) {
      for (int64_t j = 0; j < count_; ++j) sums[j] += logits_[h * logit_stride_ + j] / totals[h];
    }
    std::copy_n(sums, in_window, mass + in_.window - in_window);
    for (int64_t j = in_window; j < count_; ++j) mass[pick_columns_[j - in_window]] = sums[j];
  }

  const AttentionInputs& in_;
  const T* query_;
  T* output_;
  float* mass_;
  Scratch& scratch_;
  int64_t window_blocks_;
  KeyBlocks blocks_;
  std::vector<HeldBlock> held_window_;
  std::vector<int64_t> held_picks_;

  int64_t line_ = -1, last_position_ = -1;  // of the present request
  int64_t heads_ = 0, count_ = 0, query_stride_ = 0, logit_stride_ = 0;
  float *query32_ = nullptr, *logits_ = nullptr;
  int64_t *picks_ = nullptr, *pick_columns_ = nullptr;
  const float** keys_ = nullptr;
};

}  // namespace

template <class T>
void sparse_attention(const AttentionInputs& inputs, const T* query, int64_t keys, T* output, float* mass) {
  // Tasks are groups of a row's heads; the mass is a sum over all of them.
  int64_t group = mass ? inputs.heads : std::min<int64_t>(inputs.heads, kHeadTile);
  int64_t groups = (inputs.heads + group - 1) / group;
  int64_t work = 2 * keys / std::max<int64_t>(1, inputs.rows) * inputs.width * group;
  parallel_for(inputs.rows * groups, kTaskWork / (work + 1) + 1, [&](int64_t begin, int64_t end) {
    thread_local Scratch scratch;
    Worker<T> worker(inputs, query, output, mass, scratch);
    while (begin < end) {
      int64_t row = begin / groups, stop = std::min(end, (row + 1) * groups);
      worker.attend(row, begin % groups * group, std::min(inputs.heads, (stop - row * groups) * group));
      begin = stop;
    }
  });
}

template <class T, class W>
void window_record(const T* kv, const W* norm_weight, float eps, const float* table, const int64_t* positions,
                   int64_t rows, int64_t width, int64_t rope_width, bool quantize, int64_t tail,
                   void* record) {
  int64_t bytes = width * int64_t(sizeof(float));
  if (quantize) bytes = tail ? tail_record_bytes(width, tail) : fp8_record_bytes(width);
  parallel_for(rows, 16384 / (width + 1) + 1, [=](int64_t begin, int64_t end) {
    std::vector<T> rounded(static_cast<size_t>(width));  // after the norm, and after the rotation
    T* y = rounded.data();
    for (int64_t row = begin; row < end; ++row) {
      uint8_t* out = static_cast<uint8_t*>(record) + row * bytes;
      if (positions[row] < 0) {
        std::memset(out, 0, size_t(bytes));
        continue;
      }
      const T* x = kv + row * width;
      float scale = 1.0f / std::sqrt(sum_of_squares(x, width) / float(width) + eps);
      for (int64_t i = 0; i < width; ++i) {
        round_to(to_float(norm_weight[i]) * (to_float(x[i]) * scale), y[i]);
      }
      const float *cosines = table + positions[row] * rope_width, *sines = cosines + rope_width / 2;
      T* turned = y + width - rope_width;
      for (int64_t i = 0; i < rope_width / 2; ++i) {
        float u = to_float(turned[2 * i]), v = to_float(turned[2 * i + 1]);
        round_to(u * cosines[i] - v * sines[i], turned[2 * i]);
        round_to(u * sines[i] + v * cosines[i], turned[2 * i + 1]);
      }
      if (!quantize) {
        for (int64_t i = 0; i < width; ++i) {
          float value = to_float(y[i]);
          std::memcpy(out + i * int64_t(sizeof value), &value, sizeof value);
        }
        continue;
      }
      if (tail) {
        encode_tail_record(y, width, tail, out);
        continue;
      }
      for (int64_t group = 0; group < width; group += kFp8Group) {
        uint8_t byte = fp8_scale(y + group);
        float inverse = e8m0_to_float(uint8_t(254 - byte));
        for (int64_t i = group; i < group + kFp8Group; ++i) out[i] = float_to_e4m3(to_float(y[i]) * inverse);
        out[width + group / kFp8Group] = byte;
      }
    }
  });
}

template void sparse_attention(const AttentionInputs&, const bf16*, int64_t, bf16*, float*);
template void sparse_attention(const AttentionInputs&, const float*, int64_t, float*, float*);
template void window_record(const bf16*, const bf16*, float, const float*, const int64_t*, int64_t, int64_t,
                            int64_t, bool, int64_t, void*);
template void window_record(const bf16*, const float*, float, const float*, const int64_t*, int64_t, int64_t,
                            int64_t, bool, int64_t, void*);
template void window_record(const float*, const bf16*, float, const float*, const int64_t*, int64_t, int64_t,
                            int64_t, bool, int64_t, void*);
template void window_record(const float*, const float*, float, const float*, const int64_t*, int64_t, int64_t,
                            int64_t, bool, int64_t, void*);

}  // namespace deepinfer
