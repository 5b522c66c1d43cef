// exp, sigmoid and softplus over sixteen lanes, and one value at a time with the same bits.
//
// A loop handles its tail by a vector with unused lanes (`load_part`, `store_part`), never by other code, so a
// value does not depend on where it falls. Only +, -, *, / and fma are used, lane by lane, on either level.
#pragma once

#include <cstring>
#include <initializer_list>

#include "formats.h"
#include "simd.h"

namespace deepinfer {

// The first `count` of sixteen floats, the rest `fill`.
inline Lanes load_part(const float* p, int64_t count, float fill = 0.0f) {
  if (count >= kLanes) return Lanes::load(p);
  alignas(64) float buffer[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) buffer[i] = i < count ? p[i] : fill;
  return Lanes::load(buffer);
}

inline void store_part(Lanes value, float* p, int64_t count) {
  if (count >= kLanes) return value.store(p);
  alignas(64) float buffer[kLanes];
  value.store(buffer);
  std::memcpy(p, buffer, size_t(count) * sizeof(float));
}

// e^x by the Cephes polynomial, about 1 ulp; NaN stays NaN, below -87.3 it is 0, above 88.7 infinity.
inline Lanes exp(Lanes x) {
  Lanes bounded = max(min(x, Lanes::fill(89.0f)), Lanes::fill(-88.0f));
  Lanes n = round_nearest(bounded * Lanes::fill(1.44269504088896341f));
  Lanes r = fma(n, Lanes::fill(-0.693359375f), bounded);
  r = fma(n, Lanes::fill(2.12194440e-4f), r);
  Lanes p = Lanes::fill(1.9875691500e-4f);
  p = fma(p, r, Lanes::fill(1.3981999507e-3f));
  p = fma(p, r, Lanes::fill(8.3334519073e-3f));
  p = fma(p, r, Lanes::fill(4.1665795894e-2f));
  p = fma(p, r, Lanes::fill(1.6666665459e-1f));
  p = fma(p, r, Lanes::fill(5.0000001201e-1f));
  Lanes y = fma(p, r * r, r) + Lanes::fill(1.0f);
  // 2^n in two factors, as n can be 128
  Lanes most = min(n, Lanes::fill(127.0f));
  y = y * power_of_two(most) * power_of_two(n - most);
  y = select_below(x, Lanes::fill(-87.3f), Lanes::zero(), y);
  return select_nan(x, y);
}

inline Lanes sigmoid(Lanes x) { return Lanes::fill(1.0f) / (Lanes::fill(1.0f) + exp(Lanes::zero() - x)); }

// ln(1 + u) for u in 0 .. 1 by the series of the inverse hyperbolic tangent; about 1 ulp.
inline Lanes log1p_unit(Lanes u) {
  Lanes s = u / (Lanes::fill(2.0f) + u), z = s * s;  // s <= 1/3
  Lanes p = Lanes::fill(2.0f / 17.0f);
  for (float factor : {2.0f / 15.0f, 2.0f / 13.0f, 2.0f / 11.0f, 2.0f / 9.0f, 2.0f / 7.0f, 2.0f / 5.0f,
                       2.0f / 3.0f}) {
    p = fma(p, z, Lanes::fill(factor));
  }
  return fma(p * z, s, s + s);
}

// ln(1 + e^x) = max(x, 0) + ln(1 + e^-|x|); NaN stays NaN.
inline Lanes softplus(Lanes x) {
  Lanes tail = log1p_unit(exp(Lanes::zero() - absolute(x)));
  return select_nan(x, max(x, Lanes::zero()) + tail);
}

inline float exp_one(float x) {
  float y[kLanes];
  exp(Lanes::fill(x)).store(y);
  return y[0];
}

inline float sigmoid_one(float x) {
  float y[kLanes];
  sigmoid(Lanes::fill(x)).store(y);
  return y[0];
}

}  // namespace deepinfer
