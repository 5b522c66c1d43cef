"""Residual streams after a sublayer: one program per row and 1,024 columns; see `kernels/mhc_expand.py`."""

import torch
import triton
import triton.language as tl

from deepinfer.kernels.mhc_expand import mhc_expand_fake
from deepinfer.kernels.triton.launch import blocks, launch, power_of_two
from deepinfer.kernels.triton.numbers import round_to, to_float32

_COLUMNS = 1024


@triton.jit
def _mhc_expand_kernel(
    y, residual, post, comb, z, STREAMS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    added = to_float32(tl.load(y + row * SIZE + column, mask=inside, other=0.0))
    start = row * STREAMS * SIZE + column
    for target in tl.static_range(STREAMS):
        weights = comb + row * STREAMS * STREAMS + target
        source = to_float32(tl.load(residual + start, mask=inside, other=0.0))
        mixed = tl.load(weights) * source
        for stream in tl.static_range(1, STREAMS):
            source = to_float32(tl.load(residual + start + stream * SIZE, mask=inside, other=0.0))
            mixed += tl.load(weights + stream * STREAMS) * source
        value = tl.load(post + row * STREAMS + target) * added + mixed
        tl.store(z + start + target * SIZE, round_to(value, z.dtype.element_ty), mask=inside)


def mhc_expand(
    y: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """y [T, D], residual [T, n, D], post [T, n], comb [T, n, n] -> z like residual."""
    z = mhc_expand_fake(y, residual, post, comb)
    rows, streams, size = residual.shape
    block = min(_COLUMNS, power_of_two(size))
    launch(
        _mhc_expand_kernel,
        (rows, blocks(size, block)),
        *(y, residual, post, comb, z),
        STREAMS=streams,
        SIZE=size,
        BLOCK=block,
    )
    return z
