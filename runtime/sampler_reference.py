"""Sampling by plain lists: every rule of `kernels/sampling.py` again, with Python's own numbers and no array.

The second opinion on the compiled sampler, behind the same interface; slow, and short enough to be read as
the definition. Every operation on a logit is rounded to float32, as the order of operations is part of the
definition; exp and log are Python's, rounded to float32, so that masses may differ from the compiled ones in
their last units and log-probabilities by a few units of 2^-22. Nothing else may differ.
"""

import math
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from deepinfer.runtime.outputs import Logprob, Logprobs
from deepinfer.runtime.sampler_interface import (
    LOWEST_LOGPROB,
    NO_TOKEN,
    NOT_A_NUMBER,
    NOTHING_ALLOWED,
    OK,
    Sampled,
    States,
)
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.sampling_state import SamplingState

FORCED_TOP_K: Final = 4096
_MASS = 2**31
_MIN_LEAVES = 64
_SMALLEST_FACTOR = 2.0**-126
_FLOAT32 = struct.Struct("<f")


class ReferenceSampler:
    """The `Sampler` that is read rather than run."""

    name = "reference"

    def __init__(self, forced_top_k: int = FORCED_TOP_K) -> None:
        """forced_top_k: the most columns that are looked at; 0 is all."""
        self._forced_top_k = forced_top_k

    def sample(
        self,
        logits: Any,
        params: Sequence[SamplingParams],
        positions: Sequence[int],
        seeds: Sequence[int],
        states: States = (),
    ) -> Sampled:
        """See `Sampler.sample`. logits: a tensor, an array or lists of floats."""
        table: list[list[float]] = logits if isinstance(logits, list) else logits.tolist()
        assert len(table) == len(params) == len(positions) == len(seeds), "one entry per row"
        every_state = states or [None] * len(table)
        token_ids, status, logprobs = [], [], []
        for row, own, position, seed, state in zip(table, params, positions, seeds, every_state, strict=True):
            token, code, entries = self._row(row, own, position, seed, state)
            token_ids.append(token)
            status.append(code)
            logprobs.append(entries)
        asked = any(own.logprobs is not None for own in params)
        return Sampled(token_ids, status, logprobs if asked else ())

    def _row(
        self,
        raw: list[float],
        params: SamplingParams,
        position: int,
        seed: int,
        state: SamplingState | None,
    ) -> tuple[int, int, Logprobs | None]:
        logits = adjusted(raw, params, state)
        if any(value != value or value == math.inf for value in (*raw, *logits)):
            return NO_TOKEN, NOT_A_NUMBER, None
        order = by_logit(logits)[: self._forced_top_k or None]
        if not order:
            return NO_TOKEN, NOTHING_ALLOWED, None
        found = distribution(logits, order, params)
        token = order[0] if params.greedy else drawn(found, random_word(seed, 3 * position))
        if params.logprobs is None:
            return token, OK, None
        return token, OK, _logprobs(raw, logits, found, token, params)


