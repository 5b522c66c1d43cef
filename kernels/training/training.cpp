// Training forms of operations whose autograd by parts would spend its time on memory: forward and backward.
//
// Float32, whole sequences of one length. Speed is the only purpose: `differentiable.py` has the same maths
// from torch's own functions. No part of any artifact. Widths are multiples of 16.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "../cpu/formats.h"
#include "../cpu/vector_math.h"

namespace deepinfer {

namespace {

using at::Tensor;

const float* in(const Tensor& t) {
  TORCH_CHECK(t.is_contiguous() && t.scalar_type() == at::kFloat, "training: float32 contiguous wanted");
  return t.const_data_ptr<float>();
}

Tensor zeros(at::IntArrayRef shape) { return at::zeros(shape, at::TensorOptions().dtype(at::kFloat)); }

float dot(const float* a, const float* b, int64_t size) {
  Lanes sum = Lanes::zero();
  for (int64_t i = 0; i < size; i += kLanes) sum = fma(Lanes::load(a + i), Lanes::load(b + i), sum);
  return sum.sum();
}

// y += factor * x
void add_scaled(float factor, const float* x, float* y, int64_t size) {
  Lanes f = Lanes::fill(factor);
  for (int64_t i = 0; i < size; i += kLanes) fma(f, Lanes::load(x + i), Lanes::load(y + i)).store(y + i);
}

// Keys of a row: the window of its sequence, then its picks.
struct RowKeys {
  const float* key[1024];
  float* gradient[1024];
  int64_t place[1024];
  int64_t count = 0;
};

struct Attention {
  int64_t rows, heads, width, window, length, picked, entries;
  const float *query, *record, *stored;
  const int64_t* picks;

