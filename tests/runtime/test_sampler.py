"""The sampler: parameters reach the operation, distribution, independence of rows, bad rows."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.runtime import sampler
from deepinfer.runtime.sampling_params import SamplingParams


def one_row(logits: list[float], **params: float) -> sampler.Sampled:
    return sampler.sample(torch.tensor([logits]), [SamplingParams(**params)], [1], [1])


def test_greedy_takes_the_lowest_id_among_equal_logits() -> None:
    assert one_row([0.0, 3.0, -1.0, 3.0, 3.0], temperature=0).token_ids == [1]
    assert one_row([-0.0, 0.0], temperature=0).token_ids == [0]


@pytest.mark.parametrize("temperature", [0, 1e-12, 1e-6, 1e-5, 1e-4, 1e-3])
def test_small_temperatures_agree_with_greedy_and_do_not_overflow(temperature: float) -> None:
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(5)) * 100
    logits[0, 17] = 3e38
    result = sampler.sample(logits, [SamplingParams(temperature=temperature)], [9], [3])
    assert (result.token_ids[0], result.status[0]) == (17, sampler.OK)


@pytest.mark.parametrize(
    ("row", "status"),
    [
        ([0.0, float("nan"), 1.0], sampler.NOT_A_NUMBER),
        ([0.0, float("inf"), 1.0], sampler.NOT_A_NUMBER),
        ([-float("inf"), float("nan"), -float("inf")], sampler.NOT_A_NUMBER),
        ([-float("inf")] * 3, sampler.NOTHING_ALLOWED),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_row_gets_a_status_and_others_are_untouched(row: list, status: int, temperature: float) -> None:
    good = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
    params = [SamplingParams(temperature=temperature)] * 64
    before = sampler.sample(good, params, range(64), range(64))
    spoilt = good.clone()
    spoilt[20] = torch.tensor(row)
    after = sampler.sample(spoilt, params, range(64), range(64))
    assert (after.token_ids[20], after.status[20]) == (sampler.NO_TOKEN, status)
    others = [row for row in range(64) if row != 20]
    assert all(after.token_ids[row] == before.token_ids[row] for row in others)
    assert not any(after.status[row] for row in others)


def test_minus_infinity_is_never_drawn() -> None:
    logits = torch.zeros(2000, 4)
    logits[:, [0, 2]] = -float("inf")
    got = sampler.sample(logits, [SamplingParams()] * 2000, range(2000), [7] * 2000).token_ids
    assert set(got) == {1, 3}


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 17), st.sampled_from([1, 5, 63, 512, 5003]), st.integers(0, 10**6))
def test_row_alone_equals_row_in_a_permuted_batch(rows: int, vocab: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(size=(rows, vocab)).astype(np.float32) * 4)
    params = [SamplingParams(temperature=float(rng.choice([0, 1e-5, 0.3, 1.0, 7.0]))) for _ in range(rows)]
    positions = rng.integers(1, 4096, rows).tolist()
    seeds = rng.integers(0, 2**63, rows).tolist()
    together = sampler.sample(logits, params, positions, seeds).token_ids
    order = rng.permutation(rows)
    permuted = sampler.sample(
        logits[order], [params[i] for i in order], [positions[i] for i in order], [seeds[i] for i in order]
    ).token_ids
    assert permuted == [together[row] for row in order]
    for i in range(rows):
        alone = sampler.sample(logits[i : i + 1], params[i : i + 1], positions[i : i + 1], seeds[i : i + 1])
        assert alone.token_ids[0] == together[i]


def test_draws_follow_the_distribution() -> None:
    logits = np.array([2.0, 1.0, 0.5, -1.0, 0.0, 1.5, -2.0, 0.25], np.float32)
    rows, rounds = 2000, 50
    counts = np.zeros(8)
    batch = torch.from_numpy(np.tile(logits, (rows, 1)))
    params = [SamplingParams(temperature=0.8)] * rows
    for seed in range(rounds):
        drawn = sampler.sample(batch, params, range(rows), [seed] * rows).token_ids
        counts += np.bincount(drawn, minlength=8)
    expected = np.exp(logits / 0.8) / np.exp(logits / 0.8).sum() * rows * rounds
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 24.3  # 7 degrees of freedom, p = 0.001; the draws are fixed, so this never flickers


def test_seed_and_position_decide_the_draw() -> None:
    logits = torch.zeros(1, 512).repeat(200, 1)
    params = [SamplingParams()] * 200
    by_position = sampler.sample(logits, params, range(200), [3] * 200).token_ids
    by_seed = sampler.sample(logits, params, [3] * 200, range(200)).token_ids
    assert len(set(by_position)) > 120 and len(set(by_seed)) > 120
    assert by_position == sampler.sample(logits, params, range(200), [3] * 200).token_ids


def test_no_rows_give_no_tokens() -> None:
    result = sampler.sample(torch.empty(0, 8), [], [], [])
    assert (result.token_ids, result.status) == ([], [])
