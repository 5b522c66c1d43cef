"""Rotation of the last values of a vector: one program per vector; see `kernels/rope.py`."""

import torch
import triton
import triton.language as tl

from deepinfer.kernels.rope import rope_fake
from deepinfer.kernels.triton.launch import launch, power_of_two
from deepinfer.kernels.triton.numbers import round_to, to_float32


@triton.jit
def partner_of(column, SIZE: tl.constexpr, ROTATED: tl.constexpr):
    """Which element turns with each one; its own index in the part that stays."""
    tail = column - (SIZE - ROTATED)
    return tl.where((tail >= 0) & (column < SIZE), (SIZE - ROTATED) + (tail ^ 1), column)


@triton.jit
def turn(values, partners, angles, column, SIZE: tl.constexpr, ROTATED: tl.constexpr, INVERSE: tl.constexpr):
    """Rotate: float32 values, their partners, `angles` the address of a row of the table."""
    tail = column - (SIZE - ROTATED)
    turns = (tail >= 0) & (column < SIZE)
    pair = tail >> 1
    cosine = tl.load(angles + pair, mask=turns, other=1.0)
    sine = tl.load(angles + ROTATED // 2 + pair, mask=turns, other=0.0)
    if INVERSE:
        sine = sine * -1.0  # not a minus, which would lose the sign of zero
    first = values * cosine - partners * sine
    second = partners * sine + values * cosine
    return tl.where(turns, tl.where((tail & 1) == 0, first, second), values)


@triton.jit
def _rope_kernel(
    x,
    table,
    positions,
    y,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    ROTATED: tl.constexpr,
    INVERSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = (row * HEADS + tl.program_id(1)) * SIZE
    position = tl.maximum(tl.load(positions + row), 0)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    own = tl.load(x + start + column, mask=inside, other=0.0)
    partner = tl.load(x + start + partner_of(column, SIZE, ROTATED), mask=inside, other=0.0)
    angles = table + position * ROTATED
    turned = turn(to_float32(own), to_float32(partner), angles, column, SIZE, ROTATED, INVERSE)
    tail = inside & (column >= SIZE - ROTATED)
    tl.store(y + start + column, own, mask=inside & (column < SIZE - ROTATED))
    tl.store(y + start + column, round_to(turned, y.dtype.element_ty), mask=tail)


def rope(x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, inverse: bool) -> torch.Tensor:
    """x [T, d] or [T, H, d] bf16 | fp32, table [P, r] fp32, positions [T] int64 -> y like x."""
    y = rope_fake(x, table, positions, inverse)
    size = x.shape[-1]
    launch(
        _rope_kernel,
        (x.shape[0], x.shape[1] if x.dim() == 3 else 1),
        *(x, table, positions, y),
        warps=2,
        HEADS=x.shape[1] if x.dim() == 3 else 1,
        SIZE=size,
        ROTATED=table.shape[1],
        INVERSE=inverse,
        BLOCK=power_of_two(size),
    )
    return y
