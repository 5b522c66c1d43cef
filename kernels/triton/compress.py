"""KV compression: projections, pool and norm, record and write, ring; see `kernels/compress.py`.

The ring is read by all rows before any row writes to it, so the writes are a kernel of their own.
"""

import torch
import triton
import triton.language as tl

from deepinfer.kernels.compress import compress_fake
from deepinfer.kernels.packing import unpack_linear
from deepinfer.kernels.triton.index_key import write_entries
from deepinfer.kernels.triton.launch import launch, power_of_two
from deepinfer.kernels.triton.linear import project
from deepinfer.kernels.triton.numbers import round_to, rounded, to_float32
from deepinfer.kernels.triton.ring_write import write_ring
from deepinfer.kernels.triton.rms_norm import inverse_rms


@triton.jit
def _member(
    parked, ring, row, position, start, offset, FIRST: tl.constexpr, LENGTH: tl.constexpr,
    ENTRY_STRIDE: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Value and gate of the group's member `offset` positions ago, columns from FIRST on of WIDTH.

    `ring` is the request's slot. A member before position 0 has no share.
    """
    earlier = position - offset
    in_step = (earlier >= 0) & ((earlier >= start) | (offset == 0))
    in_ring = (earlier >= 0) & (earlier < start) & (offset > 0)
    column = FIRST + tl.arange(0, BLOCK)
    inside = column < FIRST + SIZE
    own = parked + (row - offset) * (2 * WIDTH) + column
    other = ring + (tl.maximum(earlier, 0) % LENGTH) * ENTRY_STRIDE + column
    value = tl.load(own, mask=in_step & inside, other=0.0)
    value = tl.where(in_ring, tl.load(other, mask=in_ring & inside, other=0.0), value)
    gate = tl.load(own + WIDTH, mask=in_step & inside, other=0.0)
    gate = tl.where(in_ring, tl.load(other + WIDTH, mask=in_ring & inside, other=0.0), gate)
    return value, tl.where(earlier < 0, float("-inf"), gate)


@triton.jit
def softmax_pool(
    parked, ring, row, position, start, RATIO: tl.constexpr, OVERLAP: tl.constexpr, LENGTH: tl.constexpr,
    ENTRY_STRIDE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Pool of the RATIO positions that end with the row's, oldest first, as float32 [BLOCK].

    With OVERLAP the RATIO positions before them are members with the first half of their columns, these with
    the second.
    """
    windows: tl.constexpr = 2 if OVERLAP else 1
    width: tl.constexpr = windows * SIZE
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    for window in tl.static_range(windows):
        for step in range(RATIO):
            offset = (windows - window) * RATIO - 1 - step
            _, gate = _member(
                parked, ring, row, position, start, offset, window * SIZE, LENGTH, ENTRY_STRIDE, width, SIZE,
                BLOCK,
            )  # fmt: skip
            top = tl.maximum(top, gate)
    total = tl.zeros((BLOCK,), tl.float32)
    for window in tl.static_range(windows):
        for step in range(RATIO):
            offset = (windows - window) * RATIO - 1 - step
            _, gate = _member(
                parked, ring, row, position, start, offset, window * SIZE, LENGTH, ENTRY_STRIDE, width, SIZE,
                BLOCK,
            )  # fmt: skip
            total += tl.exp(gate - top)
    pooled = tl.zeros((BLOCK,), tl.float32)
    for window in tl.static_range(windows):
        for step in range(RATIO):
            offset = (windows - window) * RATIO - 1 - step
            value, gate = _member(
                parked, ring, row, position, start, offset, window * SIZE, LENGTH, ENTRY_STRIDE, width, SIZE,
                BLOCK,
            )  # fmt: skip
            pooled += value * tl.div_rn(tl.exp(gate - top), total)
    return pooled


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
    OVERLAP: tl.constexpr,
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
    inside = column < SIZE
    values = tl.zeros((BLOCK,), tl.float32)
    if closes:
        if RATIO == 1:
            pooled = to_float32(tl.load(parked + row * SIZE + column, mask=inside, other=0.0))
        else:
            line = tl.load(request_index + row)
            start = tl.load(num_computed_tokens + line)
            slot = ring + tl.load(slot_ids + line) * SLOT_STRIDE
            pooled = softmax_pool(
                parked, slot, row, position, start, RATIO, OVERLAP, LENGTH, ENTRY_STRIDE, SIZE, BLOCK
            )
            pooled = tl.where(inside, rounded(pooled, latent.dtype.element_ty), 0.0)
        factor = to_float32(tl.load(norm_weight + column, mask=inside, other=0.0))
        values = factor * (pooled * inverse_rms(pooled, SIZE, eps))
    tl.store(latent + row * SIZE + column, round_to(values, latent.dtype.element_ty), mask=inside)


def pool_norm(
    parked: torch.Tensor,
    open_group: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    latent: torch.Tensor,
    rows_of_requests: tuple[torch.Tensor, ...],
    ratio: int,
    overlap: bool,
) -> None:
    """Write the pools `latent [T, d]`, normed; parked holds the step's values, then gates.

    `rows_of_requests`: positions, request_index [T], slot_ids, num_computed_tokens [R].
    """
    rows, size = latent.shape
    launch(
        _pool_norm_kernel,
        (rows,),
        *(parked, open_group, norm_weight, eps, latent, *rows_of_requests),
        warps=8,
        RATIO=ratio,
        OVERLAP=overlap,
        LENGTH=max(1, open_group.shape[1]),
        SLOT_STRIDE=open_group.stride(0),
        ENTRY_STRIDE=open_group.stride(1),
        SIZE=size,
        BLOCK=power_of_two(size),
    )


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
    rows_of_requests = (positions, request_index, slot_ids, num_computed_tokens)
    pool_norm(parked, open_group, norm_weight, eps, latent, rows_of_requests, ratio, False)
    if ratio > 1:
        write_ring(open_group, parked, positions, request_index, *requests)
    write_entries(latent, table, region, *paged, ratio, "e4m3" if quantize else "plain")
    return latent
