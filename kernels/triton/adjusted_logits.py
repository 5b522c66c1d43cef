"""Logits of a sampling step as they are drawn from: penalties, bans, mask, status, and the forced best.

Knows nothing about draws; `sample.py` and `verify_drafts.py` begin with it.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from deepinfer.errors import UsageError
from deepinfer.kernels.sampling import FORCED_TOP_K, Arguments
from deepinfer.kernels.triton.launch import launch
from deepinfer.kernels.triton.select import select_best

_BLOCK = 1024


class Adjusted(NamedTuple):
    """What a step's rows are drawn from."""

    logits: torch.Tensor  # [N, V] f32
    forced: torch.Tensor  # [N, K] i64, columns of the largest, ascending, -1 padded
    raw_best: torch.Tensor  # [N, L] i64 likewise, of the logits as they came; [N, 0] where nobody asks
    status: torch.Tensor  # [N] i8
    largest: torch.Tensor  # [N] f32
    greedy: torch.Tensor  # [N] i64
    raw_largest: torch.Tensor  # [N] f32
    raw_log_sum: torch.Tensor  # [N] f32


@triton.jit
def _penalize_kernel(
    logits, adjusted, penalties, offsets, ids, counts, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr
):
    """A row's history: l / r or l * r, then what generated ids lose."""
    row = tl.program_id(0).to(tl.int64)
    repetition = tl.load(penalties + row * 3)
    frequency = tl.load(penalties + row * 3 + 1)
    presence = tl.load(penalties + row * 3 + 2)
    end = tl.load(offsets + row + 1)
    for start in range(tl.load(offsets + row), end, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        listed = entry < end
        place = row * VOCABULARY + tl.load(ids + entry, mask=listed, other=0)
        count = tl.load(counts + entry, mask=listed, other=0)
        value = tl.load(logits + place, mask=listed, other=0.0)
        divisor = tl.full((BLOCK,), 0.0, tl.float32) + repetition
        value = tl.where(value > 0, tl.div_rn(value, divisor), value * repetition)
        generated = value - frequency * count.to(tl.float32) - presence
        tl.store(adjusted + place, tl.where(count > 0, generated, value), mask=listed)


@triton.jit
def _bias_kernel(adjusted, offsets, ids, bias, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(offsets + row + 1)
    for start in range(tl.load(offsets + row), end, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        listed = entry < end
        place = row * VOCABULARY + tl.load(ids + entry, mask=listed, other=0)
        value = tl.load(adjusted + place, mask=listed, other=0.0)
        tl.store(adjusted + place, value + tl.load(bias + entry, mask=listed, other=0.0), mask=listed)


@triton.jit
def _survey_kernel(
    logits,
    adjusted,
    masks,
    mask_index,
    status,
    largest,
    greedy,
    raw_largest,
    raw_log_sum,
    MASKED: tl.constexpr,
    RAW: tl.constexpr,
    VOCABULARY: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Apply the mask; the largest logits, the first id of the largest, and whether a row can be drawn."""
    row = tl.program_id(0).to(tl.int64)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    place = tl.full((BLOCK,), VOCABULARY, tl.int32)
    raw_top = tl.full((BLOCK,), float("-inf"), tl.float32)
    bad = tl.zeros((BLOCK,), tl.int32)
    which = 0
    if MASKED:
        which = tl.load(mask_index + row)
    for start in range(0, VOCABULARY, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < VOCABULARY
        raw = tl.load(logits + row * VOCABULARY + column, mask=inside, other=float("-inf"))
        value = tl.load(adjusted + row * VOCABULARY + column, mask=inside, other=float("-inf"))
        if MASKED:
            word = tl.load(masks + which * WORDS + column // 32, mask=inside & (which >= 0), other=-1)
            value = tl.where(((word >> (column % 32)) & 1) == 0, float("-inf"), value)
            tl.store(adjusted + row * VOCABULARY + column, value, mask=inside)
        bad = bad | ((raw != raw) | (raw == float("inf"))).to(tl.int32)
        bad = bad | ((value != value) | (value == float("inf"))).to(tl.int32)
        place = tl.where(value > top, column, place)
        top = tl.maximum(top, value)
        raw_top = tl.maximum(raw_top, raw)
    best = tl.max(top, axis=0)
    first = tl.min(tl.where(top == best, place, VOCABULARY), axis=0)
    broken = tl.max(bad, axis=0) > 0
    code = tl.where(broken, 1, tl.where(best == float("-inf"), 2, 0))
    tl.store(status + row, code.to(tl.int8))
    tl.store(largest + row, best)
    tl.store(greedy + row, first.to(tl.int64))
    if RAW:
        raw_best = tl.max(raw_top, axis=0)
        total = tl.zeros((BLOCK,), tl.float64)
        for start in range(0, VOCABULARY, BLOCK):
            column = start + tl.arange(0, BLOCK)
            raw = tl.load(logits + row * VOCABULARY + column, mask=column < VOCABULARY, other=float("-inf"))
            difference = raw.to(tl.float64) - raw_best.to(tl.float64)
            total += tl.where(raw == float("-inf"), 0.0, tl.exp(difference))
        tl.store(raw_largest + row, raw_best)
        tl.store(raw_log_sum + row, tl.log(tl.sum(total, axis=0)).to(tl.float32))


def adjust(op: str, a: Arguments) -> Adjusted:
    """Launch everything that comes before the filters.

    Raises UsageError where a row may keep more than 4,096 columns.
    """
    rows, vocabulary = a.logits.shape
    forced_top_k = min(a.forced_top_k or vocabulary, vocabulary)
    if forced_top_k > FORCED_TOP_K:
        raise UsageError(
            f"must lie in 1 .. {FORCED_TOP_K} on a GPU, got {a.forced_top_k}", where=f"{op}: forced_top_k"
        )
    adjusted = a.logits.clone()
    sizes = {"VOCABULARY": vocabulary, "BLOCK": _BLOCK}
    if a.penalties.numel() and a.history_offsets.numel():
        history = (a.history_offsets, a.history_ids, a.history_counts)
        launch(_penalize_kernel, (rows,), *(a.logits, adjusted, a.penalties, *history), **sizes)
    if a.bias_offsets.numel():
        launch(_bias_kernel, (rows,), *(adjusted, a.bias_offsets, a.bias_ids, a.bias), **sizes)
    largest, raw_largest, raw_log_sum = (a.logits.new_empty(rows) for _ in range(3))
    status = a.logits.new_empty(rows, dtype=torch.int8)
    greedy = a.seeds.new_empty(rows)
    launch(
        _survey_kernel,
        (rows,),
        *(a.logits, adjusted, a.masks, a.mask_index, status, largest, greedy, raw_largest, raw_log_sum),
        MASKED=a.mask_index.numel() > 0 and a.masks.numel() > 0,
        RAW=a.raw_logprobs,
        WORDS=max(1, a.masks.shape[1]),
        **sizes,
    )
    forced = greedy.new_empty((rows, forced_top_k))
    select_best(adjusted, forced)
    raw_best = greedy.new_empty((rows, max(0, a.num_logprobs) if a.raw_logprobs else 0))
    select_best(a.logits, raw_best)
    return Adjusted(adjusted, forced, raw_best, status, largest, greedy, raw_largest, raw_log_sum)
