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
constexpr int64_t kRowBlock = 192;   // rows whose activations of one block stay in the second-level cache
#ifdef __AVX512F__
constexpr int kTileRows = 12, kWide = 2;  // one register a panel; kWide: panels that fill one pipeline
#else
constexpr int kTileRows = 6, kWide = 1;  // 12 accumulators of the 16 registers
#endif
constexpr int64_t kTaskWork = 1 << 20;  // multiply-adds worth another thread
constexpr int64_t kFarInputs = 32 << 10;  // activations of a row block beyond which outputs go in chunks
constexpr int64_t kChunk = 8;        // panels that share a block of activations

// Adds `count` inputs of kRows rows and kPanels panels, `stride` bytes apart, to `sum` by one chain each.
template <int kRows, int kPanels, class Codec>
inline void add_chain(const float* x, const uint8_t* w, int64_t stride, int64_t count,
                      Lanes (&sum)[kRows][kPanels]) {
  for (int64_t k = 0; k < count; k += Codec::kStep) {
    // What is decoded is used at once: sums and constants fill the registers already.
    for (int p = 0; p < kPanels; ++p) {
      const uint8_t* at = w + p * stride + k * Codec::kBytes;
      if constexpr (Codec::kAhead != 0) {
        _mm_prefetch(reinterpret_cast<const char*>(at + Codec::kAhead), _MM_HINT_T0);
      }
      for (int part = 0; part * Codec::kPart < Codec::kStep; ++part) {
        Lanes value[Codec::kPart];
        Codec::read(at, part, value);
        for (int s = 0; s < Codec::kPart; ++s) {
          const float* inputs = x + (k + part * Codec::kPart + s) * kRows;
          for (int r = 0; r < kRows; ++r) sum[r][p] = fma(Lanes::fill(inputs[r]), value[s], sum[r][p]);
        }
      }
    }
  }
}

template <class Matrix>
inline Lanes add_to(Lanes total, Lanes sum, const Lanes& factor) {
  if constexpr (Matrix::kUnit == 0) return total + sum;
  else if constexpr (Matrix::kUnit == 1) return fma(sum, factor, total);
  else return fma(sum * Lanes::fill(Matrix::kUnit), factor, total);
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
    add_chain<kRows, kPanels, Codec>(x + begin * kRows, w + begin * Codec::kBytes, stride, count, sum);
    for (int p = 0; p < kPanels; ++p) {
      Lanes factor = Lanes::zero();
      if constexpr (Matrix::kUnit != 0) {
        factor = powers(weight.panel_scale(first + p) + begin / kFp8Group * kPanel);
      }
      for (int r = 0; r < kRows; ++r) total[r][p] = add_to<Matrix>(total[r][p], sum[r][p], factor);
    }
  }
}

// Adds a block of up to kBlock inputs to the totals [kRows][16] of a tile.
template <int kRows, class Matrix>
void multiply_block(const float* x, Block block, int64_t count, float* totals) {
  constexpr int64_t kLength = Matrix::kUnit == 0 ? kBlock : kFp8Group;
  for (int64_t begin = 0; begin < count; begin += kLength) {
    Lanes sum[kRows][1];
    for (int r = 0; r < kRows; ++r) sum[r][0] = Lanes::zero();
    add_chain<kRows, 1, FloatCodec>(x + begin * kRows,
                                    reinterpret_cast<const uint8_t*>(block.values + begin * kPanel), 0,
                                    std::min(kLength, count - begin), sum);
    Lanes factor = Lanes::zero();
    if constexpr (Matrix::kUnit != 0) factor = Lanes::load(block.factors + begin / kFp8Group * kPanel);
    for (int r = 0; r < kRows; ++r) {
      float* total = totals + r * kPanel;
      add_to<Matrix>(Lanes::load(total), sum[r][0], factor).store(total);
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
  return kWide * (rows == 1 ? (Codec::kStep == 4 ? 2 : 4) : rows <= 3 ? 2 : 1);
}

// Largest tile that decodes packed panels on the fly; from there on decoding once is cheaper.
template <class Codec>
constexpr int64_t kDirectRows = Codec::kStep == 1 ? kTileRows : Codec::kStep == 2 ? 3 : 2;

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
  alignas(64) float values[kBlock * kPanel];
  alignas(64) float factors[kBlock / kFp8Group * kPanel];
  int64_t tiles_abreast = kRowBlock / kTileRows;
  int64_t most_rows = std::min(x.rows(), kRowBlock + kTileRows);
  int64_t chunk = most_rows * weight.inputs > kFarInputs ? kChunk : 1;
  std::vector<float> totals(size_t(most_rows * chunk * kPanel));
  for (int64_t tile = 0; tile < x.count(); tile += tiles_abreast) {
    int64_t end_tile = std::min(x.count(), tile + tiles_abreast);
    int64_t first_row = x.first(tile), rows = x.first(end_tile) - first_row;
    for (int64_t panel = first; panel < last; panel += chunk) {
      int64_t panels = std::min(chunk, last - panel);
      std::fill_n(totals.begin(), rows * panels * kPanel, 0.0f);
      for (int64_t begin = 0; begin < weight.inputs; begin += kBlock) {
        int64_t count = std::min(kBlock, weight.inputs - begin);
        for (int64_t p = 0; p < panels; ++p) {
          Block block = weight.block(panel + p, begin, count, values, factors);
          for (int64_t t = tile; t < end_tile; ++t) {
            float* sums = totals.data() + (p * rows + x.first(t) - first_row) * kPanel;
            by_rows(x.first(t + 1) - x.first(t), [&](auto height) {
              constexpr int kRows = height();
              multiply_block<kRows, Matrix>(x.tile(t) + begin * kRows, block, count, sums);
            });
          }
        }
      }
      for (int64_t p = 0; p < panels; ++p) {
        int64_t column = (panel + p) * kPanel, columns = std::min(kPanel, weight.outputs - column);
        for (int64_t r = 0; r < rows; ++r) {
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
