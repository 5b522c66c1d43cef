"""Input of a sublayer: weighed streams and RMSNorm in one program per row; see `kernels/mhc_collapse.py`."""

import torch
import triton
import triton.language as tl

from deepinfer.kernels.mhc_collapse import mhc_collapse_fake
from deepinfer.kernels.triton.launch import launch, power_of_two
from deepinfer.kernels.triton.numbers import round_to, rounded, to_float32
from deepinfer.kernels.triton.rms_norm import inverse_rms


@triton.jit
def _mhc_collapse_kernel(
    residual, pre, norm_weight, y, eps, STREAMS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    start = residual + row * STREAMS * SIZE + column
    total = tl.load(pre + row * STREAMS) * to_float32(tl.load(start, mask=inside, other=0.0))
    for stream in range(1, STREAMS):
        values = to_float32(tl.load(start + stream * SIZE, mask=inside, other=0.0))
        total += tl.load(pre + row * STREAMS + stream) * values
    # beyond the row there is 0 times pre, which need not be 0
    total = tl.where(inside, rounded(total, residual.dtype.element_ty), 0.0)
    factor = to_float32(tl.load(norm_weight + column, mask=inside, other=0.0))
    values = factor * (total * inverse_rms(total, SIZE, eps))
    tl.store(y + row * SIZE + column, round_to(values, y.dtype.element_ty), mask=inside)


def mhc_collapse(
    residual: torch.Tensor, pre: torch.Tensor, norm_weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """residual [T, n, D], pre [T, n], norm_weight [D] -> y [T, D] like residual."""
    y = mhc_collapse_fake(residual, pre, norm_weight, eps)
    rows, streams, size = residual.shape
    launch(
        _mhc_collapse_kernel,
        (rows,),
        *(residual, pre, norm_weight, y, eps),
        warps=8 if size > 2048 else 4,
        STREAMS=streams,
        SIZE=size,
        BLOCK=power_of_two(size),
    )
    return y
