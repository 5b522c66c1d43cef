"""Sampling: adjust, find the forced best, filter and draw, list log-probabilities; see `kernels/sample.py`.

After the forced top-k a row has at most 4,096 columns, which one program holds; edges of top-k and top-p are
found by building them bit by bit, so nothing is sorted. Masses are integers, whose sums have no order.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from deepinfer.errors import UsageError
from deepinfer.kernels.sample import Outputs, sample_fake
from deepinfer.kernels.sampling import FORCED_TOP_K, MIN_TEMPERATURE, Arguments
from deepinfer.kernels.triton.launch import launch, power_of_two
from deepinfer.kernels.triton.select import select_best

_BLOCK = 1024
_FRESH = 0  # the stream of an ordinary draw, `kernels/philox.py`


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


@triton.jit
def _random_word(seed, position, CASE: tl.constexpr):
    """Word 0 of Philox4x32-10: the seed is the key, the stream 3 * position + CASE the counter."""
    stream = position.to(tl.uint64) * 3 + CASE
    counter0 = stream & 0xFFFFFFFF
    counter1 = stream >> 32
    counter2 = stream * 0
    counter3 = stream * 0
    key0 = seed.to(tl.uint64) & 0xFFFFFFFF
    key1 = seed.to(tl.uint64) >> 32
    for _ in range(10):
        product0 = counter0 * 0xD2511F53
        product1 = counter2 * 0xCD9E8D57
        counter0 = (product1 >> 32) ^ counter1 ^ key0
        counter1 = product1 & 0xFFFFFFFF
        counter2 = (product0 >> 32) ^ counter3 ^ key1
        counter3 = product0 & 0xFFFFFFFF
        key0 = (key0 + 0x9E3779B9) & 0xFFFFFFFF
        key1 = (key1 + 0xBB67AE85) & 0xFFFFFFFF
    return counter0


@triton.jit
def _weigh(scaled, kept):
    """Exponentials, their masses out of 2^31 and the logarithm of their sum; nothing for what is not kept."""
    exponential = tl.where(kept, tl.exp(scaled), 0.0)
    total = tl.sum(exponential, axis=0)
    share = tl.div_rn(exponential, tl.full(exponential.shape, 0.0, tl.float32) + total)
    return exponential, (share * 2147483648.0).to(tl.int64), tl.log(total)


@triton.jit
def _list_best(ids, logits, kept, place, largest, factor, log_sum, listed, values, COUNT: tl.constexpr):
    """Write the COUNT best of the kept columns and their log-probabilities behind `place`."""
    lane = tl.arange(0, ids.shape[0])
    for step in range(COUNT):
        best = tl.max(tl.where(kept, logits, float("-inf")), axis=0)
        first = tl.min(tl.where(kept & (logits == best), lane, ids.shape[0]), axis=0)
        found = first < ids.shape[0]
        chosen = tl.sum(tl.where(lane == first, ids, 0), axis=0)
        value = (best - largest) * factor - log_sum
        tl.store(listed + place + step, tl.where(found, chosen, -1))
        tl.store(values + place + step, tl.where(found, value, float("-inf")))
        kept = kept & (lane != first)


@triton.jit
def _draw_kernel(
    logits,
    adjusted,
    forced,
    raw_best,
    seeds,
    positions,
    temperatures,
    top_k,
    top_p,
    min_p,
    status,
    largest,
    greedy,
    raw_largest,
    raw_log_sum,
    token_ids,
    listed,
    values,
    LEAST: tl.constexpr,
    CASE: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    RAW: tl.constexpr,
    COUNT: tl.constexpr,
    FORCED: tl.constexpr,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_RAW: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    drawable = tl.load(status + row) == 0
    lane = tl.arange(0, BLOCK)
    ids = tl.load(forced + row * FORCED + lane, mask=lane < FORCED, other=-1)
    kept = ids >= 0
    value = tl.load(adjusted + row * VOCABULARY + ids, mask=kept, other=float("-inf"))
    top = tl.where(drawable, tl.load(largest + row), 0.0)
    temperature = tl.load(temperatures + row)
    drawn = temperature > 0
    inverse = 1.0 / tl.where(drawn, tl.where(temperature > LEAST, temperature, LEAST), 1.0)
    factor = tl.maximum(inverse.to(tl.float32), 1.1754943508222875e-38)  # -inf times 0 is no number
    scaled = tl.where(kept, (value - top) * factor, float("-inf"))
    if HAS_TOP_K:
        wanted_count = tl.load(top_k + row)
        bits = (value + 0.0).to(tl.uint32, bitcast=True)
        key = tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits ^ 0x80000000).to(tl.int64)
        key = tl.where(kept, key, 0)
        edge = wanted_count * 0
        for step in range(32):
            trial = edge + (tl.full((), 1, tl.int64) << (31 - step))
            reach = tl.sum((key >= trial).to(tl.int64), axis=0)
            edge = tl.where(reach >= wanted_count, trial, edge)
        limited = drawn & (wanted_count > 0) & (wanted_count < tl.sum(kept.to(tl.int64), axis=0))
        kept = kept & (key >= tl.where(limited, edge, 0))
    exponential, mass, _ = _weigh(scaled, kept)
    reaches = kept
    if HAS_TOP_P:
        share = tl.load(top_p + row)
        wanted = tl.ceil(share * tl.sum(mass, axis=0).to(tl.float64))
        wanted = tl.where(wanted < 1.0, 1.0, wanted).to(tl.int64)
        edge = wanted * 0
        for step in range(32):
            trial = edge + (tl.full((), 1, tl.int64) << (31 - step))
            reach = tl.sum(tl.where(kept & (mass >= trial), mass, 0), axis=0)
            edge = tl.where(reach >= wanted, trial, edge)
        reaches = reaches & (mass >= tl.where(share >= 1.0, 0, edge))
    if HAS_MIN_P:
        reaches = reaches & (exponential >= tl.load(min_p + row).to(tl.float32))
    kept = kept & (tl.where(drawn, reaches.to(tl.int32), 1) > 0)
    _, mass, log_sum = _weigh(scaled, kept)
    running = tl.cumsum(mass, axis=0)
    word = _random_word(tl.load(seeds + row), tl.load(positions + row), CASE)
    target = ((word * tl.sum(mass, axis=0).to(tl.uint64)) >> 32).to(tl.int64)
    chosen = tl.min(tl.where(kept & (running > target), lane, BLOCK - 1), axis=0)
    token = tl.sum(tl.where(lane == chosen, ids, 0), axis=0)
    token = tl.where(drawn, token, tl.load(greedy + row))
    token = tl.where(drawable, token, -1)
    tl.store(token_ids + row, token)
    if COUNT >= 0:
        place = row * (1 + COUNT)
        if RAW:
            top = tl.load(raw_largest + row)
            log_sum = tl.load(raw_log_sum + row)
            factor = 1.0
            own = tl.load(logits + row * VOCABULARY + token, mask=drawable, other=0.0)
        else:
            own = tl.load(adjusted + row * VOCABULARY + token, mask=drawable, other=0.0)
        tl.store(listed + place, token)
        tl.store(values + place, tl.where(drawable, (own - top) * factor - log_sum, float("-inf")))
        if RAW:
            lane_raw = tl.arange(0, BLOCK_RAW)
            best_ids = tl.load(raw_best + row * COUNT + lane_raw, mask=lane_raw < COUNT, other=-1)
            known = drawable & (best_ids >= 0)
            best_logits = tl.load(logits + row * VOCABULARY + best_ids, mask=known, other=float("-inf"))
            _list_best(best_ids, best_logits, known, place + 1, top, factor, log_sum, listed, values, COUNT)
        else:
            _list_best(ids, value, kept & drawable, place + 1, top, factor, log_sum, listed, values, COUNT)


def sample(*arguments: Any) -> Outputs:
    """`sampling.Arguments` in order -> token_ids, status [N], logprob_ids, logprobs [N, 1 + num_logprobs].

    Raises UsageError where a row may keep more than 4,096 columns.
    """
    a = Arguments(*arguments)
    outputs = sample_fake(*arguments)
    token_ids, status, listed, values = outputs
    rows, vocabulary = a.logits.shape
    forced_top_k = min(a.forced_top_k or vocabulary, vocabulary)
    if forced_top_k > FORCED_TOP_K:
        raise UsageError(
            f"must lie in 1 .. {FORCED_TOP_K} on a GPU, got {a.forced_top_k}", where="sample: forced_top_k"
        )
    adjusted = a.logits.clone()
    sizes = {"VOCABULARY": vocabulary, "BLOCK": _BLOCK}
    if a.penalties.numel() and a.history_offsets.numel():
        history = (a.history_offsets, a.history_ids, a.history_counts)
        launch(_penalize_kernel, (rows,), *(a.logits, adjusted, a.penalties, *history), **sizes)
    if a.bias_offsets.numel():
        launch(_bias_kernel, (rows,), *(adjusted, a.bias_offsets, a.bias_ids, a.bias), **sizes)
    largest, raw_largest, raw_log_sum = (a.logits.new_empty(rows) for _ in range(3))
    greedy = torch.empty_like(token_ids)
    launch(
        _survey_kernel,
        (rows,),
        *(a.logits, adjusted, a.masks, a.mask_index, status, largest, greedy, raw_largest, raw_log_sum),
        MASKED=a.mask_index.numel() > 0 and a.masks.numel() > 0,
        RAW=a.raw_logprobs,
        WORDS=max(1, a.masks.shape[1]),
        **sizes,
    )
    forced = token_ids.new_empty((rows, forced_top_k))
    select_best(adjusted, forced)
    raw_best = token_ids.new_empty((rows, max(0, a.num_logprobs) if a.raw_logprobs else 0))
    select_best(a.logits, raw_best)
    launch(
        _draw_kernel,
        (rows,),
        *(a.logits, adjusted, forced, raw_best, a.seeds, a.positions, a.temperatures),
        *(a.top_k, a.top_p, a.min_p, status, largest, greedy, raw_largest, raw_log_sum),
        *(token_ids, listed, values),
        warps=8,
        LEAST=MIN_TEMPERATURE,
        CASE=_FRESH,
        HAS_TOP_K=a.top_k.numel() > 0,
        HAS_TOP_P=a.top_p.numel() > 0,
        HAS_MIN_P=a.min_p.numel() > 0,
        RAW=a.raw_logprobs,
        COUNT=a.num_logprobs,
        FORCED=forced_top_k,
        VOCABULARY=vocabulary,
        BLOCK=power_of_two(forced_top_k),
        BLOCK_RAW=power_of_two(max(1, a.num_logprobs)),
    )
    return outputs
