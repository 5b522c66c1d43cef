"""What is drawn follows what parameters say, filter by filter; seeds and positions never share a stream."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from deepinfer.kernels import philox
from deepinfer.runtime.sampler import CompiledSampler
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.sampling_state import make_state

DRAWS = 40_000
LOGITS = (2.0, 1.0, 0.5, -1.0, 0.0, 1.5, -2.0, 0.25)
PROMPT, OUTPUT = (1, 3), (0, 0, 5)
# Upper 0.1 % points of chi-square by degrees of freedom. Draws are fixed: a test passes always or never.
BOUND = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46, 7: 24.32}


def softmax(values: Sequence[float], temperature: float = 1.0) -> np.ndarray:
    weights = np.exp((np.array(values) - max(values)) / temperature)
    return weights / weights.sum()


def only(kept: Sequence[int], values: Sequence[float] = LOGITS, temperature: float = 1.0) -> np.ndarray:
    """The softmax over some ids, zero elsewhere."""
    return softmax([value if i in kept else -math.inf for i, value in enumerate(values)], temperature)


def shifted(changes: dict[int, float]) -> list[float]:
    return [value + changes.get(token, 0.0) for token, value in enumerate(LOGITS)]


# Falling order of the logits: 0, 5, 1, 2, 7, 4, 3, 6. Every expectation is worked out by hand from them.
CASES: dict[str, tuple[dict, np.ndarray]] = {
    "temperature 0.6": ({"temperature": 0.6}, softmax(LOGITS, 0.6)),
    "temperature 3": ({"temperature": 3.0}, softmax(LOGITS, 3.0)),
    "top_k 3": ({"top_k": 3}, only([0, 5, 1])),
    "top_p 0.75": ({"top_p": 0.75}, only([0, 5, 1])),  # .400 + .243 = .643, with .147 it is .790
    "min_p 0.3": ({"min_p": 0.3}, only([0, 5, 1])),  # e^-1 = .368, e^-1.5 = .223
    "top_k 5, top_p 0.9": (
        {"top_k": 5, "top_p": 0.9},
        only([0, 5, 1, 2]),
    ),  # .844 of .914 with 1; .933 with 2
    "temperature before min_p": ({"temperature": 2.0, "min_p": 0.3}, only([0, 5, 1, 2, 7, 4], LOGITS, 2.0)),
    "repetition": ({"repetition_penalty": 2.0}, softmax([1.0, 0.5, 0.5, -2.0, 0.0, 0.75, -2.0, 0.25])),
    "presence": ({"presence_penalty": 1.0}, softmax(shifted({0: -1.0, 5: -1.0}))),
    "frequency": ({"frequency_penalty": 0.5}, softmax(shifted({0: -1.0, 5: -0.5}))),
    "logit_bias": ({"logit_bias": {6: 3.5, 0: -1.0}}, softmax(shifted({6: 3.5, 0: -1.0}))),
    "allowed ids": ({"allowed_token_ids": [3, 4, 6]}, only([3, 4, 6])),
    "bad word": ({"bad_words": [[5, 0], [2]]}, only([1, 3, 4, 5, 6, 7])),
    "bias before top_k": (
        {"logit_bias": {6: 5.0}, "top_k": 2},
        only([0, 6], shifted({6: 5.0})),
    ),  # POL-12: after top_k, 6 would not be there
}


def counts_of(options: dict) -> np.ndarray:
    params = SamplingParams(**options)
    state = make_state(params, PROMPT, (), len(LOGITS))
    if state is not None:
        state.advance(OUTPUT)
    logits = torch.tensor([LOGITS]).repeat(DRAWS, 1)
    drawn = (
        CompiledSampler()
        .sample(logits, [params] * DRAWS, range(DRAWS), [2024] * DRAWS, [state] * DRAWS)
        .token_ids
    )
    return np.bincount(drawn, minlength=len(LOGITS))


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Infinite if anything was drawn that cannot be."""
    possible = expected > 0
    if counts[~possible].any():
        return math.inf
    want = expected[possible] * counts.sum()
    return float(((counts[possible] - want) ** 2 / want).sum())


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_distribution_of_each_filter(name: str) -> None:
    """POL-05 to POL-09, POL-12, POL-14; the twin shows that a draw without the option would be noticed."""
    options, expected = CASES[name]
    counts = counts_of(options)
    assert chi_square(counts, expected) < BOUND[np.count_nonzero(expected) - 1]
    assert chi_square(counts_of({}), expected) > 200