  void gather(int64_t t, float* record_gradient, float* stored_gradient, RowKeys& keys) const {
    int64_t sequence = t / length, position = t % length;
    keys.count = 0;
    for (int64_t p = std::max<int64_t>(0, position - window + 1); p <= position; ++p) {
      int64_t row = t - (position - p);
      keys.key[keys.count] = record + row * width;
      keys.gradient[keys.count] = record_gradient ? record_gradient + row * width : nullptr;
      keys.place[keys.count++] = window - 1 - (position - p);
    }
    for (int64_t j = 0; j < picked; ++j) {
      int64_t pick = picks[t * picked + j];
      if (pick < 0) continue;
      int64_t row = sequence * entries + pick;
      keys.key[keys.count] = stored + row * width;
      keys.gradient[keys.count] = stored_gradient ? stored_gradient + row * width : nullptr;
      keys.place[keys.count++] = window + j;
    }
  }
};

Attention attention_of(const Tensor& query, const Tensor& record, const Tensor& stored, const Tensor& picks,
                       int64_t window, int64_t length) {
  Attention a;
  a.rows = query.size(0), a.heads = query.size(1), a.width = query.size(2);
  a.window = window, a.length = length, a.picked = picks.size(1), a.entries = stored.size(1);
  TORCH_CHECK(a.width % kLanes == 0 && window + a.picked <= 1024, "training: attend");
  a.query = in(query), a.record = in(record), a.stored = in(stored);
  a.picks = picks.contiguous().const_data_ptr<int64_t>();
  return a;
}

// -> output [T, H, d], shares [T, H, W + k], share of the sink [T, H]
std::tuple<Tensor, Tensor, Tensor> attend_forward(const Tensor& query, const Tensor& record,
                                                  const Tensor& stored, const Tensor& picks,
                                                  const Tensor& sink, double scale, int64_t window,
                                                  int64_t length) {
  Attention a = attention_of(query, record, stored, picks, window, length);
  int64_t slots = window + a.picked;
  Tensor output = zeros(query.sizes()), shares = zeros({a.rows, a.heads, slots});
  Tensor sink_share = zeros({a.rows, a.heads});
  float *out = output.data_ptr<float>(), *share = shares.data_ptr<float>();
  float* sunk = sink_share.data_ptr<float>();
  const float* sinks = in(sink);
  at::parallel_for(0, a.rows / length, 1, [&](int64_t begin, int64_t end) {
    RowKeys keys;
    alignas(64) float logits[1024 + kLanes];
    for (int64_t t = begin * length; t < end * length; ++t) {
      a.gather(t, nullptr, nullptr, keys);
      for (int64_t h = 0; h < a.heads; ++h) {
        const float* q = a.query + (t * a.heads + h) * a.width;
        float top = -1e30f;
        for (int64_t j = 0; j < keys.count; ++j) {
          logits[j] = dot(q, keys.key[j], a.width) * float(scale);
          top = std::max(top, logits[j]);
        }
        float total = exp_one(sinks[h] - top);
        for (int64_t j = 0; j < keys.count; j += kLanes) {
          Lanes e = exp(load_part(logits + j, keys.count - j, -INFINITY) - Lanes::fill(top));
          store_part(e, logits + j, keys.count - j);
          total += e.sum();
        }
        float inverse = 1.0f / total, *y = out + (t * a.heads + h) * a.width;
        sunk[t * a.heads + h] = exp_one(sinks[h] - top) * inverse;
        for (int64_t j = 0; j < keys.count; ++j) {
          float p = logits[j] * inverse;
          share[(t * a.heads + h) * slots + keys.place[j]] = p;
          add_scaled(p, keys.key[j], y, a.width);
        }
      }
    }
  });
  return {output, shares, sink_share};
}

// -> gradients of query, record, stored, sink
std::tuple<Tensor, Tensor, Tensor, Tensor> attend_backward(const Tensor& gradient, const Tensor& query,
                                                           const Tensor& record, const Tensor& stored,
                                                           const Tensor& picks, const Tensor& output,
                                                           const Tensor& shares, const Tensor& sink_share,
                                                           double scale, int64_t window, int64_t length) {
  Attention a = attention_of(query, record, stored, picks, window, length);
  int64_t slots = window + a.picked, sequences = a.rows / length;
  Tensor grad_query = zeros(query.sizes()), grad_record = zeros(record.sizes());
  Tensor grad_stored = zeros(stored.sizes()), grad_sink = zeros({sequences, a.heads});
  const float *g_all = in(gradient), *out = in(output), *share = in(shares), *sunk = in(sink_share);
  float *gq_all = grad_query.data_ptr<float>(), *gr = grad_record.data_ptr<float>();
  float *gs = grad_stored.data_ptr<float>(), *gsink = grad_sink.data_ptr<float>();
  at::parallel_for(0, sequences, 1, [&](int64_t begin, int64_t end) {
    RowKeys keys;
    for (int64_t t = begin * length; t < end * length; ++t) {
      a.gather(t, gr, gs, keys);
      for (int64_t h = 0; h < a.heads; ++h) {
        int64_t place = (t * a.heads + h) * a.width;
        const float *q = a.query + place, *g = g_all + place;
        float* gq = gq_all + place;
        float mean = dot(g, out + place, a.width);
        gsink[t / length * a.heads + h] -= sunk[t * a.heads + h] * mean;
        for (int64_t j = 0; j < keys.count; ++j) {
          float p = share[(t * a.heads + h) * slots + keys.place[j]];
          float d = p * (dot(g, keys.key[j], a.width) - mean) * float(scale);
          Lanes ds = Lanes::fill(d), ps = Lanes::fill(p);
          float* gk = keys.gradient[j];
          for (int64_t i = 0; i < a.width; i += kLanes) {
            fma(ds, Lanes::load(keys.key[j] + i), Lanes::load(gq + i)).store(gq + i);
            Lanes sum = fma(ds, Lanes::load(q + i), Lanes::load(gk + i));
            fma(ps, Lanes::load(g + i), sum).store(gk + i);
          }
        }
      }
    }
  });
  return {grad_query, grad_record, grad_stored, grad_sink.sum(0)};
}

constexpr int64_t kStreams = 4;

void check_streams(const Tensor& residual) {
  TORCH_CHECK(residual.dim() == 3 && residual.size(1) == kStreams && residual.size(2) % kLanes == 0,
              "training: four streams wanted");
}

Tensor collapse_forward(const Tensor& residual, const Tensor& pre) {
  check_streams(residual);
  int64_t rows = residual.size(0), width = residual.size(2);
  Tensor y = at::empty({rows, width}, residual.options());
  const float *x = in(residual), *w = in(pre);
  float* out = y.data_ptr<float>();
  at::parallel_for(0, rows, 256, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t i = 0; i < width; i += kLanes) {
        Lanes sum = Lanes::zero();
        for (int64_t n = 0; n < kStreams; ++n) {
          sum = fma(Lanes::fill(w[t * kStreams + n]), Lanes::load(x + (t * kStreams + n) * width + i), sum);
        }
        sum.store(out + t * width + i);
      }
    }
  });
  return y;
}

