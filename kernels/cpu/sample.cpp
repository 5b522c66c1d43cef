// One row at a time: adjust, scan, select, masses in integers, draw. Scratch belongs to the thread and grows to the
// vocabulary once; a row writes only the parts of it that it uses.

#include "sample.h"

#include "philox.h"
#include "select.h"

namespace deepinfer {

namespace {

constexpr int64_t kParallelValues = 1 << 16;  // logits per piece of work, about 10 us
constexpr double kMinTemperature = 1e-5;
constexpr double kMass = 2147483648.0;           // 2^31
constexpr double kDraftShare = 0.99995000124997917;  // exp(-5e-5): keeps the leftover of a rejection above 0

struct Scratch {
  std::vector<float> adjusted, maxima, exponentials, halves;
  std::vector<uint32_t> masses, leftover;
  Picked kept, best;
  std::vector<int64_t> order;
};

// The distribution that a row is drawn from. Arrays live in the scratch.
struct Row {
  const float* logits;  // adjusted
  float largest;
  int8_t status;
  bool greedy;
  int64_t token;        // of a greedy row
  float factor;         // 1 / temperature
  float log_sum;        // of the exponentials
  uint64_t total;       // of the masses
};

template <class T>
T* grown(std::vector<T>& values, int64_t size) {
  if (int64_t(values.size()) < size) values.resize(size_t(size));
  return values.data();
}

// ln x for x >= 1.
float log_one(float x) {
  int exponent;
  float fraction = std::frexp(x, &exponent) * 2.0f;  // in [1, 2)
  float lanes[kLanes];
  log1p_unit(Lanes::fill(fraction - 1.0f)).store(lanes);
  float n = float(exponent - 1);
  return std::fma(n, 0.693359375f, std::fma(n, -2.12194440e-4f, lanes[0]));
}

// 0 + 1, 2 + 3, ... again and again; `width` is a power of two, `scratch` as large.
float tree_sum(const float* values, float* scratch, int64_t width) {
  for (; width > 1; width /= 2) {
    float* __restrict to = scratch;
    const float* __restrict from = values;
    for (int64_t i = 0; i < width / 2; ++i) to[i] = from[2 * i] + from[2 * i + 1];
    values = scratch;
    scratch += width / 2;
  }
  return values[0];
}

bool adjusts(const SampleRows& in, int64_t row) {
  return (in.history_offsets && in.penalties && in.history_offsets[row] < in.history_offsets[row + 1]) ||
         (in.bias_offsets && in.bias_offsets[row] < in.bias_offsets[row + 1]) ||
         (in.mask_index && in.mask_index[row] >= 0);
}

void add_penalties(const SampleRows& in, int64_t row, float* logits) {
  float repetition = in.penalties[3 * row], frequency = in.penalties[3 * row + 1];
  float presence = in.penalties[3 * row + 2];
  for (int64_t i = in.history_offsets[row]; i < in.history_offsets[row + 1]; ++i) {
    float& value = logits[in.history_ids[i]];
    value = value > 0.0f ? value / repetition : value * repetition;
    if (in.history_counts[i] > 0) {
      value -= frequency * float(in.history_counts[i]);
      value -= presence;
    }
  }
}

void apply_mask(const int32_t* mask, int64_t vocab, float* logits) {
  for (int64_t word = 0; word * 32 < vocab; ++word) {
    uint32_t bits = uint32_t(mask[word]);
    if (bits == ~0u) continue;
    int64_t end = std::min<int64_t>(32, vocab - word * 32);
    for (int64_t i = 0; i < end; ++i) {
      if (!(bits >> i & 1)) logits[word * 32 + i] = -kInfinity;
    }
  }
}

bool holds_bad(const float* row, int64_t size) {
  Flags bad;
  for (int64_t i = 0; i < size; i += kLanes) {
    bad.add_not_below(load_part(row + i, size - i, -kInfinity), Lanes::fill(kInfinity));
  }
  return bad.any();
}

// Penalties, bias, bans and mask; then what the row holds. A bad logit counts even where it is banned.
void open_row(const SampleRows& in, int64_t row, Scratch& scratch, Row& out) {
  const float* raw = in.logits + row * in.vocab;
  float* maxima = grown(scratch.maxima, (in.vocab + kBlock - 1) / kBlock * kLanes);
  out.logits = raw;
  bool bad = false;
  if (adjusts(in, row)) {
    bad = holds_bad(raw, in.vocab);
    float* logits = grown(scratch.adjusted, in.vocab);
    std::memcpy(logits, raw, size_t(in.vocab) * sizeof(float));
    if (in.history_offsets && in.penalties) add_penalties(in, row, logits);
    if (in.bias_offsets) {
      for (int64_t i = in.bias_offsets[row]; i < in.bias_offsets[row + 1]; ++i) {
        logits[in.bias_ids[i]] += in.bias[i];
      }
    }
    if (in.mask_index && in.mask_index[row] >= 0) {
      apply_mask(in.masks + in.mask_index[row] * in.mask_words, in.vocab, logits);
    }
    out.logits = logits;
  }
  Scan scan = scan_row(out.logits, in.vocab, maxima);
  out.largest = scan.largest;
  out.status = bad || scan.bad ? kNotANumber : scan.largest == -kInfinity ? kNothingAllowed : kOk;
  out.greedy = in.temperatures[row] == 0.0;
}

// Sum of the masses of at least `edge`. All masses together stay below 2^32, as their shares sum to 1.
uint32_t mass_at_least(const uint32_t* masses, int64_t padded, uint32_t edge) {
  uint32_t sum = 0;
  for (int64_t i = 0; i < padded; ++i) sum += masses[i] >= edge ? masses[i] : 0;
  return sum;
}

// z = (l - largest) / T in place of the logits, their exponentials, masses and sums.
void weigh(Scratch& scratch, Row& row) {
  Picked& kept = scratch.kept;
  int64_t width = std::max<int64_t>(64, int64_t(std::bit_ceil(uint64_t(kept.count))));
  float* exponentials = grown(scratch.exponentials, width);
  float* halves = grown(scratch.halves, width);
  uint32_t* masses = grown(scratch.masses, padded_size(kept.count, kLanes));
  int64_t padded = padded_size(kept.count, kLanes);
  for (int64_t i = 0; i < padded; i += kLanes) {
    Lanes z = (Lanes::load(kept.values.data() + i) - Lanes::fill(row.largest)) * Lanes::fill(row.factor);
    exp(z).store(exponentials + i);
  }
  std::fill(exponentials + padded, exponentials + width, 0.0f);
  float sum = tree_sum(exponentials, halves, width);
  Lanes total = Lanes::fill(sum), scale = Lanes::fill(float(kMass));
  for (int64_t i = 0; i < padded; i += kLanes) {
    store_truncated(Lanes::load(exponentials + i) / total * scale, masses + i);
  }
  row.log_sum = log_one(sum);
  row.total = mass_at_least(masses, padded, 0);
}

// The largest mass v such that the masses of at least v sum to `wanted`, which is 1 to their total.
uint32_t mass_edge(const uint32_t* masses, int64_t count, uint32_t total, uint32_t wanted) {
  int64_t padded = padded_size(count, kLanes);
  // all masses below this together are less than what may go
  uint64_t at = (total - wanted) / uint64_t(count), below = (uint64_t(1) << 31) + 1;
  while (below - at > 1) {
    uint64_t middle = (at + below) / 2;
    (mass_at_least(masses, padded, uint32_t(middle)) >= wanted ? at : below) = middle;
  }
  return uint32_t(at);
}

// Top-p, then min-p; equal values at the edge stay. Weighs again if anything went.
void filter(const SampleRows& in, int64_t index, Scratch& scratch, Row& row) {
  double top_p = in.top_p ? in.top_p[index] : 1.0;
  float min_p = in.min_p ? float(in.min_p[index]) : 0.0f;
  if (!(top_p < 1.0) && !(min_p > 0.0f)) return;
  uint32_t edge = 0;
  if (top_p < 1.0) {
    double wanted = std::ceil(top_p * double(row.total));
    uint32_t least = wanted < 1.0 ? 1 : uint32_t(wanted);
    edge = mass_edge(scratch.masses.data(), scratch.kept.count, uint32_t(row.total), least);
  }
  Picked& kept = scratch.kept;
  const uint32_t* masses = scratch.masses.data();
  const float* exponentials = scratch.exponentials.data();
  int32_t* places = kept.places.data();
  int64_t count = 0;
  for (int64_t i = 0; i < kept.count; ++i) {
    places[count] = int32_t(i);
    count += int64_t(masses[i] >= edge) & int64_t(exponentials[i] >= min_p);  // no branch to mispredict
  }
  if (count == kept.count) return;
  kept.keep_places(count);
  weigh(scratch, row);
}

// Which columns are kept, and their masses. A greedy row keeps what the forced top-k leaves, at temperature 1, and
// only where log-probabilities are asked for.
void distribution(const SampleRows& in, int64_t index, Scratch& scratch, Row& row) {
  open_row(in, index, scratch, row);
  if (row.status != kOk) return;
  if (row.greedy) {
    row.token = first_largest(row.logits, in.vocab, scratch.maxima.data(), row.largest);
    if (in.num_logprobs < 0 || in.raw_logprobs) return;
  }
  int64_t most = in.forced_top_k > 0 ? std::min(in.forced_top_k, in.vocab) : in.vocab;
  int64_t k = most;
  if (!row.greedy && in.top_k && in.top_k[index] > 0) k = std::min(in.top_k[index], most);
  // A very high temperature must not make the factor 0: -inf times 0 is no number.
  double temperature = row.greedy ? 1.0 : std::max(in.temperatures[index], kMinTemperature);
  row.factor = std::max(float(1.0 / temperature), std::numeric_limits<float>::min());
  select_largest(row.logits, in.vocab, scratch.maxima.data(), row.largest, k, most, scratch.kept);
  weigh(scratch, row);
  if (!row.greedy) filter(in, index, scratch, row);
}

// The first column whose running sum exceeds the share of the total that the word names.
template <class Mass>
int64_t draw(const Mass* masses, int64_t count, uint64_t total, uint32_t word) {
  uint64_t target = integer_draw(word, total), running = 0;
  for (int64_t i = 0; i < count; ++i) {
    running += masses[i];
    if (running > target) return i;
  }
  return count - 1;  // only for a total of 0
}

// Sum of e^(l - largest) over the whole row: lanes within a stretch, then stretches in order.
float sum_of_exponentials(const float* logits, int64_t size, float largest) {
  double sum = 0.0;
  Lanes top = Lanes::fill(largest);
  for (int64_t start = 0; start < size; start += 1024) {
    Lanes stretch = Lanes::zero();
    int64_t end = std::min(size, start + 1024);
    for (int64_t i = start; i < end; i += kLanes) {
      stretch = stretch + exp(load_part(logits + i, end - i, -kInfinity) - top);
    }
    sum += double(stretch.sum());
  }
  return float(sum);
}

// Log-probability of the token, then of the best, by logit and among equal ones by id.
void report(const SampleRows& in, int64_t index, Scratch& scratch, const Row& row, int64_t token, int64_t* ids,
            float* logprobs) {
  const float* logits = row.logits;
  float largest = row.largest, factor = row.factor, log_sum = row.log_sum;
  Picked* best = &scratch.kept;
  if (in.raw_logprobs) {
    logits = in.logits + index * in.vocab;
    factor = 1.0f;
    Scan scan = scan_row(logits, in.vocab, scratch.maxima.data());
    largest = scan.largest;
    log_sum = log_one(sum_of_exponentials(logits, in.vocab, largest));
    best = &scratch.best;
    best->count = 0;
    if (in.num_logprobs > 0) {
      int64_t count = std::min(in.num_logprobs, in.vocab);
      select_largest(logits, in.vocab, scratch.maxima.data(), largest, count, count, *best);
    }
  }
  auto logprob = [&](float logit) { return (logit - largest) * factor - log_sum; };
  ids[0] = token;
  logprobs[0] = logprob(logits[token]);
  int64_t* order = grown(scratch.order, best->count);
  for (int64_t i = 0; i < best->count; ++i) order[i] = i;
  int64_t count = std::min(in.num_logprobs, best->count);
  const float* values = best->values.data();
  std::partial_sort(order, order + count, order + best->count, [&](int64_t a, int64_t b) {
    return values[a] != values[b] ? values[a] > values[b] : a < b;
  });
  for (int64_t i = 0; i < count; ++i) {
    ids[1 + i] = best->ids[size_t(order[i])];
    logprobs[1 + i] = logprob(values[order[i]]);
  }
}

Scratch& own_scratch() {
  thread_local Scratch scratch;
  return scratch;
}

// A row that emits nothing has id -1 and log-probability -inf everywhere.
void clear(const SampleRows& in, const SampleResults& out, int64_t row) {
  out.token_ids[row] = -1;
  if (in.num_logprobs < 0) return;
  std::fill_n(out.logprob_ids + row * (1 + in.num_logprobs), 1 + in.num_logprobs, -1);
  std::fill_n(out.logprobs + row * (1 + in.num_logprobs), 1 + in.num_logprobs, -kInfinity);
}

void emit(const SampleRows& in, const SampleResults& out, int64_t index, Scratch& scratch, const Row& row,
          int64_t token) {
  out.token_ids[index] = token;
  if (in.num_logprobs < 0) return;
  int64_t offset = index * (1 + in.num_logprobs);
  report(in, index, scratch, row, token, out.logprob_ids + offset, out.logprobs + offset);
}

uint32_t word_of(const SampleRows& in, int64_t index, int64_t row, Stream which) {
  return random_word(uint64_t(in.seeds[index]), uint64_t(in.positions[index]) + uint64_t(row) * kRowStride, which);
}

// A draw from the row itself.
int64_t draw_token(const SampleRows& in, int64_t index, Scratch& scratch, const Row& row, int64_t step_row,
                   Stream which) {
  if (row.greedy) return row.token;
  uint32_t word = word_of(in, index, step_row, which);
  return scratch.kept.ids[size_t(draw(scratch.masses.data(), scratch.kept.count, row.total, word))];
}

bool accepts(const SampleRows& in, int64_t index, Scratch& scratch, const Row& row, int64_t step_row,
             int64_t draft, const float* log_q) {
  if (row.greedy) return row.token == draft;
  const int32_t* ids = scratch.kept.ids.data();
  const int32_t* found = std::lower_bound(ids, ids + scratch.kept.count, int32_t(draft));
  if (found == ids + scratch.kept.count || *found != draft) return false;
  double p = double(scratch.masses[size_t(found - ids)]) / double(row.total);
  double q = double(exp_one(log_q[draft]));
  return unit_draw(word_of(in, index, step_row, Stream::kCoin)) * q < p;
}

// A draw from what the target has above the draft; from the target itself if that is nothing at all.
int64_t draw_leftover(const SampleRows& in, int64_t index, Scratch& scratch, const Row& row, int64_t step_row,
                      const float* log_q) {
  if (row.greedy) return row.token;
  int64_t count = scratch.kept.count, padded = padded_size(count, kLanes);
  const int32_t* ids = scratch.kept.ids.data();
  float* q = grown(scratch.halves, padded);
  for (int64_t i = 0; i < padded; ++i) q[i] = i < count ? log_q[ids[i]] : -kInfinity;
  for (int64_t i = 0; i < padded; i += kLanes) exp(Lanes::load(q + i)).store(q + i);
  uint32_t* leftover = grown(scratch.leftover, count);
  uint64_t total = 0;
  for (int64_t i = 0; i < count; ++i) {
    double rest = double(scratch.masses[size_t(i)]) / double(row.total) - kDraftShare * double(q[i]);
    leftover[i] = rest > 0.0 ? uint32_t(rest * kMass) : 0;
    total += leftover[i];
  }
  if (total == 0) return draw_token(in, index, scratch, row, step_row, Stream::kResample);
  return ids[draw(leftover, count, total, word_of(in, index, step_row, Stream::kResample))];
}

// Tokens that the request emits.
int64_t verify_request(const SampleRows& in, const Drafts& drafts, int64_t first, int64_t end,
                       const SampleResults& out, int8_t& status) {
  Scratch& scratch = own_scratch();
  status = kOk;
  for (int64_t index = first; index < end; ++index) {
    Row row{};
    distribution(in, index, scratch, row);
    int64_t step_row = index - first;
    if (row.status != kOk) {
      status = row.status;
      return step_row;
    }
    if (index == end - 1) {
      emit(in, out, index, scratch, row, draw_token(in, index, scratch, row, step_row, Stream::kFresh));
      return step_row + 1;
    }
    int64_t draft = drafts.draft_ids[index];
    const float* log_q = drafts.log_probs + drafts.draft_index[index] * in.vocab;
    if (!accepts(in, index, scratch, row, step_row, draft, log_q)) {
      emit(in, out, index, scratch, row, draw_leftover(in, index, scratch, row, step_row, log_q));
      return step_row + 1;
    }
    emit(in, out, index, scratch, row, draft);
  }
  return 0;
}

}  // namespace

void sample(const SampleRows& in, const SampleResults& out) {
  int64_t grain = std::max<int64_t>(1, kParallelValues / std::max<int64_t>(1, in.vocab));
  parallel_for(in.rows, grain, [&](int64_t begin, int64_t end) {
    Scratch& scratch = own_scratch();
    for (int64_t index = begin; index < end; ++index) {
      clear(in, out, index);
      Row row{};
      distribution(in, index, scratch, row);
      out.status[index] = row.status;
      if (row.status != kOk) continue;
      emit(in, out, index, scratch, row, draw_token(in, index, scratch, row, 0, Stream::kFresh));
    }
  });
}

void verify_drafts(const SampleRows& in, const Drafts& drafts, const SampleResults& out, int64_t* counts) {
  for (int64_t row = 0; row < in.rows; ++row) clear(in, out, row);
  int64_t grain = std::max<int64_t>(1, kParallelValues / std::max<int64_t>(1, in.vocab));
  parallel_for(drafts.requests, grain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      counts[r] =
          verify_request(in, drafts, drafts.row_offsets[r], drafts.row_offsets[r + 1], out, out.status[r]);
    }
  });
}

}  // namespace deepinfer
