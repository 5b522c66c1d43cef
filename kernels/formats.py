"""Small number formats in plain PyTorch: E4M3, E2M1, E8M0 and the group quantisers built on them.

These are the definitions (spec 12.1 to 12.3); `cpu/formats.h` gives the same bits. Everything is element-wise
or per group, so no result depends on how many rows there are. What the
formats leave open:

* an infinity counts as the largest float32 when the scale is chosen, then saturates like any large value;
* E4M3 has a NaN code (0x7F): a NaN becomes that code and does not touch the scale of its group;
* E2M1 has none: a NaN makes the scale of its group NaN, hence the whole group.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

FP8_GROUP = 32
FP8_MAX = 448.0
FP8_AMAX_FLOOR = 1e-4
FP4_MAX = 6.0
E8M0_NAN = 255
E4M3_NAN = 0x7F
FLOAT32_MAX = torch.finfo(torch.float32).max
# Scale formats of the FP4 quantiser: values per group, smallest amax (spec 12.3).
FP4_GROUP = {"e8m0": 32, "e4m3": 16}
FP4_AMAX_FLOOR = {"e8m0": 6.0 * 2.0**-126, "e4m3": 6.0 * 2.0**-9}
ROWS = 8


def e8m0_to_float(scale_bytes: torch.Tensor) -> torch.Tensor:
    """uint8 -> float32 2^(byte - 127), exact; 255 is NaN (spec 12.1)."""
    exponent = scale_bytes.to(torch.int32)
    bits = exponent << 23
    bits = torch.where(exponent == 0, 0x00400000, bits)  # 2^-127 is subnormal in float32
    bits = torch.where(exponent == E8M0_NAN, 0x7FC00000, bits)
    return bits.view(torch.float32)


def float_to_e8m0_ceil(values: torch.Tensor) -> torch.Tensor:
    """Positive normal float32 -> uint8 of the smallest power of two that is not below (spec 12.2)."""
    bits = values.view(torch.int32)
    return ((bits >> 23) + ((bits & 0x7FFFFF) != 0)).to(torch.uint8)


def float_to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """float32 -> uint8 codes, round to nearest even, saturating at 448; NaN is 0x7F."""
    codes = values.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(values.isnan(), E4M3_NAN, codes)


def e4m3_to_float(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes -> float32, exact."""
    return codes.view(torch.float8_e4m3fn).to(torch.float32)


def float_to_e2m1(values: torch.Tensor) -> torch.Tensor:
    """float32 without NaN -> uint8 codes 0..15, nearest with ties to the even code, saturating at 6."""
    magnitude = values.abs()
    code = (magnitude > 0.25).to(torch.uint8)
    for threshold, tie_goes_up in ((0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0)):
        code += (magnitude >= threshold) if tie_goes_up else (magnitude > threshold)
    return code | (values.signbit().to(torch.uint8) << 3)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes [..., D] -> bytes [..., D/2]; the even element is the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _e2m1_pairs() -> torch.Tensor:
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values = magnitudes + [-value for value in magnitudes]
    pairs = torch.tensor([[low, high] for high in values for low in values])
    return pairs.view(torch.int64).squeeze(1)  # as one element, a pair is copied at once


_E2M1_PAIRS = _e2m1_pairs()  # the two values of every byte


def e2m1_to_float(packed: torch.Tensor) -> torch.Tensor:
    """Packed bytes [..., D/2] -> float32 [..., D], exact."""
    pairs = _E2M1_PAIRS.to(packed.device).index_select(0, packed.flatten().to(torch.int32))
    return pairs.view(packed.shape).view(torch.float32)


def group_amax(groups: torch.Tensor, floor: float) -> torch.Tensor:
    """Largest magnitude of the last axis, at least `floor`; NaN ignored, infinity as the largest float32."""
    return groups.abs().nan_to_num(nan=0.0, posinf=FLOAT32_MAX).amax(-1).clamp_min(floor)


