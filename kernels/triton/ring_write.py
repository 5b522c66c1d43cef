"""Rings of last positions: one program per row; see `kernels/ring_write.py`."""

import torch
import triton
import triton.language as tl

from deepinfer.kernels.ring_write import ring_write_fake
from deepinfer.kernels.triton.launch import launch, power_of_two


@triton.jit
def _ring_write_kernel(
    ring,
    values,
    positions,
    request_index,
    slot_ids,
    num_computed_tokens,
    row_counts,
    LENGTH: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    ENTRY_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row)
    valid = position >= 0
    line = tl.load(request_index + row, mask=valid, other=0)
    end = tl.load(num_computed_tokens + line, mask=valid, other=0)
    end += tl.load(row_counts + line, mask=valid, other=0)
    kept = valid & (position >= end - LENGTH)
    slot = tl.load(slot_ids + line, mask=kept, other=0)
    column = tl.arange(0, BLOCK)
    stored = kept & (column < WIDTH)
    value = tl.load(values + row * WIDTH + column, mask=stored, other=0)
    entry = ring + slot * SLOT_STRIDE + (position % LENGTH) * ENTRY_STRIDE
    tl.store(entry + column, value.to(ring.dtype.element_ty), mask=stored)


def write_ring(
    ring: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    request_index: torch.Tensor,
    slot_ids: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    row_counts: torch.Tensor,
) -> None:
    """The launch; arguments as `ring_write`, already checked."""
    width = ring.shape[2]
    if not slot_ids.shape[0] or not width:  # no request: all rows are padding
        return
    launch(
        _ring_write_kernel,
        (values.shape[0],),
        *(ring, values, positions, request_index, slot_ids, num_computed_tokens, row_counts),
        LENGTH=ring.shape[1],
        WIDTH=width,
        SLOT_STRIDE=ring.stride(0),
        ENTRY_STRIDE=ring.stride(1),
        BLOCK=power_of_two(width),
    )


def ring_write(
    ring: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    request_index: torch.Tensor,
    slot_ids: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    row_counts: torch.Tensor,
) -> None:
    """ring [slots, L, width], mutated; values [T, width]; positions, request_index [T]; the rest [R]."""
    requests = (slot_ids, num_computed_tokens, row_counts)
    ring_write_fake(ring, values, positions, request_index, *requests)
    write_ring(ring, values, positions, request_index, *requests)
