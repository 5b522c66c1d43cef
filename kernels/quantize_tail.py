"""Byte records of which the tail stays bf16: the rotated values, beside FP8 for the others (spec 12.5, V4).

    record = D - r bytes of E4M3 codes, then r bf16 values, then one E8M0 scale per 64 codes, then padding

Shapes    x [..., D] bf16 | fp32 <-> record uint8 [..., D - r + 2 r + scales], r = `tail`; scales are
          ceil((D - r) / 64), padded with zero bytes to a multiple of 8
Numerics  FP8 as `quantize_fp8.py`, but 64 values per scale (the last group may be shorter); the tail is
          rounded to bf16. A NaN keeps to its element.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from deepinfer.errors import UsageError
from deepinfer.kernels.checks import FLOAT_DTYPES, check_dtype, check_out_dtype, last_size
from deepinfer.kernels.formats import (
    FP8_AMAX_FLOOR,
    FP8_MAX,
    e4m3_to_float,
    e8m0_to_float,
    float_to_e4m3,
    float_to_e8m0_ceil,
    group_amax,
)
from deepinfer.kernels.registry import Op

TAIL_GROUP = 64
_SCALES_UNIT = 8


def tail_record_bytes(size: int, tail: int) -> int:
    """Bytes of the record of `size` values of which the last `tail` stay bf16."""
    scales = -(-(size - tail) // TAIL_GROUP)
    return size + tail + -(-scales // _SCALES_UNIT) * _SCALES_UNIT


def tail_record_values(num_bytes: int, tail: int) -> int:
    """Values of a record of so many bytes; the inverse of `tail_record_bytes`."""
    size = num_bytes - tail - _SCALES_UNIT
    while size > tail and tail_record_bytes(size, tail) != num_bytes:
        size -= _SCALES_UNIT
    return size


def _check_tail(op: str, size: int, tail: int) -> None:
    if not 0 < tail < size:
        raise UsageError(f"must lie in 1 .. {size - 1}, got {tail}", where=f"{op}: tail")


def quantize_tail_fake(x: torch.Tensor, tail: int) -> torch.Tensor:
    """Shape rule."""
    check_dtype("quantize_tail", "x", x, FLOAT_DTYPES)
    size = last_size("quantize_tail", "x", x)
    _check_tail("quantize_tail", size, tail)
    return x.new_empty((*x.shape[:-1], tail_record_bytes(size, tail)), dtype=torch.uint8)


def quantize_tail_reference(x: torch.Tensor, tail: int) -> torch.Tensor:
    """The definition; see the module text."""
    width = quantize_tail_fake(x, tail).shape[-1]
    size = x.shape[-1]
    head = x[..., : size - tail].to(torch.float32)
    groups = F.pad(head, (0, -head.shape[-1] % TAIL_GROUP)).unflatten(-1, (-1, TAIL_GROUP))
    reciprocal = torch.tensor(1.0 / FP8_MAX, dtype=torch.float32, device=x.device)
    scale = float_to_e8m0_ceil(group_amax(groups, FP8_AMAX_FLOOR) * reciprocal)
    inverse = e8m0_to_float(254 - scale)
    codes = float_to_e4m3(groups * inverse.unsqueeze(-1)).flatten(-2)[..., : size - tail]
    kept = x[..., size - tail :].to(torch.bfloat16).contiguous().view(torch.uint8)
    record = torch.cat((codes, kept, scale), dim=-1)
    return F.pad(record, (0, width - record.shape[-1]))


def _value_size(record: torch.Tensor, size: int, tail: int, out_dtype: torch.dtype) -> None:
    op = "dequantize_tail"
    check_dtype(op, "record", record, (torch.uint8,))
    _check_tail(op, size, tail)
    if last_size(op, "record", record) != tail_record_bytes(size, tail):
        raise UsageError(
            f"must have {tail_record_bytes(size, tail)} bytes, got {record.shape[-1]}", where=f"{op}: record"
        )
    check_out_dtype(op, out_dtype)


def dequantize_tail_reference(
    record: torch.Tensor, size: int, tail: int, out_dtype: torch.dtype
) -> torch.Tensor:
    """The definition; see the module text."""
    _value_size(record, size, tail, out_dtype)
    codes, kept, scale = record.split((size - tail, 2 * tail, record.shape[-1] - size - tail), dim=-1)
    factor = e8m0_to_float(scale).repeat_interleave(TAIL_GROUP, -1)[..., : size - tail]
    values = (e4m3_to_float(codes) * factor).to(out_dtype)
    return torch.cat((values, kept.contiguous().view(torch.bfloat16).to(out_dtype)), dim=-1)


def dequantize_tail_fake(record: torch.Tensor, size: int, tail: int, out_dtype: torch.dtype) -> torch.Tensor:
    """Shape rule."""
    _value_size(record, size, tail, out_dtype)
    return record.new_empty((*record.shape[:-1], size), dtype=out_dtype)


def _make_inputs(rows: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 112, generator=generator).to(dtype), 16


def _make_records(rows: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, int, int, torch.dtype]:
    return quantize_tail_reference(*_make_inputs(rows, dtype, seed)), 112, 16, dtype


quantize_tail = Op(
    name="quantize_tail",
    schema="quantize_tail(Tensor x, int tail) -> Tensor",
    reference=quantize_tail_reference,
    fake=quantize_tail_fake,
    make_inputs=_make_inputs,
    tolerance={torch.float32: (0.0, 0.0), torch.bfloat16: (0.0, 0.0)},
)

dequantize_tail = Op(
    name="dequantize_tail",
    schema="dequantize_tail(Tensor record, int size, int tail, ScalarType out_dtype) -> Tensor",
    reference=dequantize_tail_reference,
    fake=dequantize_tail_fake,
    make_inputs=_make_records,
    tolerance={torch.float32: (0.0, 0.0), torch.bfloat16: (0.0, 0.0)},
)