std::tuple<Tensor, Tensor> collapse_backward(const Tensor& gradient, const Tensor& residual,
                                             const Tensor& pre) {
  int64_t rows = residual.size(0), width = residual.size(2);
  Tensor grad_residual = at::empty_like(residual), grad_pre = at::empty_like(pre);
  const float *x = in(residual), *w = in(pre), *g = in(gradient);
  float *gx = grad_residual.data_ptr<float>(), *gw = grad_pre.data_ptr<float>();
  at::parallel_for(0, rows, 256, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t n = 0; n < kStreams; ++n) {
        int64_t place = (t * kStreams + n) * width;
        Lanes factor = Lanes::fill(w[t * kStreams + n]), sum = Lanes::zero();
        for (int64_t i = 0; i < width; i += kLanes) {
          Lanes v = Lanes::load(g + t * width + i);
          (factor * v).store(gx + place + i);
          sum = fma(v, Lanes::load(x + place + i), sum);
        }
        gw[t * kStreams + n] = sum.sum();
      }
    }
  });
  return {grad_residual, grad_pre};
}

Tensor expand_forward(const Tensor& y, const Tensor& residual, const Tensor& post, const Tensor& comb) {
  check_streams(residual);
  int64_t rows = residual.size(0), width = residual.size(2);
  Tensor result = at::empty_like(residual);
  const float *in_y = in(y), *x = in(residual), *p = in(post), *c = in(comb);
  float* out = result.data_ptr<float>();
  at::parallel_for(0, rows, 128, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* mix = c + t * kStreams * kStreams;
      for (int64_t i = 0; i < width; i += kLanes) {
        Lanes stream[kStreams], value = Lanes::load(in_y + t * width + i);
        for (int64_t n = 0; n < kStreams; ++n) stream[n] = Lanes::load(x + (t * kStreams + n) * width + i);
        for (int64_t n = 0; n < kStreams; ++n) {
          Lanes sum = Lanes::fill(p[t * kStreams + n]) * value;
          for (int64_t m = 0; m < kStreams; ++m) sum = fma(Lanes::fill(mix[m * kStreams + n]), stream[m], sum);
          sum.store(out + (t * kStreams + n) * width + i);
        }
      }
    }
  });
  return result;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> expand_backward(const Tensor& gradient, const Tensor& y,
                                                           const Tensor& residual, const Tensor& post,
                                                           const Tensor& comb) {
  int64_t rows = residual.size(0), width = residual.size(2);
  Tensor grad_y = at::empty_like(y), grad_residual = at::empty_like(residual);
  Tensor grad_post = at::empty_like(post), grad_comb = at::empty_like(comb);
  const float *in_y = in(y), *x = in(residual), *p = in(post), *c = in(comb), *g = in(gradient);
  float *gy = grad_y.data_ptr<float>(), *gx = grad_residual.data_ptr<float>();
  float *gp = grad_post.data_ptr<float>(), *gc = grad_comb.data_ptr<float>();
  at::parallel_for(0, rows, 128, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float *mix = c + t * 16, *row = x + t * kStreams * width, *up = g + t * kStreams * width;
      for (int64_t i = 0; i < width; i += kLanes) {
        Lanes upper[kStreams], sum = Lanes::zero();
        for (int64_t n = 0; n < kStreams; ++n) {
          upper[n] = Lanes::load(up + n * width + i);
          sum = fma(Lanes::fill(p[t * kStreams + n]), upper[n], sum);
        }
        sum.store(gy + t * width + i);
        for (int64_t m = 0; m < kStreams; ++m) {
          Lanes mixed = Lanes::zero();
          for (int64_t n = 0; n < kStreams; ++n) mixed = fma(Lanes::fill(mix[m * kStreams + n]), upper[n], mixed);
          mixed.store(gx + (t * kStreams + m) * width + i);
        }
      }
      for (int64_t n = 0; n < kStreams; ++n) {
        gp[t * kStreams + n] = dot(up + n * width, in_y + t * width, width);
        for (int64_t m = 0; m < kStreams; ++m) {
          gc[t * 16 + m * kStreams + n] = dot(up + n * width, row + m * width, width);
        }
      }
    }
  });
  return {grad_y, grad_residual, grad_post, grad_comb};
}

