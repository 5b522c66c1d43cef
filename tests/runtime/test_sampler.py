"""The sampler: specified vectors, distribution, independence of rows, bad rows."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.runtime import philox, sampler
from deepinfer.runtime.sampling_params import SamplingParams


def one_row(logits: list[float], **params: float) -> sampler.Sampled:
    return sampler.sample(torch.tensor([logits]), [SamplingParams(**params)], [1], [1])


@pytest.mark.parametrize(
    ("logits", "temperature", "masses"),
    [
        ([2, 1, 0.5, -1], 0.5, [1808253327, 244720476, 90027632, 4482211]),
        ([3, 2, 2, 0, -1], 1.0, [1190492474, 437957706, 437957706, 59271130, 21804630]),
    ],
)
def test_integer_masses_are_those_specified(logits: list, temperature: float, masses: list) -> None:
    got = sampler.integer_masses(np.array([logits], np.float32), np.array([temperature]))[0]
    # The vectors are float64; a float32 share carries 24 bits, so up to 2**31 / 2**23 units of rounding.
    assert np.all(np.abs(got.astype(np.int64) - masses) <= np.array(masses) * 2.0**-22 + 1)
    assert got.sum() <= 2**31 + 2**9


def test_clamped_temperature_splits_two_logits_1e_5_apart_as_specified() -> None:
    logits = np.array([[1e-5, 0.0]], np.float32)
    shares = sampler.integer_masses(logits, np.array([1e-5]))[0] / 2.0**31
    assert shares == pytest.approx([0.73106, 0.26894], abs=1e-5)


def test_draw_inverts_the_running_sum_at_its_edges() -> None:
    masses = np.array([[3, 0, 5, 2]], dtype=np.uint64)
    for target, column in [(0, 0), (2, 0), (3, 2), (7, 2), (8, 3), (9, 3)]:
        word = np.array([-(-(target << 32) // 10)], dtype=np.uint64)  # smallest word that gives `target`
        assert philox.integer_draw(word, 10) == target
        assert sampler.draw(masses, word) == column
    assert sampler.draw(masses, np.array([0xFFFFFFFF], dtype=np.uint64)) == 3
    first_empty = np.array([[0, 4]], dtype=np.uint64)
    assert sampler.draw(first_empty, np.array([0], dtype=np.uint64)) == 1


def test_greedy_takes_the_lowest_id_among_equal_logits() -> None:
    assert one_row([0.0, 3.0, -1.0, 3.0, 3.0], temperature=0).token_ids == 1
    assert one_row([-0.0, 0.0], temperature=0).token_ids == 0


def test_greedy_uses_no_random_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(philox, "random_word", lambda *_: pytest.fail("a draw for a greedy row"))
    assert one_row([0.0, 1.0], temperature=0).token_ids == 1


@pytest.mark.parametrize("temperature", [0, 1e-12, 1e-6, 1e-5, 1e-4, 1e-3])
def test_small_temperatures_agree_with_greedy_and_do_not_overflow(temperature: float) -> None:
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(5)) * 100
    logits[0, 17] = 3e38
    result = sampler.sample(logits, [SamplingParams(temperature=temperature)], [9], [3])
    assert (result.token_ids[0], result.status[0]) == (17, sampler.OK)


def test_huge_temperature_is_uniform_over_allowed_columns_only() -> None:
    masses = sampler.integer_masses(np.array([[-3e38, 3e38, -np.inf, 0.0]], np.float32), np.array([1.7e308]))[
        0
    ]
    assert masses[2] == 0
    assert masses[1] > 0 and masses[3] > 0


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
    others = np.arange(64) != 20
    assert np.array_equal(after.token_ids[others], before.token_ids[others])
    assert not after.status[others].any()


def test_minus_infinity_is_never_drawn() -> None:
    logits = torch.zeros(2000, 4)
    logits[:, [0, 2]] = -float("inf")
    got = sampler.sample(logits, [SamplingParams()] * 2000, range(2000), [7] * 2000).token_ids
    assert set(got.tolist()) == {1, 3}


def test_forced_top_k_cuts_equal_logits_by_lower_id() -> None:
    logits = np.zeros((1, 6000), np.float32)
    logits[0, [5999, 100]] = 1.0
    kept = sampler.keep_largest(logits, sampler.FORCED_TOP_K)
    assert kept.token_ids.shape == (1, 4096)
    assert kept.token_ids[0].tolist() == [*range(4095), 5999]  # 100 is among the low ids already
    assert kept.logits[0, 100] == kept.logits[0, -1] == 1.0


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 10**6))
def test_keep_largest_equals_a_stable_sort(vocab: int, count: int, seed: int) -> None:
    logits = np.random.default_rng(seed).integers(-3, 3, (3, vocab)).astype(np.float32)
    logits[logits == -3] = -np.inf
    kept = sampler.keep_largest(logits, count)
    for row in range(3):
        order = np.argsort(-logits[row], kind="stable")[:count]
        assert kept.token_ids[row].tolist() == sorted(order.tolist())
        assert np.array_equal(kept.logits[row], logits[row, kept.token_ids[row]])


def test_tree_sum_does_not_see_trailing_zeros() -> None:
    values = np.random.default_rng(0).random((5, 64)).astype(np.float32)
    padded = np.zeros((5, 512), np.float32)
    padded[:, :64] = values
    assert np.array_equal(sampler.tree_sum(values), sampler.tree_sum(padded))


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
    assert np.array_equal(permuted, together[order])
    masses = sampler.integer_masses(logits.numpy(), np.ones(rows))
    for i in range(rows):
        alone = sampler.sample(logits[i : i + 1], params[i : i + 1], positions[i : i + 1], seeds[i : i + 1])
        assert alone.token_ids[0] == together[i]
        assert np.array_equal(sampler.integer_masses(logits.numpy()[i : i + 1], np.ones(1))[0], masses[i])


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
    assert len(set(by_position.tolist())) > 120 and len(set(by_seed.tolist())) > 120
    assert np.array_equal(by_position, sampler.sample(logits, params, range(200), [3] * 200).token_ids)


def test_no_rows_give_no_tokens() -> None:
    result = sampler.sample(torch.empty(0, 8), [], [], [])
    assert result.token_ids.shape == result.status.shape == (0,)