def test_draws_do_not_follow_a_slightly_wrong_distribution() -> None:
    """40,000 draws tell a temperature of 1 from 0.94."""
    counts = counts_of({})
    assert chi_square(counts, softmax(LOGITS)) < BOUND[7] < 40 < chi_square(counts, softmax(LOGITS, 0.94))


def test_neighbouring_seeds_agree_no_more_often_than_chance() -> None:
    """RNG-03: seed s at step t + 1 and seed s + 1 at step t, 6,169 pairs: equal streams would all agree."""
    logits, seeds, steps = torch.tensor([[2.0, 1.0, 0.5, 0.1]]), 200, 32
    params = [SamplingParams()] * (seeds * steps)
    result = CompiledSampler().sample(
        logits.repeat(seeds * steps, 1),
        params,
        [17 + step for _ in range(seeds) for step in range(steps)],
        [seed for seed in range(1, seeds + 1) for _ in range(steps)],
    )
    drawn = np.array(result.token_ids).reshape(seeds, steps)
    agreement = (drawn[:-1, 1:] == drawn[1:, :-1]).mean()
    chance = float((softmax(logits[0].tolist()) ** 2).sum())
    assert drawn[:-1, 1:].size == 6169 and chance == pytest.approx(0.3986, abs=1e-4)
    assert abs(agreement - chance) < 0.025  # four standard errors


def test_seeds_and_steps_are_3200_streams_where_their_sum_would_be_131() -> None:
    """RNG-02, LAB-13."""
    seeds, steps = np.meshgrid(np.arange(1, 101), np.arange(32), indexing="ij")
    words = philox.philox4x32(
        (philox.stream(steps, philox.FRESH), 0, 0, 0), (seeds.astype(np.uint64), np.uint64(0))
    )
    assert len(np.unique(np.stack([word.ravel() for word in words]), axis=1).T) == 3200
    assert len(np.unique(seeds + steps)) == 131


def test_different_seeds_share_no_block_of_words() -> None:
    """Of 262,144 blocks of 128 bits no two are equal; 32-bit words repeat as often as chance has it."""
    seeds = np.array([0, 1, 2, 3, 5, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**63, 2**64 - 1], np.uint64)
    seeds = np.concatenate((seeds, np.random.default_rng(1).integers(0, 2**64, 53, dtype=np.uint64)))[:, None]
    streams = philox.stream(np.arange(1024), 0)[None, :].repeat(4, 0)
    streams[1:] += np.array([[1], [2], [3 * philox.ROW_STRIDE]], np.uint64)
    streams = streams.ravel()[None, :]
    low, high = np.uint64(2**32 - 1), np.uint64(32)
    words = philox.philox4x32((streams & low, streams >> high, 0, 0), (seeds & low, seeds >> high))
    blocks = np.stack([word.ravel() for word in words])
    assert blocks.shape == (4, 262_144)
    order = np.lexsort(blocks)
    assert (np.diff(blocks[:, order], axis=1) != 0).any(axis=0).all(), "two blocks are equal"
    first = np.sort(blocks[0])
    repeats = int((np.diff(first) == 0).sum())
    expected = len(first) ** 2 / 2 / 2**32
    assert abs(repeats - expected) < 4 * expected**0.5  # 8 expected


def test_positions_rows_and_purposes_never_meet_in_one_stream() -> None:
    """RNG-07: 3 * (position + row * stride) + case is one-to-one while positions stay below the stride."""
    edge = philox.ROW_STRIDE
    positions = np.array([0, 1, 2, 3, 1000, edge // 2, edge - 3, edge - 2, edge - 1])
    numbers = np.concatenate(
        [philox.stream(positions, case, row) for case in range(philox.CASES) for row in range(64)]
    )
    assert len(np.unique(numbers)) == len(numbers) == 9 * 3 * 64
    # At the stride they would meet: row 0 there has the stream of row 1 at position 0.
    assert philox.stream(edge, 0, 0) == philox.stream(0, 0, 1)
    assert edge > 1_048_576 + 64, "above any context length"