// comb of one row with every intermediate result, so that the way back can be walked.
struct Sinkhorn {
  float softmax[16];
  float value[64][16];
  float sum[64][4];
  int64_t steps = 0;

  void forward(const float* logits, int64_t iterations, float eps) {
    for (int r = 0; r < 4; ++r) {
      float top = std::max(std::max(logits[r * 4], logits[r * 4 + 1]), std::max(logits[r * 4 + 2], logits[r * 4 + 3]));
      float total = 0;
      for (int i = 0; i < 4; ++i) total += softmax[r * 4 + i] = std::exp(logits[r * 4 + i] - top);
      for (int i = 0; i < 4; ++i) softmax[r * 4 + i] /= total;
    }
    float current[16];
    for (int i = 0; i < 16; ++i) current[i] = softmax[i] + eps;
    steps = 0;
    columns(current, eps);
    for (int64_t k = 1; k < iterations; ++k) {
      rows(current, eps);
      columns(current, eps);
    }
  }
  void columns(float* c, float eps) {
    float* s = sum[steps];
    for (int i = 0; i < 4; ++i) s[i] = 1.0f / (c[i] + c[4 + i] + c[8 + i] + c[12 + i] + eps);
    for (int i = 0; i < 16; ++i) value[steps][i] = c[i] = c[i] * s[i % 4];
    ++steps;
  }
  void rows(float* c, float eps) {
    float* s = sum[steps];
    for (int i = 0; i < 4; ++i) s[i] = 1.0f / (c[4 * i] + c[4 * i + 1] + c[4 * i + 2] + c[4 * i + 3] + eps);
    for (int i = 0; i < 16; ++i) value[steps][i] = c[i] = c[i] * s[i / 4];
    ++steps;
  }
  // gradient of the result -> gradient of the logits, in place
  void backward(float* g) const {
    for (int64_t step = steps - 1; step >= 0; --step) {
      const float *v = value[step], *s = sum[step];
      float inner[4] = {0, 0, 0, 0};
      if (step % 2 == 0) {
        for (int i = 0; i < 16; ++i) inner[i % 4] += g[i] * v[i];
        for (int i = 0; i < 16; ++i) g[i] = (g[i] - inner[i % 4]) * s[i % 4];
      } else {
        for (int i = 0; i < 16; ++i) inner[i / 4] += g[i] * v[i];
        for (int i = 0; i < 16; ++i) g[i] = (g[i] - inner[i / 4]) * s[i / 4];
      }
    }
    float inner[4] = {0, 0, 0, 0};
    for (int i = 0; i < 16; ++i) inner[i / 4] += g[i] * softmax[i];
    for (int i = 0; i < 16; ++i) g[i] = (g[i] - inner[i / 4]) * softmax[i];
  }
};

float logistic(float x) { return 1.0f / (1.0f + std::exp(-x)); }

