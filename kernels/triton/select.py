"""The best of a row of scores, by counting digits of their bits: no sort, no limit on the row's length.

Knows nothing about what is selected.
"""

import torch
import triton
import triton.language as tl

from deepinfer.kernels.triton.launch import launch

_BLOCK = 1024


@triton.jit
def _unsigned_key(values, inside):
    """float32 -> uint32 of the same order; 0 for what is never chosen: -inf, NaN, outside."""
    bits = (values + 0.0).to(tl.uint32, bitcast=True)
    key = tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)
    return tl.where(inside & (values > float("-inf")), key, 0).to(tl.uint32)


@triton.jit
def _select_kernel(values, chosen, COUNT: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    digit = tl.arange(0, 256)
    need = COUNT
    edge = tl.zeros((), tl.uint32)
    for level in tl.static_range(4):
        shift = 24 - 8 * level
        counts = tl.zeros((256,), tl.int32)
        for start in range(0, SIZE, BLOCK):
            column = start + lane
            key = _unsigned_key(
                tl.load(values + row * SIZE + column, mask=column < SIZE, other=0.0), column < SIZE
            )
            among = key > 0
            if level > 0:
                among = among & ((key >> (shift + 8)) == edge)
            counts += tl.histogram(((key >> shift) & 0xFF).to(tl.int32), 256, mask=among)
        total = tl.sum(counts, axis=0)
        if level == 0:
            need = tl.minimum(need, total)
        from_here = total - tl.cumsum(counts, axis=0) + counts
        best = tl.max(tl.where(from_here >= need, digit, 0), axis=0)
        need -= tl.sum(tl.where(digit > best, counts, 0), axis=0)
        edge = (edge << 8) | best.to(tl.uint32)
    place = row * COUNT
    found = tl.zeros((), tl.int32)
    ties = tl.zeros((), tl.int32)
    for start in range(0, SIZE, BLOCK):
        column = start + lane
        key = _unsigned_key(
            tl.load(values + row * SIZE + column, mask=column < SIZE, other=0.0), column < SIZE
        )
        tie = ((key == edge) & (key > 0)).to(tl.int32)
        rank = ties + tl.cumsum(tie, axis=0)
        kept = (key > edge) | ((tie > 0) & (rank <= need))
        number = kept.to(tl.int32)
        target = found + tl.cumsum(number, axis=0) - 1
        tl.store(chosen + place + target, column.to(tl.int64), mask=kept)
        found += tl.sum(number, axis=0)
        ties += tl.sum(tie, axis=0)
    for start in range(0, COUNT, BLOCK):
        column = start + lane
        nothing = tl.full((BLOCK,), -1, tl.int64)
        tl.store(chosen + place + column, nothing, mask=(column >= found) & (column < COUNT))


def select_best(values: torch.Tensor, chosen: torch.Tensor) -> None:
    """Write to `chosen [T, count]` int64 the columns of the best of `values [T, n]`, ascending, -1 padded.

    Ties go to the lower column; -inf and NaN are never among them.
    """
    if chosen.shape[1]:
        launch(
            _select_kernel,
            (values.shape[0],),
            *(values, chosen),
            warps=8,
            COUNT=chosen.shape[1],
            SIZE=values.shape[1],
            BLOCK=_BLOCK,
        )
