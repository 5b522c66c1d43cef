// Pooling of a group of rows into one latent, and the records of latents and index keys.

#include <algorithm>
#include <memory>
#include <type_traits>
#include <vector>

#include "index.h"
#include "kernels.h"
#include "rope.h"
#include "tail_records.h"

namespace deepinfer {

namespace {

int64_t grain_for(int64_t size) { return 8192 / (size + 1) + 1; }

template <class T>
std::unique_ptr<T[]> buffer(int64_t count) {
  return std::unique_ptr<T[]>(new T[size_t(count) + 1]);
}

void write_record(const bf16* x, int64_t size, ScaleFormat format, uint8_t* out) {
  quantize_fp4(x, format, 1, size, out);
}
void write_record(const float* x, int64_t size, ScaleFormat format, uint8_t* out) {
  quantize_fp4(x, format, 1, size, out);
}
template <class T>
void write_record(const T* x, int64_t size, ScaleFormat, float* out) {
  for (int64_t i = 0; i < size; ++i) out[i] = to_float(x[i]);
}

// What rows of `size` values need on their way into a region.
template <class T>
class RecordMaker {
 public:
  RecordMaker(RecordSettings settings, int64_t size)
      : settings_(settings), size_(size), weight_(buffer<float>(size)) {
    settings.norm_weight.widen(0, size, weight_.get());
  }

  void norm(const T* x, T* y) const { rms_norm_row(x, weight_.get(), settings_.eps, size_, y); }

  // The normed x, rotated, as the record of the entry that `row` closes; encode(vector, record) makes it of
  // `scratch`, which holds `size` values.
  template <class Record, class Encode>
  void write(const T* x, const EntryRows& rows, int64_t row, RecordView<Record> region, T* scratch,
             const Encode& encode) const {
    int64_t entry = rows.positions[row] / rows.ratio, rotated = settings_.rotated;
    Rotation rotation(settings_.table + entry * rows.ratio * rotated, rotated, false);
    std::copy_n(x, size_ - rotated, scratch);
    rotation.apply(x + size_ - rotated, scratch + size_ - rotated);
    int64_t block = rows.blocks_of(row)[entry / region.entries];
    encode(scratch, region.at(block, entry % region.entries));
  }

 private:
  RecordSettings settings_;
  int64_t size_;
  std::unique_ptr<float[]> weight_;
};

// Values and gates [rows, width] of the step, and the rows before it. An entry has `size` values: all of the
// width, or with overlap the second half of its own window's rows and the first half of the window before.
class Groups {
 public:
  Groups(const EntryRows& rows, const OpenGroups& open, int64_t count, int64_t width, bool overlap)
      : rows_(rows), open_(open), count_(count), width_(width), size_(overlap ? width / 2 : width),
        members_(overlap ? 2 * rows.ratio : rows.ratio), values_(buffer<float>(count * width)),
        gates_(buffer<float>(count * width)) {}

  int64_t members() const { return members_; }
  float* values() { return values_.get(); }
  float* gates() { return gates_.get(); }

  // out = sum_i value_i * (exp(gate_i - most) / sum_j exp(gate_j - most)) over the group that `row` closes,
  // oldest first, each step rounded. Members before the request's first row have no share.
  template <class T>
  void pool(int64_t row, std::vector<const float*>& members, T* out) const {
    find_members(row, members);
    const float* const* value = members.data();
    const float* const* gate = members.data() + members_;
    int64_t first = 0;
    while (!gate[first]) ++first;
    for (int64_t d = 0; d < size_; d += kLanes) {
      int64_t count = size_ - d;
      Lanes most = load_part(gate[first] + d, count), total = Lanes::zero(), sum = Lanes::zero();
      for (int64_t i = first + 1; i < members_; ++i) most = max(most, load_part(gate[i] + d, count));
      for (int64_t i = first; i < members_; ++i) {
        Lanes share = exp(load_part(gate[i] + d, count) - most);
        total = i ? total + share : share;
      }
      for (int64_t i = first; i < members_; ++i) {
        Lanes share = exp(load_part(gate[i] + d, count) - most) / total;
        Lanes term = load_part(value[i] + d, count) * share;
        sum = i ? sum + term : term;
      }
      store_row(sum, out + d, count);
    }
  }

