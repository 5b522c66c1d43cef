"""Sampling by plain lists, in float64 and integers: what the parameters of a request mean, without an array.

`choose` repeats the rules, not the code, of the sampler: penalties, bias, bans, allowed ids, temperature,
top-k, top-p, min-p, a draw in integers, log-probabilities. What float32 may decide otherwise is marked.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from deepinfer.kernels import philox
from deepinfer.runtime.sampling_params import SamplingParams

UNIT = 2**31
NEAR = 4096  # units of mass: float32 is within a few hundred of them


class Choice(NamedTuple):
    """What a row gives."""

    token: int | None  # None: nothing is allowed
    kept: list[int]  # ids that can be drawn, by falling logit and rising id
    logprobs: dict[int, float]  # of what is kept, or raw: of all
    adjusted: list[float]  # logits after penalties, bias and bans
    close: bool  # whether float32 may come to another result


def adjust(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    end_ids: Sequence[int],
) -> list[float]:
    """Penalties, bias, bans and allowed ids."""
    values = list(logits)
    for token in set(prompt) | set(output):
        factor = params.repetition_penalty
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
    for token in set(output):
        values[token] -= params.frequency_penalty * list(output).count(token) + params.presence_penalty
    for token, bias in params.logit_bias:
        values[token] += bias
    banned = set()
    if len(output) < params.min_tokens:
        banned |= {*end_ids, *params.stop_token_ids}
    for *before, last in params.bad_words:
        if list(output)[len(output) - len(before) :] == before and len(before) <= len(output):
            banned.add(last)
    if params.allowed_token_ids is not None:
        banned |= set(range(len(values))) - set(params.allowed_token_ids)
    return [-math.inf if token in banned else value for token, value in enumerate(values)]


def choose(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    end_ids: Sequence[int],
    seed: int,
) -> Choice:
    """The token that follows `output`, and what is said about it."""
    values = adjust(logits, params, prompt, output, end_ids)
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    kept = [token for token in order if values[token] > -math.inf]
    if not kept:
        return Choice(None, [], {}, values, close=False)
    top, heat, close = values[kept[0]], params.temperature or 1.0, False
    weight = {token: math.exp((values[token] - top) / heat) for token in kept}
    if params.temperature:
        if params.top_k:
            edge = values[kept[min(params.top_k, len(kept)) - 1]]
            kept = [token for token in kept if values[token] >= edge]
        before = list(kept)
        if params.top_p < 1:
            kept, close = _top_p(before, _masses(before, weight), params.top_p)
        kept = [token for token in kept if weight[token] >= params.min_p]
        close |= any(abs(weight[token] - params.min_p) < 1e-6 and values[token] != top for token in before)
    ids = sorted(kept)
    masses = _masses(ids, weight)
    token = order[0]
    if params.temperature:
        position = len(prompt) + len(output)
        word = int(philox.random_word(seed, philox.stream(position, philox.FRESH)))
        running = [sum(masses[: count + 1]) for count in range(len(masses))]
        target = word * running[-1] // 2**32
        token = next(token for token, edge in zip(ids, running, strict=True) if edge > target)
        close |= any(abs(edge - target) < NEAR for edge in running[:-1])
    if params.logprobs_mode == "raw":
        raw_total = math.log(sum(math.exp(value - max(logits)) for value in logits))
        logprobs = {token: value - max(logits) - raw_total for token, value in enumerate(logits)}
    else:
        total = math.log(sum(weight[token] for token in kept))
        logprobs = {token: (values[token] - top) / heat - total for token in kept}
    return Choice(token, kept, logprobs, values, close)


def _masses(ids: Sequence[int], weight: dict[int, float]) -> list[int]:
    total = sum(weight[token] for token in ids)
    return [math.floor(weight[token] / total * UNIT) for token in ids]


def _top_p(ids: list[int], masses: list[int], top_p: float) -> tuple[list[int], bool]:
    """What reaches the mass at which the sum from the top meets top_p; whether the meeting is close."""
    wanted = math.ceil(top_p * sum(masses))
    levels = sorted(set(masses), reverse=True)
    reached = [sum(mass for mass in masses if mass >= level) for level in levels]
    edge = next(level for level, sum_ in zip(levels, reached, strict=True) if sum_ >= wanted)
    close = any(abs(sum_ - wanted) < NEAR for sum_ in reached)
    return [token for token, mass in zip(ids, masses, strict=True) if mass >= edge], close
