// Small number formats, one value at a time: bf16, E4M3, E2M1, E8M0 and the group quantisers.
//
// Bit for bit the functions of kernels/formats.py, including the rules for infinities and NaN stated there.
// Branch-free where it matters, so that the compiler vectorises the callers' loops.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace deepinfer {

constexpr int64_t kFp8Group = 32;
constexpr float kFloat32Max = std::numeric_limits<float>::max();
constexpr uint8_t kE8M0NaN = 255;
constexpr uint8_t kE4M3NaN = 0x7F;

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

struct bf16 {
  uint16_t bits;
};

inline float to_float(float value) { return value; }
inline float to_float(bf16 value) { return float_of(uint32_t(value.bits) << 16); }

inline void round_to(float value, float& out) { out = value; }
// Nearest, ties to even; every NaN becomes 0x7FC0.
inline void round_to(float value, bf16& out) {
  uint32_t bits = bits_of(value);
  uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  out.bits = (bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : uint16_t(rounded);
}

// 2^(byte - 127); 255 is NaN.
inline float e8m0_to_float(uint8_t byte) {
  if (byte == 0) return float_of(0x00400000);
  return byte == kE8M0NaN ? float_of(0x7FC00000) : float_of(uint32_t(byte) << 23);
}

// Byte of the smallest power of two that is not below a positive normal value.
inline uint8_t float_to_e8m0_ceil(float value) {
  uint32_t bits = bits_of(value);
  return uint8_t((bits >> 23) + ((bits & 0x7FFFFF) != 0));
}

inline float e4m3_to_float(uint8_t code) {
  uint32_t magnitude = code & 0x7F, sign = uint32_t(code & 0x80) << 24;
  if (magnitude == kE4M3NaN) return float_of(0x7FC00000);
  float value = magnitude < 8 ? float(magnitude) * 0x1p-9f : float_of((magnitude << 20) + (120u << 23));
  return float_of(bits_of(value) | sign);
}

// Nearest, ties to even, saturating at 448; NaN is 0x7F.
inline uint8_t float_to_e4m3(float value) {
  uint32_t bits = bits_of(value), magnitude = bits & 0x7FFFFFFF, sign = (bits >> 24) & 0x80;
  bool is_nan = magnitude > 0x7F800000;
  uint32_t clamped = magnitude > 0x43E00000 ? 0x43E00000 : magnitude;
  // Below 2^-6 codes count multiples of 2^-9: adding 2^14 leaves the rounded count in the lowest bits.
  uint32_t small = bits_of(float_of(clamped) + 0x1p14f) - bits_of(0x1p14f);
  uint32_t large = (clamped + 0x7FFFF + ((clamped >> 20) & 1) - (120u << 23)) >> 20;
  uint32_t code = clamped < 0x3C800000 ? small : large;
  return uint8_t(is_nan ? kE4M3NaN : (code | sign));
}

// Nearest, ties to the even code, saturating at 6; the argument is not NaN.
inline uint8_t float_to_e2m1(float value) {
  uint32_t bits = bits_of(value);
  float m = float_of(bits & 0x7FFFFFFF);
  int code = (m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) + (m >= 3.5f) + (m > 5.0f);
  return uint8_t(code | ((bits >> 28) & 8));
}

inline float e2m1_to_float(uint8_t code) {
  constexpr float kValues[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                 -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  return kValues[code & 15];
}

// Largest magnitude of a group, at least `floor`; NaN is passed over, infinity is the largest float.
template <int kGroup, class T>
inline float group_amax(const T* x, float floor) {
  int32_t most = 0;
  for (int i = 0; i < kGroup; ++i) {
    int32_t magnitude = int32_t(bits_of(to_float(x[i])) & 0x7FFFFFFF);
    magnitude = magnitude > 0x7F800000 ? 0 : magnitude;
    most = magnitude > most ? magnitude : most;
  }
  float amax = float_of(uint32_t(most));
  amax = amax > kFloat32Max ? kFloat32Max : amax;
  return amax > floor ? amax : floor;
}

// Scale byte of 32 values for the FP8 quantiser.
template <class T>
inline uint8_t fp8_scale(const T* x) {
  return float_to_e8m0_ceil(group_amax<kFp8Group>(x, 1e-4f) * (1.0f / 448.0f));
}

}  // namespace deepinfer
