"""Rows of the n-gram table: one program per row; see `kernels/engram_ids.py`."""

import torch
import triton
import triton.language as tl

from deepinfer.kernels.engram_ids import engram_ids_fake
from deepinfer.kernels.triton.launch import launch, power_of_two


@triton.jit
def _engram_ids_kernel(
    token_ids,
    history,
    token_map,
    multipliers,
    primes,
    offsets,
    positions,
    request_index,
    slot_ids,
    num_computed_tokens,
    ids,
    PADDING: tl.constexpr,
    VOCABULARY: tl.constexpr,
    NGRAM: tl.constexpr,
    COLUMNS: tl.constexpr,
    LENGTH: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    ENTRY_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row)
    valid = position >= 0
    line = tl.load(request_index + row, mask=valid, other=0)
    start = tl.load(num_computed_tokens + line, mask=valid, other=0)
    slot = tl.load(slot_ids + line, mask=valid, other=0)
    column = tl.arange(0, BLOCK)
    which = column // (COLUMNS // (NGRAM - 1))  # how many older tokens, less one, a column's hash covers
    value = tl.zeros((BLOCK,), tl.int64)
    running = position * 0
    for back in tl.static_range(NGRAM):
        wanted = position - back
        alive = valid & (wanted >= 0)
        in_step = alive & (wanted >= start)
        in_ring = alive & (wanted < start)
        token = tl.load(token_ids + tl.maximum(row - back, 0), mask=in_step, other=0)
        place = slot * SLOT_STRIDE + (tl.maximum(wanted, 0) % LENGTH) * ENTRY_STRIDE
        older = tl.load(history + place, mask=in_ring, other=0).to(tl.int64)
        token = tl.minimum(tl.maximum(tl.where(in_ring, older, token), 0), VOCABULARY - 1)
        compressed = tl.load(token_map + tl.where(alive, token, PADDING))
        running = running ^ (compressed * tl.load(multipliers + back))
        if back > 0:
            value = tl.where(which == back - 1, running, value)
    inside = column < COLUMNS
    prime = tl.load(primes + column, mask=inside, other=1)
    remainder = value % prime
    remainder = tl.where(remainder < 0, remainder + prime, remainder)  # the sign is that of the hash
    result = tl.where(valid, remainder + tl.load(offsets + column, mask=inside, other=0), 0)
    tl.store(ids + row * COLUMNS + column, result, mask=inside)


def engram_ids(
    token_ids: torch.Tensor,
    history: torch.Tensor,
    token_map: torch.Tensor,
    multipliers: torch.Tensor,
    primes: torch.Tensor,
    offsets: torch.Tensor,
    pad_token_id: int,
    positions: torch.Tensor,
    request_index: torch.Tensor,
    slot_ids: torch.Tensor,
    num_computed_tokens: torch.Tensor,
) -> torch.Tensor:
    """token_ids, positions, request_index [T]; history [slots, L, 1]; tables -> ids [T, columns]."""
    tables = (token_map, multipliers, primes, offsets)
    rows = (positions, request_index, slot_ids, num_computed_tokens)
    ids = engram_ids_fake(token_ids, history, *tables, pad_token_id, *rows)
    columns = primes.shape[0]
    launch(
        _engram_ids_kernel,
        (token_ids.shape[0],),
        *(token_ids, history, *tables, *rows, ids),
        warps=1,
        PADDING=pad_token_id,
        VOCABULARY=token_map.shape[0],
        NGRAM=multipliers.shape[0],
        COLUMNS=columns,
        LENGTH=history.shape[1],
        SLOT_STRIDE=history.stride(0),
        ENTRY_STRIDE=history.stride(1),
        BLOCK=power_of_two(columns),
    )
    return ids
