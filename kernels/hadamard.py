"""Hadamard rotation of the last axis, which spreads outliers before FP4 (spec 16.2: V4's indexer).

    y = H x / sqrt(d), H the Sylvester matrix: d a power of two

Shapes    x [..., d] bf16 | fp32 -> y like x
Numerics  log2(d) rounds of sums and differences at distances 1, 2, 4, ... in float32, each rounded; then one
          product with the float32 of d^-0.5, and one rounding. A NaN or an infinity makes its vector NaN.
Native    the same operations, hence the same bits.
"""

from __future__ import annotations

import torch

from deepinfer.errors import UsageError
from deepinfer.kernels.checks import FLOAT_DTYPES, check_dtype, last_size
from deepinfer.kernels.registry import Op


def hadamard_fake(x: torch.Tensor) -> torch.Tensor:
    """Shape rule."""
    check_dtype("hadamard", "x", x, FLOAT_DTYPES)
    size = last_size("hadamard", "x", x)
    if size < 1 or size & (size - 1):
        raise UsageError(f"last axis must be a power of two, got {size}", where="hadamard: x")
    return torch.empty_like(x)


def hadamard_reference(x: torch.Tensor) -> torch.Tensor:
    """The definition; see the module text."""
    hadamard_fake(x)
    size, y, distance = x.shape[-1], x.to(torch.float32), 1
    while distance < size:
        first, second = y.unflatten(-1, (-1, 2, distance)).unbind(-2)
        y = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        distance *= 2
    return (y * size**-0.5).to(x.dtype)


def _make_inputs(rows: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, 64, generator=generator).to(dtype),)


hadamard = Op(
    name="hadamard",
    schema="hadamard(Tensor x) -> Tensor",
    reference=hadamard_reference,
    fake=hadamard_fake,
    make_inputs=_make_inputs,
    tolerance={torch.float32: (0.0, 0.0), torch.bfloat16: (0.0, 0.0)},
)