std::tuple<Tensor, Tensor, Tensor> mix_forward(const Tensor& mixes, const Tensor& base, const Tensor& scale,
                                               int64_t iterations, double eps) {
  TORCH_CHECK(mixes.dim() == 2 && mixes.size(1) == 24 && iterations <= 32, "training: four streams wanted");
  int64_t rows = mixes.size(0);
  Tensor pre = at::empty({rows, 4}, mixes.options()), post = at::empty({rows, 4}, mixes.options());
  Tensor comb = at::empty({rows, 4, 4}, mixes.options());
  const float *m = in(mixes), *b = in(base), *s = in(scale);
  float *out_pre = pre.data_ptr<float>(), *out_post = post.data_ptr<float>(), *out = comb.data_ptr<float>();
  at::parallel_for(0, rows, 128, [&](int64_t begin, int64_t end) {
    Sinkhorn sinkhorn;
    for (int64_t t = begin; t < end; ++t) {
      float logits[16];
      for (int i = 0; i < 4; ++i) out_pre[t * 4 + i] = logistic(m[t * 24 + i] * s[0] + b[i]) + float(eps);
      for (int i = 0; i < 4; ++i) out_post[t * 4 + i] = 2 * logistic(m[t * 24 + 4 + i] * s[1] + b[4 + i]);
      for (int i = 0; i < 16; ++i) logits[i] = m[t * 24 + 8 + i] * s[2] + b[8 + i];
      sinkhorn.forward(logits, iterations, float(eps));
      std::copy_n(sinkhorn.value[sinkhorn.steps - 1], 16, out + t * 16);
    }
  });
  return {pre, post, comb};
}

std::tuple<Tensor, Tensor, Tensor> mix_backward(const Tensor& grad_pre, const Tensor& grad_post,
                                                const Tensor& grad_comb, const Tensor& mixes,
                                                const Tensor& base, const Tensor& scale, int64_t iterations,
                                                double eps) {
  int64_t rows = mixes.size(0);
  Tensor grad_mixes = at::empty_like(mixes), logit_gradient = at::empty_like(mixes);
  const float *m = in(mixes), *b = in(base), *s = in(scale);
  const float *gpre = in(grad_pre), *gpost = in(grad_post), *gcomb = in(grad_comb);
  float *gm = grad_mixes.data_ptr<float>(), *gl = logit_gradient.data_ptr<float>();
  at::parallel_for(0, rows, 128, [&](int64_t begin, int64_t end) {
    Sinkhorn sinkhorn;
    for (int64_t t = begin; t < end; ++t) {
      const float* row = m + t * 24;
      float logits[16], *g = gl + t * 24;
      for (int i = 0; i < 4; ++i) {
        float x = logistic(row[i] * s[0] + b[i]), y = logistic(row[4 + i] * s[1] + b[4 + i]);
        g[i] = gpre[t * 4 + i] * x * (1 - x);
        g[4 + i] = 2 * gpost[t * 4 + i] * y * (1 - y);
      }
      for (int i = 0; i < 16; ++i) logits[i] = row[8 + i] * s[2] + b[8 + i];
      sinkhorn.forward(logits, iterations, float(eps));
      std::copy_n(gcomb + t * 16, 16, g + 8);
      sinkhorn.backward(g + 8);
      for (int i = 0; i < 24; ++i) gm[t * 24 + i] = g[i] * s[i < 4 ? 0 : i < 8 ? 1 : 2];
    }
  });
  Tensor by_scale = logit_gradient.mul(mixes).sum(0);
  Tensor grad_scale = zeros({3});
  const float* q = by_scale.data_ptr<float>();
  for (int i = 0; i < 24; ++i) grad_scale.data_ptr<float>()[i < 4 ? 0 : i < 8 ? 1 : 2] += q[i];
  return {grad_mixes, logit_gradient.sum(0), grad_scale};
}

// Scores [T, E] of the entries that a row sees, zeros elsewhere.
Tensor index_forward(const Tensor& query, const Tensor& head_weights, const Tensor& keys, int64_t ratio,
                     int64_t length) {
  int64_t rows = query.size(0), heads = query.size(1), width = query.size(2), entries = keys.size(1);
  TORCH_CHECK(width % kLanes == 0, "training: index width");
  Tensor scores = zeros({rows, entries});
  const float *q = in(query), *w = in(head_weights), *k = in(keys);
  float* out = scores.data_ptr<float>();
  at::parallel_for(0, rows, 64, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      int64_t visible = std::min(entries, (t % length + 1) / ratio);
      const float* key = k + t / length * entries * width;
      for (int64_t e = 0; e < visible; ++e, key += width) {
        float sum = 0;
        for (int64_t h = 0; h < heads; ++h) {
          sum += std::max(0.0f, dot(q + (t * heads + h) * width, key, width)) * w[t * heads + h];
        }
        out[t * entries + e] = sum;
      }
    }
  });
  return scores;
}