def quantize_fp8_groups(x: torch.Tensor, group: int = FP8_GROUP) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., D] -> E4M3 codes [..., D], E8M0 scales [..., D/group], both uint8 (spec 12.2)."""
    groups = x.to(torch.float32).unflatten(-1, (-1, group))
    reciprocal = torch.tensor(1.0 / FP8_MAX, dtype=torch.float32, device=x.device)
    scale = float_to_e8m0_ceil(group_amax(groups, FP8_AMAX_FLOOR) * reciprocal)
    inverse = e8m0_to_float(254 - scale)  # scales lie in 2^-22 .. 2^120, so this is a normal number
    return float_to_e4m3(groups * inverse.unsqueeze(-1)).flatten(-2), scale


def dequantize_fp8_groups(codes: torch.Tensor, scale: torch.Tensor, group: int = FP8_GROUP) -> torch.Tensor:
    """Inverse of `quantize_fp8_groups`, float32, exact."""
    groups = e4m3_to_float(codes).unflatten(-1, (-1, group))
    return (groups * e8m0_to_float(scale).unsqueeze(-1)).flatten(-2)


def rounded_to_fp8(x: torch.Tensor, group: int) -> torch.Tensor:
    """x [..., D] as the FP8 quantiser of `group` values a scale leaves it, float32 (spec 12.2, 12.4)."""
    return dequantize_fp8_groups(*quantize_fp8_groups(x, group), group)


def quantize_fp4_groups(x: torch.Tensor, scale_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., D] -> packed E2M1 [..., D/2], scale bytes [..., D/group] (spec 12.3)."""
    groups = x.to(torch.float32).unflatten(-1, (-1, FP4_GROUP[scale_format]))
    amax = group_amax(groups, FP4_AMAX_FLOOR[scale_format])
    if scale_format == "e8m0":
        reciprocal = torch.tensor(1.0 / FP4_MAX, dtype=torch.float32, device=x.device)
        scale, nan_byte = float_to_e8m0_ceil(amax * reciprocal), E8M0_NAN
        scaled = groups * e8m0_to_float(254 - scale).unsqueeze(-1)
    else:
        scale, nan_byte = float_to_e4m3(amax / FP4_MAX), E4M3_NAN
        scaled = groups / e4m3_to_float(scale).unsqueeze(-1)
    bad = groups.isnan().any(-1)
    codes = torch.where(bad.unsqueeze(-1), 0, float_to_e2m1(scaled))
    return pack_nibbles(codes.flatten(-2)), torch.where(bad, nan_byte, scale)


def dequantize_fp4_groups(packed: torch.Tensor, scale: torch.Tensor, scale_format: str) -> torch.Tensor:
    """Inverse of `quantize_fp4_groups`, float32, exact."""
    groups = e2m1_to_float(packed).unflatten(-1, (-1, FP4_GROUP[scale_format]))
    factor = e8m0_to_float(scale) if scale_format == "e8m0" else e4m3_to_float(scale)
    return (groups * factor.unsqueeze(-1)).flatten(-2)


def ordered_sum(terms: torch.Tensor, dim: int) -> torch.Tensor:
    """Add along a short `dim` first to last, so that the order of additions is part of the definition."""
    total, *others = terms.unbind(dim)
    for other in others:
        total = total + other
    return total


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """Zero rows up to a multiple of 8 on the first axis.

    torch's CPU element-wise loops give other bits in their scalar tails; at multiples of 8 rows there are
    none for the widths in use. The references pad, so a row never depends on its company.
    """
    missing = -x.shape[0] % ROWS
    return torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing else x


def matmul_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x [rows, K] @ weight [N, K]^T` in float32 -> [rows, N], in products of exactly 8 rows each.

    A product of more rows at once takes other kernels, with another order of additions, for some (K, N); at a
    fixed 8 rows, on one thread, a row's bits depend on nothing else.
    """
    blocks = pad_rows(x.to(torch.float32)).unflatten(0, (-1, ROWS))
    outputs = weight.shape[0]
    # Fewer than four columns take yet another route, whose order depends on the number of blocks.
    matrix = F.pad(weight.to(torch.float32), (0, 0, 0, max(0, ROWS - outputs))).T
    products = torch.bmm(blocks, matrix.expand(blocks.shape[0], -1, -1))
    return products.flatten(0, 1)[: x.shape[0], :outputs]