  // Leaves the last rows of every request in its ring.
  void park() const {
    int64_t length = open_.ring.entries;
    for (int64_t row = 0; row < count_; ++row) {
      int64_t position = rows_.positions[row], line = rows_.request_index[row];
      if (position < 0) continue;
      if (position < open_.num_computed_tokens[line] + open_.row_counts[line] - length) continue;
      float* out = open_.ring.at(open_.slot_ids[line], position % length);
      std::copy_n(values_.get() + row * width_, width_, out);
      std::copy_n(gates_.get() + row * width_, width_, out + width_);
    }
  }

 private:
  // Values, then gates, oldest first: from the step's rows or, before its first row, from the ring.
  void find_members(int64_t row, std::vector<const float*>& members) const {
    int64_t position = rows_.positions[row], line = rows_.request_index[row];
    for (int64_t i = 0; i < members_; ++i) {
      int64_t back = members_ - 1 - i;
      int64_t half = i >= rows_.ratio ? size_ : 0;  // of rows of the own window, where there are two
      const float *value = nullptr, *gate = nullptr;
      if (position - back >= open_.num_computed_tokens[line]) {
        value = values_.get() + (row - back) * width_ + half;
        gate = gates_.get() + (row - back) * width_ + half;
      } else if (position - back >= 0) {
        value = open_.ring.at(open_.slot_ids[line], (position - back) % open_.ring.entries) + half;
        gate = value + width_;
      }
      members[size_t(i)] = value;
      members[size_t(members_ + i)] = gate;
    }
  }

  const EntryRows& rows_;
  const OpenGroups& open_;
  int64_t count_, width_, size_, members_;
  std::unique_ptr<float[]> values_, gates_;
};

}  // namespace

template <class T, class Record>
void compress(const T* x, const LinearWeight& wkv, const LinearWeight& wgate, RecordSettings settings,
              OpenGroups open, RecordView<Record> region, EntryRows rows, T* latent) {
  int64_t size = wkv.outputs, count = rows.rows;
  while (count > 0 && rows.positions[count - 1] < 0) --count;  // padding comes last
  std::fill(latent + count * size, latent + rows.rows * size, T{});
  if (count == 0) return;
  Groups groups(rows, open, rows.ratio > 1 ? count : 0, size, false);
  if (rows.ratio > 1) {
    linear(x, wkv, count, groups.values());
    linear(x, wgate, count, groups.gates());
  } else {
    linear(x, wkv, count, latent);
  }
  RecordMaker<T> maker(settings, size);
  parallel_for(count, grain_for(size), [&](int64_t begin, int64_t end) {
    std::unique_ptr<T[]> scratch = buffer<T>(size);
    std::vector<const float*> members(size_t(2 * groups.members()));
    for (int64_t row = begin; row < end; ++row) {
      T* out = latent + row * size;
      if (!rows.closes_group(row)) {
        std::fill(out, out + size, T{});
        continue;
      }
      if (rows.ratio > 1) groups.pool(row, members, out);
      maker.norm(out, out);
      maker.write(out, rows, row, region, scratch.get(), [size](const T* vector, Record* record) {
        write_record(vector, size, ScaleFormat::kE4M3, record);
      });
    }
  });
  if (rows.ratio > 1) groups.park();  // last: a ring may be as short as its chunk is long
}

template <class T, class Record>
void compress_biased(const T* x, const LinearWeight& wkv, const LinearWeight& wgate, BiasedSettings biased,
                     RecordSettings settings, OpenGroups open, RecordView<Record> region, EntryRows rows,
                     T* latent) {
  int64_t width = wkv.outputs, size = biased.overlap ? width / 2 : width, count = rows.rows;
  while (count > 0 && rows.positions[count - 1] < 0) --count;  // padding comes last
  std::fill(latent + count * size, latent + rows.rows * size, T{});
  if (count == 0) return;
  Groups groups(rows, open, count, width, biased.overlap);
  linear(x, wkv, count, groups.values());
  linear(x, wgate, count, groups.gates());
  parallel_for(count, grain_for(width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (rows.positions[row] < 0) continue;
      const float* bias = biased.bias + rows.positions[row] % rows.ratio * width;
      float* gate = groups.gates() + row * width;
      for (int64_t i = 0; i < width; ++i) gate[i] += bias[i];
    }
  });
  RecordMaker<T> maker(settings, size);
  parallel_for(count, grain_for(size), [&](int64_t begin, int64_t end) {
    std::unique_ptr<T[]> scratch = buffer<T>(size);
    std::unique_ptr<float[]> values = buffer<float>(size);
    std::vector<const float*> members(size_t(2 * groups.members()));
    for (int64_t row = begin; row < end; ++row) {
      T* out = latent + row * size;
      if (!rows.closes_group(row)) {
        std::fill(out, out + size, T{});
        continue;
      }
      groups.pool(row, members, out);
      maker.norm(out, out);
      maker.write(out, rows, row, region, scratch.get(), [&](T* vector, Record* record) {
        if constexpr (std::is_same_v<Record, float>) {
          write_record(vector, size, ScaleFormat::kE8M0, record);
        } else if (biased.index) {
          hadamard_row(vector, size, values.get(), vector);
          write_record(vector, size, ScaleFormat::kE8M0, record);
        } else {
          encode_tail_record(vector, size, settings.rotated, record);
        }
      });
    }
  });
  groups.park();  // last: a ring may be as short as its chunk is long
}

