"""Parts of kernels that draw: the random word, the filtered distribution of a row, its log-probabilities.

After the forced top-k a row has at most 4,096 columns, which one program holds; edges of top-k and top-p are
found by building them bit by bit, so nothing is sorted. Masses are integers, whose sums have no order.
"""

import triton
import triton.language as tl

from deepinfer.kernels import philox
from deepinfer.kernels.sampling import MIN_TEMPERATURE

_ROW_STRIDE = tl.constexpr(philox.ROW_STRIDE)
_LEAST = tl.constexpr(MIN_TEMPERATURE)


@triton.jit
def random_word(seed, position, step_row, CASE: tl.constexpr):
    """Word 0 of Philox4x32-10: the seed is the key, the stream the counter; see `kernels/philox.py`."""
    stream = (position + step_row * _ROW_STRIDE).to(tl.uint64) * 3 + CASE
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
def weigh(scaled, kept):
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
def row_distribution(
    row, adjusted, forced, temperatures, top_k, top_p, min_p, largest, drawable,
    HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, HAS_MIN_P: tl.constexpr, FORCED: tl.constexpr,
    VOCABULARY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Columns of the forced best with their logits, which are kept, their masses, and the scaling of a row.

    Returns ids, logits, kept, masses [BLOCK], then largest logit, factor, logarithm of the sum, whether the
    row is drawn (else it is greedy).
    """
    lane = tl.arange(0, BLOCK)
    ids = tl.load(forced + row * FORCED + lane, mask=lane < FORCED, other=-1)
    kept = ids >= 0
    value = tl.load(adjusted + row * VOCABULARY + ids, mask=kept, other=float("-inf"))
    top = tl.where(drawable, tl.load(largest + row), 0.0)
    temperature = tl.load(temperatures + row)
    drawn = temperature > 0
    inverse = 1.0 / tl.where(drawn, tl.where(temperature > _LEAST, temperature, _LEAST), 1.0)
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
    exponential, mass, _ = weigh(scaled, kept)
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
    _, mass, log_sum = weigh(scaled, kept)
    return ids, value, kept, mass, top, factor, log_sum, drawn


@triton.jit
def pick(ids, kept, mass, word):
    """The column whose running sum of masses first exceeds the word's share of the whole."""
    lane = tl.arange(0, ids.shape[0])
    running = tl.cumsum(mass, axis=0)
    target = ((word * tl.sum(mass, axis=0).to(tl.uint64)) >> 32).to(tl.int64)
    chosen = tl.min(tl.where(kept & (running > target), lane, ids.shape[0] - 1), axis=0)
    return tl.sum(tl.where(lane == chosen, ids, 0), axis=0)


@triton.jit
def list_logprobs(
    row, token, drawable, logits, adjusted, raw_best, raw_largest, raw_log_sum, ids, value, kept, top, factor,
    log_sum, listed, values, RAW: tl.constexpr, COUNT: tl.constexpr, VOCABULARY: tl.constexpr,
    BLOCK_RAW: tl.constexpr,
):  # fmt: skip
    """Write a row of log-probabilities: the token's, then the COUNT best; -1 and -inf if not drawable."""
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
