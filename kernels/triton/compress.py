"""KV compression: projections, pool and norm, record and write, ring; see `kernels/compress.py`.

The ring is read by all rows before any row writes to it, so the writes are a kernel of their own.
"""

import torch
import triton
import triton.language as tl

from deepinfer.kernels.compress import compress_fake
from deepinfer.kernels.formats import FP4_GROUP
from deepinfer.kernels.packing import unpack_linear
from deepinfer.kernels.triton.index_key import write_entries
from deepinfer.kernels.triton.launch import launch, power_of_two
from deepinfer.kernels.triton.linear import project
from deepinfer.kernels.triton.numbers import round_to, rounded, to_float32
from deepinfer.kernels.triton.ring_write import write_ring
from deepinfer.kernels.triton.rms_norm import inverse_rms


@triton.jit
def _member(
    parked, ring, row, position, start, offset, kept, LENGTH: tl.constexpr, ENTRY_STRIDE: tl.constexpr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Value and gate of the group's member `offset` positions ago; `ring` is the request's slot."""
    earlier = tl.maximum(position - offset, 0)
    in_step = kept & ((earlier >= start) | (offset == 0))
    in_ring = kept & (earlier < start) & (offset > 0)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    own = parked + tl.maximum(row - offset, 0) * (2 * SIZE) + column
    other = ring + (earlier % LENGTH) * ENTRY_STRIDE + column
    value = tl.load(own, mask=in_step & inside, other=0.0)
    value = tl.where(in_ring, tl.load(other, mask=in_ring & inside, other=0.0), value)
    gate = tl.load(own + SIZE, mask=in_step & inside, other=0.0)
    gate = tl.where(in_ring, tl.load(other + SIZE, mask=in_ring & inside, other=0.0), gate)
    return value, gate


@triton.jit
def _pool_norm_kernel(
    parked,
    ring,
    norm_weight,
    eps,
    latent,
    positions,
    request_index,
    slot_ids,
    num_computed_tokens,
    RATIO: tl.constexpr,
    LENGTH: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    ENTRY_STRIDE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row)
    closes = (position >= 0) & ((position + 1) % RATIO == 0)
    column = tl.arange(0, BLOCK)
    inside = closes & (column < SIZE)
    if RATIO == 1:
        pooled = to_float32(tl.load(parked + row * SIZE + column, mask=inside, other=0.0))
    else:
        line = tl.load(request_index + row, mask=closes, other=0)
        start = tl.load(num_computed_tokens + line, mask=closes, other=0)
        slot = ring + tl.load(slot_ids + line, mask=closes, other=0) * SLOT_STRIDE
        top = tl.full((BLOCK,), float("-inf"), tl.float32)
        for step in range(RATIO):
            _, gate = _member(
                parked,
                slot,
                row,
                position,
                start,
                RATIO - 1 - step,
                closes,
                LENGTH,
                ENTRY_STRIDE,
                SIZE,
                BLOCK,
            )
            top = tl.maximum(top, gate)
        total = tl.zeros((BLOCK,), tl.float32)
        for step in range(RATIO):
            _, gate = _member(
                parked,
                slot,
                row,
                position,
                start,
                RATIO - 1 - step,
                closes,
                LENGTH,
                ENTRY_STRIDE,
                SIZE,
                BLOCK,
            )
            total += tl.exp(gate - top)
        pooled = tl.zeros((BLOCK,), tl.float32)
        for step in range(RATIO):
            value, gate = _member(
                parked,
                slot,
                row,
                position,
                start,
                RATIO - 1 - step,
                closes,
                LENGTH,
                ENTRY_STRIDE,
                SIZE,
                BLOCK,
            )
            pooled += value * tl.div_rn(tl.exp(gate - top), total)
        pooled = tl.where(inside, rounded(pooled, latent.dtype.element_ty), 0.0)
    factor = to_float32(tl.load(norm_weight + column, mask=column < SIZE, other=0.0))
    values = tl.where(closes, factor * (pooled * inverse_rms(pooled, SIZE, eps)), 0.0)
    tl.store(latent + row * SIZE + column, round_to(values, latent.dtype.element_ty), mask=column < SIZE)


def compress(
    x: torch.Tensor,
    wkv: torch.Tensor,
    wgate: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    open_group: torch.Tensor,
    table: torch.Tensor,
    region: torch.Tensor,
    positions: torch.Tensor,
    request_index: torch.Tensor,
    block_table: torch.Tensor,
    slot_ids: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    row_counts: torch.Tensor,
    ratio: int,
    quantize: bool,
) -> torch.Tensor:
    """x [T, D], wkv and wgate [d, D] -> latent [T, d]; writes to open_group and region as defined."""
    paged = (positions, request_index, block_table)
    requests = (slot_ids, num_computed_tokens, row_counts)
    latent = compress_fake(
        x, wkv, wgate, norm_weight, eps, open_group, table, region, *paged, *requests, ratio, quantize
    )
    rows, size = latent.shape
    if ratio == 1:
        parked = torch.empty_like(latent)
        project(x, unpack_linear(wkv), parked)
    else:
        parked = x.new_empty((rows, 2 * size), dtype=torch.float32)
        project(x, unpack_linear(wkv), parked[:, :size])
        project(x, unpack_linear(wgate), parked[:, size:])
    launch(
        _pool_norm_kernel,
        (rows,),
        *(parked, open_group, norm_weight, eps, latent, positions, request_index, slot_ids),
        num_computed_tokens,
        warps=8,
        RATIO=ratio,
        LENGTH=max(1, open_group.shape[1]),
        SLOT_STRIDE=open_group.stride(0),
        ENTRY_STRIDE=open_group.stride(1),
        SIZE=size,
        BLOCK=power_of_two(size),
    )
    if ratio > 1:
        write_ring(open_group, parked, positions, request_index, *requests)
    write_entries(latent, table, region, *paged, ratio, FP4_GROUP["e4m3"] if quantize else 0)
    return latent