def f32(value: float) -> float:
    """The nearest float32 (of two equally near the even one); beyond its range an infinity."""
    try:
        rounded: float = _FLOAT32.unpack(_FLOAT32.pack(value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return rounded


def adjusted(raw: Sequence[float], params: SamplingParams, state: SamplingState | None) -> list[float]:
    """Penalties, then bias and bans, then the ids that are allowed."""
    logits = list(raw)
    if state is None:
        return logits
    if params.penalises:
        repetition = f32(params.repetition_penalty)
        frequency, presence = f32(params.frequency_penalty), f32(params.presence_penalty)
        for token, count in zip(state.history_ids.tolist(), state.history_counts.tolist(), strict=True):
            value = logits[token]
            value = f32(value / repetition) if value > 0 else f32(value * repetition)
            if count:
                value = f32(f32(value - f32(frequency * count)) - presence)
            logits[token] = value
    for token, bias in zip(state.bias_ids.tolist(), state.bias.tolist(), strict=True):
        logits[token] = f32(logits[token] + bias)
    if params.allowed_token_ids is not None:
        allowed = set(params.allowed_token_ids)
        logits = [value if token in allowed else -math.inf for token, value in enumerate(logits)]
    return logits


def by_logit(logits: Sequence[float]) -> list[int]:
    """Ids of what is above -inf: the largest logit first, among equal ones the lower id."""
    finite = [token for token, value in enumerate(logits) if value > -math.inf]
    return sorted(finite, key=lambda token: (-logits[token], token))


class Distribution(NamedTuple):
    """What a row is drawn from, and the numbers that its log-probabilities need."""

    ids: list[int]  # kept, rising
    masses: list[int]  # theirs
    largest: float
    factor: float
    log_sum: float


def distribution(logits: Sequence[float], order: Sequence[int], params: SamplingParams) -> Distribution:
    """Temperature, top-k, top-p, min-p over the ids of `order`; a greedy row has none of them."""
    largest = logits[order[0]]
    factor = 1.0 if params.greedy else max(f32(1.0 / params.temperature), _SMALLEST_FACTOR)
    ids = list(order)
    if not params.greedy and 0 < params.top_k < len(ids):
        edge = logits[ids[params.top_k - 1]]
        ids = [token for token in ids if logits[token] >= edge]
    ids.sort()
    weights, masses, log_sum = weighed([logits[token] for token in ids], largest, factor)
    if not params.greedy:
        edge_mass = top_p_edge(masses, params.top_p) if params.top_p < 1 else 0
        least = f32(params.min_p)
        ids = [
            token
            for token, weight, mass in zip(ids, weights, masses, strict=True)
            if mass >= edge_mass and weight >= least
        ]
        _, masses, log_sum = weighed([logits[token] for token in ids], largest, factor)
    return Distribution(ids, masses, largest, factor, log_sum)


def weighed(logits: Sequence[float], largest: float, factor: float) -> tuple[list[float], list[int], float]:
    """exp((l - largest) * factor), their shares of 2^31 rounded down, and the logarithm of their sum."""
    weights = [f32(math.exp(f32(f32(value - largest) * factor))) for value in logits]
    total = tree_sum(weights)
    return weights, [int(f32(weight / total) * _MASS) for weight in weights], f32(math.log(total))


def tree_sum(values: Sequence[float]) -> float:
    """Neighbours added again and again, over the next power of two of places, at least 64."""
    width = max(_MIN_LEAVES, 1 << (len(values) - 1).bit_length())
    level = [*values, *[0.0] * (width - len(values))]
    while len(level) > 1:
        level = [f32(left + right) for left, right in zip(level[::2], level[1::2], strict=True)]
    return level[0]


def top_p_edge(masses: Sequence[int], top_p: float) -> int:
    """The largest mass v such that all masses of at least v sum to ceil(top_p * total) or more."""
    wanted = max(1, math.ceil(top_p * sum(masses)))
    levels = sorted(set(masses), reverse=True)
    return next(level for level in levels if sum(mass for mass in masses if mass >= level) >= wanted)


def drawn(found: Distribution, word: int) -> int:
    """The first id whose running sum of masses exceeds word * total / 2^32."""
    target = word * sum(found.masses) >> 32
    running = 0
    for token, mass in zip(found.ids, found.masses, strict=True):
        running += mass
        if running > target:
            return token
    raise AssertionError("the target is below the total")


def random_word(seed: int, stream: int) -> int:
    """Word 0 of Philox4x32-10 with the seed as key and the stream as counter (spec engine B.5)."""
    low = 2**32 - 1
    a, b, c, d = stream & low, stream >> 32, 0, 0
    key, other_key = seed & low, seed >> 32
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (second >> 32) ^ b ^ key, second & low, (first >> 32) ^ d ^ other_key, first & low
        key, other_key = (key + 0x9E3779B9) & low, (other_key + 0xBB67AE85) & low
    return a


def _logprobs(
    raw: Sequence[float],
    logits: Sequence[float],
    found: Distribution,
    token: int,
    params: SamplingParams,
) -> Logprobs:
    """The token, then the best; what has no finite value is left out."""
    assert params.logprobs is not None
    if params.logprobs_mode == "raw":
        source, largest, factor = raw, max(raw), 1.0
        log_sum = f32(math.log(math.fsum(math.exp(value - largest) for value in raw)))
        order = by_logit(raw)
        listed = order
    else:
        source, largest, factor, log_sum = logits, found.largest, found.factor, found.log_sum
        order = by_logit(logits)
        kept = set(found.ids)
        listed = [other for other in order if other in kept]
    value_of = lambda other: f32(f32(f32(source[other] - largest) * factor) - log_sum)  # noqa: E731
    # A token that was drawn from other logits may be -inf in the raw ones: then no id above -inf outranks it.
    rank = order.index(token) + 1 if token in order else len(order) + _before(source, token) + 1
    entries = {token: Logprob(max(value_of(token), LOWEST_LOGPROB), rank)}
    for place, other in enumerate(listed[: params.logprobs], start=1):
        if other != token and math.isfinite(value_of(other)):
            entries[other] = Logprob(value_of(other), place)
    return entries


def _before(logits: Sequence[float], token: int) -> int:
    """How many lower ids have the same value."""
    return sum(value == logits[token] for value in logits[:token])
