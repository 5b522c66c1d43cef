// Sampling and verification of drafts on raw pointers; `sample.py` and `verify_drafts.py` say what is computed.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace deepinfer {

enum RowStatus : int8_t { kOk = 0, kNotANumber = 1, kNothingAllowed = 2 };

// All arrays have one entry per row; a null pointer stands for "none" where noted.
struct SampleRows {
  const float* logits;  // [rows, vocab]
  int64_t rows, vocab;
  const int64_t *seeds, *positions;
  const double* temperatures;     // 0: greedy
  const int64_t* top_k;           // or null
  const double *top_p, *min_p;    // or null
  const float* penalties;         // [rows, 3] repetition, frequency, presence, or null
  const int64_t* history_offsets;  // [rows + 1] into ids and counts, or null
  const int64_t *history_ids, *history_counts;
  const int64_t* bias_offsets;  // [rows + 1] into ids and bias, or null
  const int64_t* bias_ids;
  const float* bias;
  const int32_t* masks;       // [masks, words], bit set: allowed
  const int64_t* mask_index;  // -1: no mask; or null
  int64_t mask_words;
  int64_t forced_top_k;  // 0: the whole vocabulary
  int64_t num_logprobs;  // -1: none; else that many of the best beside the token's own
  bool raw_logprobs;
};

struct SampleResults {
  int64_t* token_ids;    // [rows]
  int8_t* status;        // [rows], or [requests] of verified drafts
  int64_t* logprob_ids;  // [rows, 1 + num_logprobs], or null
  float* logprobs;
};

struct Drafts {
  const int64_t* row_offsets;  // [requests + 1]
  int64_t requests;
  const int64_t* draft_ids;     // [rows]; unused in a request's last row
  const float* log_probs;       // [proposals, vocab]
  const int64_t* draft_index;   // [rows], row of log_probs; unused in a request's last row
};

void sample(const SampleRows& rows, const SampleResults& results);

// counts [requests]: tokens that each request emits, in its first rows.
void verify_drafts(const SampleRows& rows, const Drafts& drafts, const SampleResults& results, int64_t* counts);

}  // namespace deepinfer
