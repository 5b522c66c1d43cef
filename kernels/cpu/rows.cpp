// Kernels that work row by row: RMSNorm and the byte-record quantisers.

#include "kernels.h"
#include "row_lanes.h"

namespace deepinfer {

namespace {

int64_t grain_for(int64_t size) { return size >= 16384 ? 1 : 16384 / (size + 1) + 1; }

}  // namespace

template <class T, class W>
void rms_norm(const T* x, const W* weight, float eps, int64_t rows, int64_t size, T* y) {
  parallel_for(rows, grain_for(size), [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      rms_norm_row(x + row * size, weight, eps, size, y + row * size);
    }
  });
}

template <class T>
void quantize_fp8(const T* x, int64_t rows, int64_t size, uint8_t* record) {
  int64_t groups = size / kFp8Group;
  parallel_for(rows, grain_for(size), [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      uint8_t* codes = record + row * (size + groups);
      for (int64_t g = 0; g < groups; ++g) {
        const T* in = x + row * size + g * kFp8Group;
        uint8_t scale = fp8_scale(in);
        float inverse = e8m0_to_float(uint8_t(254 - scale));
        for (int i = 0; i < kFp8Group; ++i) {
          codes[g * kFp8Group + i] = float_to_e4m3(to_float(in[i]) * inverse);
        }
        codes[size + g] = scale;
      }
    }
  });
}

template <class T>
void dequantize_fp8(const uint8_t* record, int64_t rows, int64_t size, T* y) {
  int64_t groups = size / kFp8Group;
  parallel_for(rows, grain_for(size), [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const uint8_t* codes = record + row * (size + groups);
      for (int64_t i = 0; i < size; ++i) {
        round_to(e4m3_to_float(codes[i]) * e8m0_to_float(codes[size + i / kFp8Group]), y[row * size + i]);
      }
    }
  });
}

namespace {

template <int kGroup, class T>
void quantize_fp4_group(const T* x, ScaleFormat format, uint8_t* packed, uint8_t* scale_byte) {
  bool has_nan = false;
  for (int i = 0; i < kGroup; ++i) has_nan |= (bits_of(to_float(x[i])) & 0x7FFFFFFF) > 0x7F800000;
  if (has_nan) {
    for (int i = 0; i < kGroup / 2; ++i) packed[i] = 0;
    *scale_byte = format == ScaleFormat::kE8M0 ? kE8M0NaN : kE4M3NaN;
    return;
  }
  float scaled[kGroup];
  if (format == ScaleFormat::kE8M0) {
    *scale_byte = float_to_e8m0_ceil(group_amax<kGroup>(x, 6.0f * 0x1p-126f) * (1.0f / 6.0f));
    float inverse = e8m0_to_float(uint8_t(254 - *scale_byte));
    for (int i = 0; i < kGroup; ++i) scaled[i] = to_float(x[i]) * inverse;
  } else {
    *scale_byte = float_to_e4m3(group_amax<kGroup>(x, 6.0f * 0x1p-9f) / 6.0f);
    float scale = e4m3_to_float(*scale_byte);
    for (int i = 0; i < kGroup; ++i) scaled[i] = to_float(x[i]) / scale;
  }
  for (int i = 0; i < kGroup / 2; ++i) {
    packed[i] = uint8_t(float_to_e2m1(scaled[2 * i]) | (float_to_e2m1(scaled[2 * i + 1]) << 4));
  }
}

}  // namespace

template <class T>
void quantize_fp4(const T* x, ScaleFormat format, int64_t rows, int64_t size, uint8_t* record) {
  int64_t group = format == ScaleFormat::kE8M0 ? 32 : 16, groups = size / group;
  parallel_for(rows, grain_for(size), [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      uint8_t* packed = record + row * (size / 2 + groups);
      for (int64_t g = 0; g < groups; ++g) {
        const T* in = x + row * size + g * group;
        uint8_t *out = packed + g * group / 2, *scale = packed + size / 2 + g;
        format == ScaleFormat::kE8M0 ? quantize_fp4_group<32>(in, format, out, scale)
                                     : quantize_fp4_group<16>(in, format, out, scale);
      }
    }
  });
}

template <class T>
void dequantize_fp4(const uint8_t* record, ScaleFormat format, int64_t rows, int64_t size, T* y) {
  int64_t group = format == ScaleFormat::kE8M0 ? 32 : 16, groups = size / group;
  parallel_for(rows, grain_for(size), [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const uint8_t* packed = record + row * (size / 2 + groups);
      for (int64_t i = 0; i < size; ++i) {
        uint8_t byte = packed[size / 2 + i / group];
        float scale = format == ScaleFormat::kE8M0 ? e8m0_to_float(byte) : e4m3_to_float(byte);
        round_to(e2m1_to_float(uint8_t(packed[i / 2] >> (i % 2 * 4))) * scale, y[row * size + i]);
      }
    }
  });
}

template void rms_norm(const bf16*, const bf16*, float, int64_t, int64_t, bf16*);
template void rms_norm(const bf16*, const float*, float, int64_t, int64_t, bf16*);
template void rms_norm(const float*, const bf16*, float, int64_t, int64_t, float*);
template void rms_norm(const float*, const float*, float, int64_t, int64_t, float*);
template void quantize_fp8(const bf16*, int64_t, int64_t, uint8_t*);
template void quantize_fp8(const float*, int64_t, int64_t, uint8_t*);
template void dequantize_fp8(const uint8_t*, int64_t, int64_t, bf16*);
template void dequantize_fp8(const uint8_t*, int64_t, int64_t, float*);
template void quantize_fp4(const bf16*, ScaleFormat, int64_t, int64_t, uint8_t*);
template void quantize_fp4(const float*, ScaleFormat, int64_t, int64_t, uint8_t*);
template void dequantize_fp4(const uint8_t*, ScaleFormat, int64_t, int64_t, bf16*);
template void dequantize_fp4(const uint8_t*, ScaleFormat, int64_t, int64_t, float*);

}  // namespace deepinfer
