"""RMSNorm: one program per row, the row in one block; see `kernels/rms_norm.py`."""

import torch
import triton
import triton.language as tl

from deepinfer.kernels.rms_norm import rms_norm_fake
from deepinfer.kernels.triton.launch import launch, power_of_two
from deepinfer.kernels.triton.numbers import round_to, to_float32


@triton.jit
def inverse_rms(values, SIZE: tl.constexpr, eps):
    """1 / sqrt(mean of squares + eps) of one row; entries beyond SIZE are zero."""
    mean = tl.div_rn(tl.sum(values * values, axis=0), SIZE * 1.0)
    return tl.div_rn(1.0, tl.sqrt_rn(mean + eps))


@triton.jit
def _rms_norm_kernel(x, weight, y, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * SIZE
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    values = to_float32(tl.load(x + row + column, mask=inside, other=0.0))
    scaled = values * inverse_rms(values, SIZE, eps)
    factor = to_float32(tl.load(weight + column, mask=inside, other=0.0))
    tl.store(y + row + column, round_to(factor * scaled, y.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., D] bf16 | fp32, weight [D] -> y like x."""
    y = rms_norm_fake(x, weight, eps)
    size = weight.shape[0]
    if y.numel():
        launch(
            _rms_norm_kernel,
            (y.numel() // size,),
            *(x, weight, y, eps),
            warps=8 if size > 2048 else 4,
            SIZE=size,
            BLOCK=power_of_two(size),
        )
    return y
