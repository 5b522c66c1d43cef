// Philox4x32-10 as a pure function of (seed, stream), and the numbering of streams (`philox.py`).
#pragma once

#include <cstdint>

namespace deepinfer {

constexpr uint64_t kRowStride = 10000019;  // positions between two rows of one request

enum class Stream : uint64_t { kFresh = 0, kResample = 1, kCoin = 2 };

// Word 0 for key = seed, counter = 3 * position + case; the upper half of the counter is 0.
inline uint32_t random_word(uint64_t seed, uint64_t position, Stream which) {
  uint64_t stream = position * 3 + uint64_t(which);
  uint32_t c[4] = {uint32_t(stream), uint32_t(stream >> 32), 0, 0};
  uint32_t k[2] = {uint32_t(seed), uint32_t(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    uint64_t even = uint64_t(c[0]) * 0xD2511F53u, odd = uint64_t(c[2]) * 0xCD9E8D57u;
    uint32_t next[4] = {uint32_t(odd >> 32) ^ c[1] ^ k[0], uint32_t(odd),
                        uint32_t(even >> 32) ^ c[3] ^ k[1], uint32_t(even)};
    for (int i = 0; i < 4; ++i) c[i] = next[i];
    k[0] += 0x9E3779B9u;
    k[1] += 0xBB67AE85u;
  }
  return c[0];
}

// In [0, bound), bound up to 2^32.
inline uint64_t integer_draw(uint32_t word, uint64_t bound) { return (uint64_t(word) * bound) >> 32; }

// In [0, 1), exact.
inline double unit_draw(uint32_t word) { return double(word >> 8) * 0x1p-24; }

}  // namespace deepinfer
