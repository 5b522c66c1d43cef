// One matrix product for every weight format: y[r][n] = sum_k W[n][k] * x[r][k], float32.
//
// Order of sums. Inputs are cut into chains: 256 of them where weights have no scales, the 32 of a scale
// group where they do. A chain starts at zero and takes its inputs in ascending order by fused multiply-add.
// Chains are added to the result in ascending order, which starts at zero: by plain addition, or as
// fma(chain, factor, result) with the scale of the group. So a value depends on its row and its column alone;
// tiles, blocks, panels read side by side and threads only say when it is computed.
//
// Rows are handled in tiles of up to kTileRows whose inputs are interleaved ([K][rows of the tile]), outputs
// in panels of sixteen. Few rows read packed panels straight from memory, several side by side. Otherwise a
// block of 256 inputs of a panel is decoded once and used for every tile.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.h"
#include "panels.h"

namespace deepinfer {

constexpr int64_t kBlock = 256;      // inputs decoded at once; the chain of formats without scales
// kTileRows x kWide: rows and panels whose sums fill the registers, beside weights and an activation.
// kRowBlock, kChunk: rows and panels whose totals and block of activations stay in the second-level cache.
#ifdef __AVX512F__
constexpr int kTileRows = 14, kWide = 2;  // 28 accumulators of the 32 registers
constexpr int64_t kRowBlock = 280, kChunk = 32;
#else
constexpr int kTileRows = 6, kWide = 1;  // 12 accumulators of the 16 registers, two a panel
constexpr int64_t kRowBlock = 192, kChunk = 8;
#endif
constexpr int64_t kTaskWork = 1 << 20;  // multiply-adds worth another thread
constexpr int64_t kFarInputs = 32 << 10;  // activations of a row block beyond which outputs go in chunks

// Adds `count` inputs of kRows rows and kPanels panels, `stride` bytes apart, to `sum` by one chain each.
// ask(k) is called at every step, to ask memory for what will be read later.
template <int kRows, int kPanels, class Codec, class Ask>
inline void add_chain(const float* x, const uint8_t* w, int64_t stride, int64_t count,
                      Lanes (&sum)[kRows][kPanels], const Ask& ask) {
  // Panels decoded before use: many rows share an activation among them, few rows have registers for one.
  constexpr int kShare = kRows > 3 ? kPanels : 1, kPart = Codec::kPart;
  for (int64_t k = 0; k < count; k += Codec::kStep) {
    ask(k);
    for (int p = 0; p < kPanels; p += kShare) {
      for (int part = 0; part * kPart < Codec::kStep; ++part) {
        Lanes value[kShare][kPart];
        for (int i = 0; i < kShare; ++i) {
          Codec::read(w + (p + i) * stride + k * Codec::kBytes, part, value[i]);
        }
        for (int s = 0; s < kPart; ++s) {
          const float* inputs = x + (k + part * kPart + s) * kRows;
          for (int r = 0; r < kRows; ++r) {
            Lanes input = Lanes::fill(inputs[r]);
            for (int i = 0; i < kShare; ++i) sum[r][p + i] = fma(input, value[i][s], sum[r][p + i]);
          }
        }
      }
    }
  }
}

template <float kUnit>
inline Lanes add_to(Lanes total, Lanes sum, const Lanes& factor) {
  if constexpr (kUnit == 0) return total + sum;
  else if constexpr (kUnit == 1) return fma(sum, factor, total);
  else return fma(sum * Lanes::fill(kUnit), factor, total);
}

// All inputs of kPanels packed panels from `first` on for one tile of kRows rows.
template <int kRows, int kPanels, class Matrix>
void multiply_direct(const Matrix& weight, int64_t first, const float* x, Lanes (&total)[kRows][kPanels]) {
  using Codec = typename Matrix::Codec;
  constexpr int64_t kLength = Matrix::kUnit == 0 ? kBlock : kFp8Group;
  const uint8_t* w = weight.panel(first);
  int64_t stride = weight.inputs * Codec::kBytes;
  for (int r = 0; r < kRows; ++r) {
    for (int p = 0; p < kPanels; ++p) total[r][p] = Lanes::zero();
  }
  for (int64_t begin = 0; begin < weight.inputs; begin += kLength) {
    Lanes sum[kRows][kPanels];
    for (int r = 0; r < kRows; ++r) {
      for (int p = 0; p < kPanels; ++p) sum[r][p] = Lanes::zero();
    }
    int64_t count = Matrix::kUnit == 0 ? std::min(kLength, weight.inputs - begin) : kLength;
    const uint8_t* codes = w + begin * Codec::kBytes;
    add_chain<kRows, kPanels, Codec>(x + begin * kRows, codes, stride, count, sum, [&](int64_t k) {
      if constexpr (Codec::kAhead != 0) {
        const uint8_t* later = codes + k * Codec::kBytes + Codec::kAhead;
        for (int p = 0; p < kPanels; ++p) prefetch<_MM_HINT_T0>(later + p * stride);
      }
    });
    for (int p = 0; p < kPanels; ++p) {
      Lanes factor = Lanes::zero();
      if constexpr (Matrix::kUnit != 0) {
        factor = powers(weight.panel_scale(first + p) + begin / kFp8Group * kPanel);
      }
      for (int r = 0; r < kRows; ++r) total[r][p] = add_to<Matrix::kUnit>(total[r][p], sum[r][p], factor);
    }
  }
}

// Weights to bring into the second-level cache during a product: `pace` bytes per input, from kWide panels.
struct Ahead {
  const uint8_t* panels[kWide] = {};
  int64_t pace = 0;
};

// Adds blocks of up to kBlock inputs to the totals of a tile: [kRows][16] per panel, `apart` floats apart.
template <int kRows, int kPanels, float kUnit, bool kPacked>
void multiply_blocks(const float* x, const Block* blocks, int64_t count, const Ahead& ahead, float* totals,
                     int64_t apart) {
  constexpr int64_t kLength = kUnit == 0 ? kBlock : kFp8Group;
  const uint8_t* w = reinterpret_cast<const uint8_t*>(blocks[0].values);
  int64_t stride = reinterpret_cast<const uint8_t*>(blocks[kPanels - 1].values) - w;
  for (int64_t begin = 0; begin < count; begin += kLength) {
    Lanes sum[kRows][kPanels];
    for (int r = 0; r < kRows; ++r) {
      for (int p = 0; p < kPanels; ++p) sum[r][p] = Lanes::zero();
    }
    add_chain<kRows, kPanels, FloatCodec>(
        x + begin * kRows, w + begin * FloatCodec::kBytes, stride, std::min(kLength, count - begin), sum,
        [&](int64_t k) {
          if constexpr (kPacked) {
            for (const uint8_t* panel : ahead.panels) prefetch<_MM_HINT_T1>(panel + (begin + k) * ahead.pace);
          }
        });
    for (int p = 0; p < kPanels; ++p) {
      Lanes factor = Lanes::zero();
      if constexpr (kUnit != 0) factor = Lanes::load(blocks[p].factors + begin / kFp8Group * kPanel);
      for (int r = 0; r < kRows; ++r) {
        float* total = totals + p * apart + r * kPanel;
        add_to<kUnit>(Lanes::load(total), sum[r][p], factor).store(total);
      }
    }
  }
}

// Calls body with std::integral_constant<int, rows>, rows in 1 .. kTileRows.
template <int kRows = 1, class Body>
inline void by_rows(int64_t rows, const Body& body) {
  if constexpr (kRows < kTileRows) {
    if (rows != kRows) return by_rows<kRows + 1>(rows, body);
  }
  body(std::integral_constant<int, kRows>{});
}

// Rows of activations in tiles, as float32. Tile t has rows t * size / tiles .. and lies at their offset.
class Tiles {
 public:
  // rows[i] points to `inputs` floats; a tile of one row stays where it is.
  Tiles(const std::vector<const float*>& rows, int64_t inputs)
      : rows_(int64_t(rows.size())), count_((rows_ + kTileRows - 1) / kTileRows), inputs_(inputs) {
    if (rows_ == 1) {
      single_ = rows[0];
      return;
    }
    data_.reset(new float[size_t(rows_ * inputs)]);
    parallel_for(count_, (1 << 17) / (kTileRows * (inputs + 1)) + 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        by_rows(first(t + 1) - first(t), [&](auto height) {
          constexpr int kRows = height();
          const float* in[kRows];
          for (int r = 0; r < kRows; ++r) in[r] = rows[size_t(first(t) + r)];
          float* out = data_.get() + first(t) * inputs_;
          for (int64_t k = 0; k < inputs_; ++k) {
            for (int r = 0; r < kRows; ++r) out[k * kRows + r] = in[r][k];
          }
        });
      }
    });
  }

  int64_t rows() const { return rows_; }
  int64_t count() const { return count_; }
  int64_t first(int64_t tile) const { return tile * rows_ / count_; }
  const float* tile(int64_t index) const { return single_ ? single_ : data_.get() + first(index) * inputs_; }

 private:
  int64_t rows_, count_, inputs_;
  const float* single_ = nullptr;
  std::unique_ptr<float[]> data_;
};

