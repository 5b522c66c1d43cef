"""FP4 byte records: quantise and dequantise (spec 12.3, 12.5).

    record = D/2 bytes of E2M1 pairs (even element in the low nibble), then one scale byte per group

Shapes    x [..., D] bf16 | fp32 <-> record uint8 [..., D/2 + D/group]
          scale_format "e8m0": groups of 32, power-of-two scale (index keys and queries)
          scale_format "e4m3": groups of 16, scale rounded to E4M3 (compressed key-value rows)
Numerics  scale and codes of a group depend on that group alone; dequantised values are exact in bf16.
          Infinities saturate, a NaN makes its group NaN (`formats.py`).
"""

from __future__ import annotations

import torch

from deepinfer.errors import UsageError
from deepinfer.kernels.checks import FLOAT_DTYPES, check_dtype, check_multiple, check_out_dtype, last_size
from deepinfer.kernels.formats import FP4_GROUP, dequantize_fp4_groups, quantize_fp4_groups
from deepinfer.kernels.registry import Op


def _group(op: str, scale_format: str) -> int:
    if scale_format not in FP4_GROUP:
        raise UsageError(f"must be 'e8m0' or 'e4m3', got {scale_format!r}", where=f"{op}: scale_format")
    return FP4_GROUP[scale_format]


def _record_size(x: torch.Tensor, scale_format: str) -> int:
    group = _group("quantize_fp4", scale_format)
    check_dtype("quantize_fp4", "x", x, FLOAT_DTYPES)
    size = last_size("quantize_fp4", "x", x)
    check_multiple("quantize_fp4", "last axis of x", size, group)
    return size // 2 + size // group


def _value_size(record: torch.Tensor, scale_format: str, out_dtype: torch.dtype) -> int:
    group = _group("dequantize_fp4", scale_format)
    check_dtype("dequantize_fp4", "record", record, (torch.uint8,))
    size = last_size("dequantize_fp4", "record", record)
    check_multiple("dequantize_fp4", "last axis of record", size, group // 2 + 1)
    check_out_dtype("dequantize_fp4", out_dtype)
    return size // (group // 2 + 1) * group


def quantize_fp4_reference(x: torch.Tensor, scale_format: str) -> torch.Tensor:
    """The definition; see the module text."""
    _record_size(x, scale_format)
    return torch.cat(quantize_fp4_groups(x, scale_format), dim=-1)


def quantize_fp4_fake(x: torch.Tensor, scale_format: str) -> torch.Tensor:
    """Shape rule."""
    return x.new_empty((*x.shape[:-1], _record_size(x, scale_format)), dtype=torch.uint8)


def dequantize_fp4_reference(record: torch.Tensor, scale_format: str, out_dtype: torch.dtype) -> torch.Tensor:
    """The definition; see the module text."""
    size = _value_size(record, scale_format, out_dtype)
    packed, scale = record.split((size // 2, size // FP4_GROUP[scale_format]), dim=-1)
    return dequantize_fp4_groups(packed, scale, scale_format).to(out_dtype)


def dequantize_fp4_fake(record: torch.Tensor, scale_format: str, out_dtype: torch.dtype) -> torch.Tensor:
    """Shape rule."""
    return record.new_empty(
        (*record.shape[:-1], _value_size(record, scale_format, out_dtype)), dtype=out_dtype
    )


def _make_inputs(rows: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, str]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 96, generator=generator).to(dtype), ("e8m0", "e4m3")[seed % 2]


def _make_records(rows: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, str, torch.dtype]:
    x, scale_format = _make_inputs(rows, dtype, seed)
    return quantize_fp4_reference(x, scale_format), scale_format, dtype


quantize_fp4 = Op(
    name="quantize_fp4",
    schema="quantize_fp4(Tensor x, str scale_format) -> Tensor",
    reference=quantize_fp4_reference,
    fake=quantize_fp4_fake,
    make_inputs=_make_inputs,
    tolerance={torch.float32: (0.0, 0.0), torch.bfloat16: (0.0, 0.0)},
)

dequantize_fp4 = Op(
    name="dequantize_fp4",
    schema="dequantize_fp4(Tensor record, str scale_format, ScalarType out_dtype) -> Tensor",
    reference=dequantize_fp4_reference,
    fake=dequantize_fp4_fake,
    make_inputs=_make_records,
    tolerance={torch.float32: (0.0, 0.0), torch.bfloat16: (0.0, 0.0)},
)
