"""Rotary position embedding: the last values of a vector turn in interleaved pairs (spec 4).

    (u, v) -> (u cos a - v sin a, u sin a + v cos a)        a -> -a with `inverse`

Shapes    x [T, d] or [T, H, d] bf16 | fp32, table [P, r] fp32 (cosines of a position's r / 2 pairs, then
          their sines), positions [T] int64 -> y like x; the last r values of each vector turn by
          table[positions[t]], by table[0] in padding rows (position -1), the others are copied
Numerics  float32 inside, each product and sum rounded, one rounding to the dtype of x at the end. NaN and
          infinity stay within their pair.
Native    the same operations, hence the same bits; r is at most 1024.
"""

from __future__ import annotations

import torch

from deepinfer.errors import UsageError
from deepinfer.kernels.checks import FLOAT_DTYPES, check_dtype, check_tensor
from deepinfer.kernels.registry import Op

MAX_ROTATED = 1024


def _check(x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> None:
    check_dtype("rope", "x", x, FLOAT_DTYPES)
    if x.dim() not in (2, 3):
        raise UsageError(f"must have two or three axes, got {list(x.shape)}", where="rope: x")
    check_tensor("rope", "table", table, (None, None), (torch.float32,))
    check_tensor("rope", "positions", positions, (x.shape[0],), (torch.int64,))
    rotated = table.shape[1]
    if rotated <= 0 or rotated % 2 or rotated > min(x.shape[-1], MAX_ROTATED):
        raise UsageError(
            f"must have an even number of columns, at most {x.shape[-1]} (last axis of x) and {MAX_ROTATED}, "
            f"got {rotated}",
            where="rope: table",
        )


def rotate(x: torch.Tensor, cos_sin: torch.Tensor, inverse: bool) -> torch.Tensor:
    """Turn the tail of `x [rows, ..., d]` by `cos_sin [rows, r]`."""
    rotated = cos_sin.shape[-1]
    cos, sin = cos_sin.unflatten(0, (-1, *(1,) * (x.dim() - 2))).chunk(2, dim=-1)
    if inverse:
        sin = -sin
    fixed, tail = x[..., :-rotated], x[..., -rotated:]
    u, v = tail.float().unflatten(-1, (rotated // 2, 2)).unbind(-1)
    turned = torch.stack((u * cos - v * sin, u * sin + v * cos), dim=-1).flatten(-2)
    return torch.cat((fixed, turned.to(x.dtype)), dim=-1)


def rope_reference(
    x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, inverse: bool
) -> torch.Tensor:
    """The definition; see the module text."""
    _check(x, table, positions)
    return rotate(x, table[positions.clamp(min=0)], inverse)


def rope_fake(x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, inverse: bool) -> torch.Tensor:
    """Shape rule."""
    _check(x, table, positions)
    return torch.empty_like(x)


def _make_inputs(
    rows: int, dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, 40, generator=generator).to(dtype)
    angles = torch.randn(50, 12, generator=generator) * 3
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.randint(-1, 50, (rows,), generator=generator)
    return x, table, positions, seed % 2 == 1


rope = Op(
    name="rope",
    schema="rope(Tensor x, Tensor table, Tensor positions, bool inverse) -> Tensor",
    reference=rope_reference,
    fake=rope_fake,
    make_inputs=_make_inputs,
    tolerance={torch.float32: (0.0, 0.0), torch.bfloat16: (0.0, 0.0)},
    composite=True,
)