// One product with its own weights and rows: y[r] receives the outputs of row r.
template <class Matrix, class Out>
struct Product {
  Matrix weight;
  Tiles x;
  std::vector<Out*> y;
};

template <class Out>
inline void write_panel(const float* totals, int64_t columns, Out* y) {
  if (columns == kPanel) {
    for (int64_t c = 0; c < kPanel; ++c) round_to(totals[c], y[c]);
  } else {
    for (int64_t c = 0; c < columns; ++c) round_to(totals[c], y[c]);
  }
}

// Panels that a tile of so many rows reads side by side: enough chains to hide the latency of a multiply-add,
// few enough to keep them in registers.
template <class Codec>
constexpr int panels_abreast(int rows) {
  if (rows > 8 && Codec::kStep > 1) return 1;  // decoded values need registers too
  return kWide * (rows == 1 ? (Codec::kStep == 4 ? 2 : 4) : rows <= 3 ? 2 : 1);
}

// Largest tile that decodes packed panels on the fly; AVX2 has too few registers to do it for many rows.
template <class Codec>
constexpr int64_t kDirectRows = kWide == 2 || Codec::kStep == 1 ? kTileRows : Codec::kStep == 2 ? 3 : 2;

template <int kRows, int kPanels, class Matrix, class Out>
void direct_panels(const Product<Matrix, Out>& product, int64_t panel) {
  Lanes total[kRows][kPanels];
  multiply_direct<kRows, kPanels>(product.weight, panel, product.x.tile(0), total);
  for (int r = 0; r < kRows; ++r) {
    for (int p = 0; p < kPanels; ++p) {
      alignas(64) float values[kPanel];
      total[r][p].store(values);
      write_panel(values, kPanel, product.y[size_t(r)] + (panel + p) * kPanel);
    }
  }
}

