"""Window records: norm and rotation of the key = value vector, then its cache record (spec 5.1, 12.5).

    record = fp8(rope(rms_norm(kv, norm_weight, eps), table, positions))        without `quantize`: the vector

Shapes    kv [T, d] bf16 | fp32, norm_weight [d] bf16 | fp32, table [P, r] fp32 (cosines, then sines),
          positions [T] int64 -> record uint8 [T, d + d/32], with a `tail` that of `quantize_tail.py`;
          without `quantize` fp32 [T, d]
Numerics  those of `rms_norm`, `rope` and `quantize_fp8` (`quantize_tail`) one after the other: the vector is
          rounded to the dtype of kv after the norm and after the rotation. Padding rows (position -1) give
          zeros.
Native    the operations of the three, hence their bits.
"""

from __future__ import annotations

import torch

from deepinfer.errors import UsageError
from deepinfer.kernels.checks import FLOAT_DTYPES, check_multiple, check_tensor, check_values
from deepinfer.kernels.formats import FP8_GROUP
from deepinfer.kernels.quantize_fp8 import quantize_fp8
from deepinfer.kernels.quantize_tail import quantize_tail, tail_record_bytes
from deepinfer.kernels.registry import Op
from deepinfer.kernels.rms_norm import rms_norm
from deepinfer.kernels.rope import rope


def _check(
    kv: torch.Tensor,
    norm_weight: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    quantize: bool,
    tail: int,
) -> None:
    check_tensor("window_record", "kv", kv, (None, None), FLOAT_DTYPES)
    rows, width = kv.shape
    check_tensor("window_record", "norm_weight", norm_weight, (width,), FLOAT_DTYPES)
    check_tensor("window_record", "table", table, (None, None), (torch.float32,))
    if table.shape[1] > width or table.shape[1] % 2:
        raise UsageError(
            f"must have an even width of at most {width}, got {table.shape[1]}", where="window_record: table"
        )
    check_tensor("window_record", "positions", positions, (rows,), (torch.int64,))
    if quantize and not tail:
        check_multiple("window_record", "last axis of kv", width, FP8_GROUP)
    if tail and not 0 < tail < width:
        raise UsageError(f"must lie in 0 .. {width - 1}, got {tail}", where="window_record: tail")


def window_record_reference(
    kv: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    table: torch.Tensor,
    positions: torch.Tensor,
    quantize: bool,
    tail: int = 0,
) -> torch.Tensor:
    """The definition; see the module text."""
    _check(kv, norm_weight, table, positions, quantize, tail)
    inside = (positions >= -1) & (positions < table.shape[0])
    check_values("window_record", "positions", inside, f"must lie in -1 .. {table.shape[0] - 1}")
    rotated = rope(rms_norm(kv, norm_weight, eps), table, positions, False)
    if quantize:
        record = quantize_tail(rotated, tail) if tail else quantize_fp8(rotated)
    else:
        record = rotated.to(torch.float32)
    return torch.where((positions >= 0).unsqueeze(1), record, 0)


def window_record_fake(
    kv: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    table: torch.Tensor,
    positions: torch.Tensor,
    quantize: bool,
    tail: int = 0,
) -> torch.Tensor:
    """Shape rule."""
    _check(kv, norm_weight, table, positions, quantize, tail)
    rows, width = kv.shape
    if quantize:
        size = tail_record_bytes(width, tail) if tail else width + width // FP8_GROUP
        return kv.new_empty((rows, size), dtype=torch.uint8)
    return kv.new_empty((rows, width), dtype=torch.float32)


def _make_inputs(
    rows: int, dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, torch.Tensor, float, torch.Tensor, torch.Tensor, bool]:
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(rows, 96, generator=generator).to(dtype)
    norm_weight = torch.rand(96, generator=generator).to(torch.bfloat16)
    angles = torch.randn(50, 16, generator=generator)
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.randint(0, 50, (rows,), generator=generator)
    return kv, norm_weight, 1e-20, table, positions, dtype == torch.bfloat16


window_record = Op(
    name="window_record",
    schema=(
        "window_record(Tensor kv, Tensor norm_weight, float eps, Tensor table, Tensor positions, "
        "bool quantize, int tail=0) -> Tensor"
    ),
    reference=window_record_reference,
    fake=window_record_fake,
    make_inputs=_make_inputs,
    # of bytes: a code may be the next one, where a bf16 was
    tolerance={torch.float32: (2e-6, 1e-6), torch.bfloat16: (0.0, 1.0)},
    composite=True,
)
