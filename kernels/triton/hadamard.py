"""Hadamard rotation: one program per vector, its rounds in registers; see `kernels/hadamard.py`."""

import torch
import triton
import triton.language as tl

from deepinfer.kernels.hadamard import hadamard_fake
from deepinfer.kernels.triton.launch import launch
from deepinfer.kernels.triton.numbers import round_to, to_float32


@triton.jit
def butterflies(values, SIZE: tl.constexpr, ROUNDS: tl.constexpr):
    """Sums and differences of float32 `values [SIZE]` at distances 1, 2, 4, ... below SIZE."""
    for step in tl.static_range(ROUNDS):
        pairs = tl.reshape(values, (SIZE >> (step + 1), 2, 1 << step))
        first, second = tl.split(tl.permute(pairs, (0, 2, 1)))
        both = tl.permute(tl.join(first + second, first - second), (0, 2, 1))
        values = tl.reshape(both, (SIZE,))
    return values


@triton.jit
def _hadamard_kernel(x, y, factor, SIZE: tl.constexpr, ROUNDS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    values = butterflies(to_float32(tl.load(x + place)), SIZE, ROUNDS)
    tl.store(y + place, round_to(values * factor, y.dtype.element_ty))


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """x [..., d] bf16 | fp32, d a power of two -> y like x."""
    y = hadamard_fake(x)
    size = x.shape[-1]
    launch(
        _hadamard_kernel,
        (x.numel() // size,),
        *(x, y, size**-0.5),
        warps=1 if size <= 128 else 4,
        SIZE=size,
        ROUNDS=size.bit_length() - 1,
    )
    return y