// Outputs of panels first .. last.
template <class Matrix, class Out>
void multiply_panels(const Product<Matrix, Out>& product, int64_t first, int64_t last) {
  const Tiles& x = product.x;
  const Matrix& weight = product.weight;
  if constexpr (Matrix::kPacked) {
    using Codec = typename Matrix::Codec;
    if (x.rows() <= kDirectRows<Codec>) {
      by_rows(x.rows(), [&](auto height) {
        constexpr int kRows = height();
        if constexpr (kRows <= kDirectRows<Codec>) {
          constexpr int kPanels = panels_abreast<Codec>(kRows);
          int64_t panel = first;
          for (; panel + kPanels <= last; panel += kPanels) direct_panels<kRows, kPanels>(product, panel);
          for (; panel < last; ++panel) direct_panels<kRows, 1>(product, panel);
        }
      });
      return;
    }
  }
  alignas(64) float values[kWide][kBlock * kPanel];
  alignas(64) float factors[kWide][kBlock / kFp8Group * kPanel];
  int64_t tiles_abreast = kRowBlock / kTileRows;
  int64_t most_rows = std::min(x.rows(), kRowBlock + kTileRows);
  int64_t chunk = most_rows * weight.inputs > kFarInputs ? kChunk : kWide;
  std::vector<float> totals(size_t(most_rows * chunk * kPanel));
  for (int64_t tile = 0; tile < x.count(); tile += tiles_abreast) {
    int64_t end_tile = std::min(x.count(), tile + tiles_abreast);
    int64_t first_row = x.first(tile), rows = x.first(end_tile) - first_row;
    for (int64_t panel = first; panel < last; panel += chunk) {
      int64_t panels = std::min(chunk, last - panel);
      std::fill_n(totals.begin(), rows * panels * kPanel, 0.0f);
      for (int64_t begin = 0; begin < weight.inputs; begin += kBlock) {
        int64_t count = std::min(kBlock, weight.inputs - begin);
        for (int64_t p = 0; p < panels; p += kWide) {
          int64_t width = std::min(int64_t(kWide), panels - p);
          Block blocks[kWide];
          for (int64_t i = 0; i < width; ++i) {
            blocks[i] = weight.block(panel + p + i, begin, count, values[i], factors[i]);
          }
          // Each tile asks for its share of what comes next: more panels, more inputs or another chunk.
          Ahead ahead;
          if constexpr (Matrix::kPacked) {
            bool same_inputs = p + kWide < panels, same_chunk = begin + kBlock < weight.inputs;
            int64_t next = same_inputs ? panel + p + kWide : same_chunk ? panel : panel + chunk;
            int64_t next_begin = same_inputs ? begin : same_chunk ? begin + kBlock : 0;
            constexpr int64_t kBytes = Matrix::Codec::kBytes;
            ahead.pace = (kBytes + end_tile - tile - 1) / (end_tile - tile);
            for (int64_t i = 0; i < kWide; ++i) {
              ahead.panels[i] = weight.panel(std::min(next + i, last - 1)) + next_begin * kBytes;
            }
          }
          for (int64_t t = tile; t < end_tile; ++t) {
            float* sums = totals.data() + (p * rows + x.first(t) - first_row) * kPanel;
            by_rows(x.first(t + 1) - x.first(t), [&](auto height) {
              constexpr int kRows = height();
              constexpr float kUnit = Matrix::kUnit;
              constexpr bool kPacked = Matrix::kPacked;
              auto add = width == kWide ? multiply_blocks<kRows, kWide, kUnit, kPacked>
                                        : multiply_blocks<kRows, 1, kUnit, kPacked>;
              add(x.tile(t) + begin * kRows, blocks, count, ahead, sums, rows * kPanel);
            });
            for (const uint8_t*& at : ahead.panels) at += count * ahead.pace;
          }
        }
      }
      // A row's outputs of the chunk lie together.
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t p = 0; p < panels; ++p) {
          int64_t column = (panel + p) * kPanel, columns = std::min(kPanel, weight.outputs - column);
          write_panel(totals.data() + (p * rows + r) * kPanel, columns,
                      product.y[size_t(first_row + r)] + column);
        }
      }
    }
  }
}

