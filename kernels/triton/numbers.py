"""Number formats inside kernels: bfloat16, E4M3, E2M1, E8M0, with the bits of `kernels/formats.py`.

Conversions are integer arithmetic where the interpreter's own would round differently; on the device the
compiler's conversions serve.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def to_float32(x):
    """bfloat16 or float32 -> float32, exact."""
    if x.dtype == tl.bfloat16:
        wide = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return wide.to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """float32 -> dtype, to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        kept = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        kept = tl.where(x != x, 0x7FC0, kept)
        return kept.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """float32 -> float32, through dtype."""
    return to_float32(round_to(x, dtype))


@triton.jit
def bfloat16_bits(x):
    """bfloat16 or float32 -> int32 with the bits of the bfloat16; of a rounded NaN always 0x7FC0."""
    if x.dtype == tl.bfloat16:
        return x.to(tl.uint16, bitcast=True).to(tl.int32)
    else:
        bits = round_to(x, tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.int32)
        return tl.where(x != x, 0x7FC0, bits)


@triton.jit
def multiply_add(a, b, total):
    """total + a b for tiles, sums in float32; products of bfloat16 are exact, float32 is not shortened."""
    if a.dtype == tl.bfloat16 and b.dtype == tl.bfloat16 and not INTERPRETED:
        return tl.dot(a, b, total)
    else:
        return tl.dot(to_float32(a), to_float32(b), total, input_precision="ieee")


@triton.jit
def e8m0_decode(scale):
    """Scale bytes as int32 -> float32 power of two; 255 is NaN."""
    bits = tl.where(scale == 0, 0x00400000, scale << 23)
    bits = tl.where(scale == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e8m0_ceil(values):
    """Positive normal float32 -> int32 scale byte of the smallest power of two that is not below."""
    bits = values.to(tl.int32, bitcast=True)
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)


@triton.jit
def e4m3_decode(codes):
    """uint8 -> float32, exact."""
    code = codes.to(tl.int32)
    magnitude = code & 0x7F
    value = (magnitude << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120, subnormals too
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    # by bits: minus zero is zero to the compiler
    return (value.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_encode(values):
    """float32 -> uint8, to nearest even, saturating at 448; NaN is 0x7F."""
    sign = (values.to(tl.int32, bitcast=True) >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(values), 448.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # 960 = (127 - 7) << 3
    subnormal = (magnitude * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xF  # adding 2^23 rounds
    code = tl.where(magnitude < 0.015625, subnormal, normal) | sign
    return tl.where(values != values, 0x7F, code).to(tl.uint8)


@triton.jit
def e2m1_decode(codes):
    """int32 codes 0 .. 15 -> float32, exact."""
    value = ((codes & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
    return (value.to(tl.int32, bitcast=True) | ((codes & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def e2m1_encode(values):
    """float32 without NaN -> int32 codes 0 .. 15, nearest with ties to the even code, saturating at 6."""
    magnitude = tl.abs(values)
    code = (magnitude > 0.25).to(tl.int32) + (magnitude >= 0.75).to(tl.int32)
    code += (magnitude > 1.25).to(tl.int32) + (magnitude >= 1.75).to(tl.int32)
    code += (magnitude > 2.5).to(tl.int32) + (magnitude >= 3.5).to(tl.int32)
    code += (magnitude > 5.0).to(tl.int32)
    return code | ((values.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def unpack_e2m1(packed):
    """Bytes [n, size] -> float32 [n, 2 size]; the even element is the low nibble."""
    byte = packed.to(tl.int32)
    pairs = tl.join(e2m1_decode(byte & 0xF), e2m1_decode(byte >> 4))
    return tl.reshape(pairs, (packed.shape[0], 2 * packed.shape[1]))


@triton.jit
def scale_groups(values, factors):
    """values [n, size] times factors [n, groups], one factor for each size / groups neighbours."""
    groups: tl.constexpr = factors.shape[1]
    parts = tl.reshape(values, (values.shape[0], groups, values.shape[1] // groups))
    return tl.reshape(parts * factors[:, :, None], (values.shape[0], values.shape[1]))


@triton.jit
def group_amax(groups, floor: tl.constexpr):
    """Largest magnitude of each row of groups [n, size]; NaN ignored, infinity as the largest float32."""
    magnitude = tl.minimum(tl.abs(groups), 3.4028234663852886e38)
    magnitude = tl.where(groups == groups, magnitude, 0.0)
    return tl.maximum(tl.max(magnitude, axis=1), floor)


@triton.jit
def quantize_fp8(values):
    """values [groups, size] float32 -> codes uint8 of the same shape, scales [groups] int32."""
    scale = e8m0_ceil(group_amax(values, 1e-4) * (1.0 / 448.0))
    return e4m3_encode(values * e8m0_decode(254 - scale)[:, None]), scale


@triton.jit
def through_fp8(values):
    """values [groups, size] float32 -> what is left of them after the FP8 quantiser."""
    codes, scale = quantize_fp8(values)
    return e4m3_decode(codes) * e8m0_decode(scale)[:, None]


@triton.jit
def fp4_codes(values, E8M0: tl.constexpr):
    """values [groups, size] float32 -> int32 codes of the same shape, scale bytes [groups] int32."""
    if E8M0:
        scale = e8m0_ceil(group_amax(values, 7.052966104933725e-38) * (1.0 / 6.0))  # 6 * 2^-126
        scaled = values * e8m0_decode(254 - scale)[:, None]
    else:
        amax = group_amax(values, 0.01171875)  # 6 * 2^-9
        scale = e4m3_encode(tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32))).to(tl.int32)
        divisor = tl.broadcast_to(e4m3_decode(scale)[:, None], values.shape)
        scaled = tl.div_rn(values, divisor)
    bad = tl.max((values != values).to(tl.int32), axis=1) != 0
    codes = tl.where(bad[:, None], 0, e2m1_encode(tl.where(bad[:, None], 0.0, scaled)))
    return codes, tl.where(bad, 255 if E8M0 else 0x7F, scale)


@triton.jit
def quantize_fp4(values, E8M0: tl.constexpr):
    """values [groups, size] float32 -> bytes [groups, size / 2] uint8, scale bytes [groups] int32."""
    codes, scale = fp4_codes(values, E8M0)
    low, high = tl.split(tl.reshape(codes, (values.shape[0], values.shape[1] // 2, 2)))
    return (low | (high << 4)).to(tl.uint8), scale
