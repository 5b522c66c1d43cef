"""FP8 byte records: quantise and dequantise, 32 values per power-of-two scale (spec 12.2, 12.5).

    record = D bytes of E4M3 codes, then D/32 bytes of E8M0 scales

Shapes    x [..., D] bf16 | fp32 <-> record uint8 [..., D + D/32], D a multiple of 32
Numerics  scale and code of a group depend on that group alone; dequantised values are exact in bf16.
          Infinities saturate, a NaN keeps to its element (`formats.py`).
"""

from __future__ import annotations

import torch

from deepinfer.kernels.checks import FLOAT_DTYPES, check_dtype, check_multiple, check_out_dtype, last_size
from deepinfer.kernels.formats import FP8_GROUP, dequantize_fp8_groups, quantize_fp8_groups
from deepinfer.kernels.registry import Op


def _record_size(x: torch.Tensor) -> int:
    check_dtype("quantize_fp8", "x", x, FLOAT_DTYPES)
    size = last_size("quantize_fp8", "x", x)
    check_multiple("quantize_fp8", "last axis of x", size, FP8_GROUP)
    return size + size // FP8_GROUP


def _value_size(record: torch.Tensor, out_dtype: torch.dtype) -> int:
    check_dtype("dequantize_fp8", "record", record, (torch.uint8,))
    size = last_size("dequantize_fp8", "record", record)
    check_multiple("dequantize_fp8", "last axis of record", size, FP8_GROUP + 1)
    check_out_dtype("dequantize_fp8", out_dtype)
    return size // (FP8_GROUP + 1) * FP8_GROUP


def quantize_fp8_reference(x: torch.Tensor) -> torch.Tensor:
    """The definition; see the module text."""
    _record_size(x)
    return torch.cat(quantize_fp8_groups(x), dim=-1)


def quantize_fp8_fake(x: torch.Tensor) -> torch.Tensor:
    """Shape rule."""
    return x.new_empty((*x.shape[:-1], _record_size(x)), dtype=torch.uint8)


def dequantize_fp8_reference(record: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """The definition; see the module text."""
    size = _value_size(record, out_dtype)
    codes, scale = record.split((size, size // FP8_GROUP), dim=-1)
    return dequantize_fp8_groups(codes, scale).to(out_dtype)


def dequantize_fp8_fake(record: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Shape rule."""
    return record.new_empty((*record.shape[:-1], _value_size(record, out_dtype)), dtype=out_dtype)


def _make_inputs(rows: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, 96, generator=generator).to(dtype),)


def _make_records(rows: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.dtype]:
    return quantize_fp8_reference(*_make_inputs(rows, dtype, seed)), dtype


quantize_fp8 = Op(
    name="quantize_fp8",
    schema="quantize_fp8(Tensor x) -> Tensor",
    reference=quantize_fp8_reference,
    fake=quantize_fp8_fake,
    make_inputs=_make_inputs,
    tolerance={torch.float32: (0.0, 0.0), torch.bfloat16: (0.0, 0.0)},
)

dequantize_fp8 = Op(
    name="dequantize_fp8",
    schema="dequantize_fp8(Tensor record, ScalarType out_dtype) -> Tensor",
    reference=dequantize_fp8_reference,
    fake=dequantize_fp8_fake,
    make_inputs=_make_records,
    tolerance={torch.float32: (0.0, 0.0), torch.bfloat16: (0.0, 0.0)},
)
