"""Keys of the indexer: projection, norm, then record and write; see `kernels/index_key.py`."""

import torch
import triton
import triton.language as tl

from deepinfer.kernels.formats import FP4_GROUP
from deepinfer.kernels.index_key import index_key_fake
from deepinfer.kernels.packing import linear_outputs, unpack_linear
from deepinfer.kernels.triton.launch import launch, power_of_two
from deepinfer.kernels.triton.linear import project
from deepinfer.kernels.triton.numbers import rounded, to_float32
from deepinfer.kernels.triton.quantize_fp4 import store_fp4_record
from deepinfer.kernels.triton.rms_norm import rms_norm
from deepinfer.kernels.triton.rope import partner_of, turn


@triton.jit
def _write_entry_kernel(
    x,
    table,
    region,
    positions,
    request_index,
    block_table,
    RATIO: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    ROTATED: tl.constexpr,
    TABLE: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    ENTRY_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row)
    closes = (position >= 0) & ((position + 1) % RATIO == 0)
    position = tl.maximum(position, 0)
    entry = position // RATIO
    line = tl.load(request_index + row, mask=closes, other=0)
    block = tl.load(block_table + line * TABLE + entry // ENTRIES, mask=closes, other=0)
    column = tl.arange(0, BLOCK)
    inside = closes & (column < SIZE)
    own = to_float32(tl.load(x + row * SIZE + column, mask=inside, other=0.0))
    other = to_float32(tl.load(x + row * SIZE + partner_of(column, SIZE, ROTATED), mask=inside, other=0.0))
    angles = table + entry * RATIO * ROTATED
    values = rounded(turn(own, other, angles, column, SIZE, ROTATED, False), x.dtype.element_ty)
    target = region + block * BLOCK_STRIDE + (entry % ENTRIES) * ENTRY_STRIDE
    if GROUP > 0:
        store_fp4_record(target, values, closes, SIZE, GROUP, BLOCK)
    else:
        tl.store(target + column, values, mask=inside)


def write_entries(
    x: torch.Tensor,
    table: torch.Tensor,
    region: torch.Tensor,
    positions: torch.Tensor,
    request_index: torch.Tensor,
    block_table: torch.Tensor,
    ratio: int,
    group: int,
) -> None:
    """Rotate and write `x [T, d]` of rows that close a group; FP4, `group` values a scale, or 0: float32."""
    rows, size = x.shape
    launch(
        _write_entry_kernel,
        (rows,),
        *(x, table, region, positions, request_index, block_table),
        RATIO=ratio,
        GROUP=group,
        SIZE=size,
        ROTATED=table.shape[1],
        TABLE=block_table.shape[1],
        ENTRIES=region.shape[1],
        BLOCK_STRIDE=region.stride(0),
        ENTRY_STRIDE=region.stride(1),
        BLOCK=power_of_two(size, 32),
    )


def index_key(
    latent: torch.Tensor,
    wk: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    table: torch.Tensor,
    region: torch.Tensor,
    positions: torch.Tensor,
    request_index: torch.Tensor,
    block_table: torch.Tensor,
    ratio: int,
    quantize: bool,
) -> None:
    """latent [T, K], wk [d, K], norm_weight [d]; writes to region [blocks, entries, record]."""
    paged = (positions, request_index, block_table, ratio)
    index_key_fake(latent, wk, norm_weight, eps, table, region, *paged, quantize)
    key = latent.new_empty((latent.shape[0], linear_outputs(wk)))
    project(latent, unpack_linear(wk), key)
    group = FP4_GROUP["e8m0"] if quantize else 0
    write_entries(rms_norm(key, norm_weight, eps), table, region, *paged, group)