// The gradient is that of few entries: only those are looked at.
std::tuple<Tensor, Tensor, Tensor> index_backward(const Tensor& gradient, const Tensor& query,
                                                  const Tensor& head_weights, const Tensor& keys,
                                                  int64_t ratio, int64_t length) {
  int64_t rows = query.size(0), heads = query.size(1), width = query.size(2), entries = keys.size(1);
  Tensor grad_query = zeros(query.sizes()), grad_weights = zeros(head_weights.sizes());
  Tensor grad_keys = zeros(keys.sizes());
  const float *q = in(query), *w = in(head_weights), *k = in(keys), *g = in(gradient);
  float *gq = grad_query.data_ptr<float>(), *gw = grad_weights.data_ptr<float>();
  float* gk = grad_keys.data_ptr<float>();
  at::parallel_for(0, rows / length, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin * length; t < end * length; ++t) {
      int64_t visible = std::min(entries, (t % length + 1) / ratio);
      for (int64_t e = 0; e < visible; ++e) {
        float up = g[t * entries + e];
        if (up == 0) continue;
        int64_t place = (t / length * entries + e) * width;
        for (int64_t h = 0; h < heads; ++h) {
          int64_t head = (t * heads + h) * width;
          float product = dot(q + head, k + place, width);
          if (product <= 0) continue;
          gw[t * heads + h] += up * product;
          add_scaled(up * w[t * heads + h], k + place, gq + head, width);
          add_scaled(up * w[t * heads + h], q + head, gk + place, width);
        }
      }
    }
  });
  return {grad_query, grad_weights, grad_keys};
}

// Rounds matrices through E4M3 with a power-of-two scale per tile of 32 x 32.
Tensor round_tiles(const Tensor& weight) {
  Tensor result = at::empty_like(weight);
  int64_t columns = weight.size(-1), rows = weight.size(-2), count = weight.numel() / (rows * columns);
  TORCH_CHECK(rows % 32 == 0 && columns % 32 == 0, "training: whole tiles wanted");
  const float* x = in(weight);
  float* y = result.data_ptr<float>();
  at::parallel_for(0, count * rows / 32, 4, [&](int64_t begin, int64_t end) {
    for (int64_t band = begin; band < end; ++band) {
      for (int64_t column = 0; column < columns; column += 32) {
        int64_t place = band * 32 * columns + column;
        float amax = 1e-4f;
        for (int64_t r = 0; r < 32; ++r) {
          for (int64_t i = 0; i < 32; ++i) amax = std::max(amax, std::fabs(x[place + r * columns + i]));
        }
        float scale = std::exp2(std::ceil(std::log2(amax / 448.0f))), inverse = 1.0f / scale;
        for (int64_t r = 0; r < 32; ++r) {
          for (int64_t i = 0; i < 32; ++i) {
            float v = std::min(448.0f, std::max(-448.0f, x[place + r * columns + i] * inverse));
            // adding and taking away 2^23 units of the last place rounds to nearest even
            float unit = float_of(std::max<uint32_t>(bits_of(v) & 0x7F800000u, 121u << 23)) * 0x1p20f;
            unit *= 1.5f;
            y[place + r * columns + i] = ((v + unit) - unit) * scale;
          }
        }
      }
    }
  });
  return result;
}

}  // namespace

TORCH_LIBRARY(deepinfer_training, m) {
  m.def("attend_forward", attend_forward);
  m.def("attend_backward", attend_backward);
  m.def("collapse_forward", collapse_forward);
  m.def("collapse_backward", collapse_backward);
  m.def("expand_forward", expand_forward);
  m.def("expand_backward", expand_backward);
  m.def("mix_forward", mix_forward);
  m.def("mix_backward", mix_backward);
  m.def("index_forward", index_forward);
  m.def("index_backward", index_backward);
  m.def("round_tiles", round_tiles);
}

}  // namespace deepinfer