template <class T, class Record>
void index_key(const T* latent, const LinearWeight& wk, RecordSettings settings, RecordView<Record> region,
               EntryRows rows) {
  std::vector<int64_t> closing;
  for (int64_t row = 0; row < rows.rows; ++row) {
    if (rows.closes_group(row)) closing.push_back(row);
  }
  int64_t count = int64_t(closing.size()), inputs = wk.inputs, size = wk.outputs;
  if (count == 0) return;
  const T* x = latent + closing[0] * inputs;
  std::unique_ptr<T[]> gathered;
  if (closing.back() - closing[0] != count - 1) {
    gathered = buffer<T>(count * inputs);
    for (int64_t i = 0; i < count; ++i) {
      std::copy_n(latent + closing[size_t(i)] * inputs, inputs, gathered.get() + i * inputs);
    }
    x = gathered.get();
  }
  std::unique_ptr<T[]> keys = buffer<T>(count * size);
  linear(x, wk, count, keys.get());
  RecordMaker<T> maker(settings, size);
  parallel_for(count, grain_for(size), [&](int64_t begin, int64_t end) {
    std::unique_ptr<T[]> scratch = buffer<T>(size);
    for (int64_t i = begin; i < end; ++i) {
      T* key = keys.get() + i * size;
      maker.norm(key, key);
      maker.write(key, rows, closing[size_t(i)], region, scratch.get(), [size](const T* vector, Record* record) {
        write_record(vector, size, ScaleFormat::kE8M0, record);
      });
    }
  });
}

#define KEYS(T, Record)                                                                                 \
  template void compress(const T*, const LinearWeight&, const LinearWeight&, RecordSettings, OpenGroups, \
                         RecordView<Record>, EntryRows, T*);                                            \
  template void compress_biased(const T*, const LinearWeight&, const LinearWeight&, BiasedSettings,     \
                                RecordSettings, OpenGroups, RecordView<Record>, EntryRows, T*);         \
  template void index_key(const T*, const LinearWeight&, RecordSettings, RecordView<Record>, EntryRows)
KEYS(bf16, uint8_t);
KEYS(bf16, float);
KEYS(float, uint8_t);
KEYS(float, float);
#undef KEYS

}  // namespace deepinfer