// Runs all products; they share the number of inputs and outputs. Threads get equal work, not equal panels.
template <class Matrix, class Out>
void multiply(const std::vector<Product<Matrix, Out>>& products) {
  if (products.empty() || products[0].weight.outputs == 0) return;
  int64_t panels = (products[0].weight.outputs + kPanel - 1) / kPanel;
  std::vector<int64_t> start{0};
  auto cost = [](const Product<Matrix, Out>& product) { return product.x.rows() + 2; };  // 2: to decode
  for (const auto& product : products) start.push_back(start.back() + panels * cost(product));
  int64_t grain = kTaskWork / (kPanel * (products[0].weight.inputs + 1)) + 1;
  parallel_for(start.back(), grain, [&](int64_t begin, int64_t end) {
    for (size_t i = 0; i < products.size(); ++i) {
      int64_t each = cost(products[i]);
      // the panels that start in begin .. end
      auto panel_from = [&](int64_t unit) {
        return std::clamp((unit - start[i] + each - 1) / each, int64_t(0), panels);
      };
      int64_t from = begin <= start[i] ? 0 : panel_from(begin), to = end <= start[i] ? 0 : panel_from(end);
      if (from < to) multiply_panels(products[i], from, to);
    }
  });
}

}  // namespace deepinfer
