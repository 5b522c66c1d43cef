"""The shared definition: specified vectors, keep sets and their ties, masses, sums, draws at their edges."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.kernels import philox, sampling
from deepinfer.kernels.sample import make_arguments


def masses_of(logits: list[float], temperature: float) -> np.ndarray:
    values = np.array(logits, np.float32)
    return sampling.weigh(values, values.max(), sampling.temperature_factor(temperature))[1]


@pytest.mark.parametrize(
    ("logits", "temperature", "masses"),
    [
        ([2, 1, 0.5, -1], 0.5, [1808253327, 244720476, 90027632, 4482211]),
        ([3, 2, 2, 0, -1], 1.0, [1190492474, 437957706, 437957706, 59271130, 21804630]),
    ],
)
def test_integer_masses_are_those_specified(logits: list, temperature: float, masses: list) -> None:
    got = masses_of(logits, temperature)
    # The vectors are float64; a float32 share carries 24 bits, so up to 2**31 / 2**23 units of rounding.
    assert np.all(np.abs(got.astype(np.int64) - masses) <= np.array(masses) * 2.0**-22 + 1)
    assert got.sum() <= 2**31 + 2**9


def test_clamped_temperature_splits_two_logits_1e_5_apart_as_specified() -> None:
    assert masses_of([1e-5, 0.0], 1e-5) / 2.0**31 == pytest.approx([0.73106, 0.26894], abs=1e-5)


def test_huge_temperature_is_uniform_over_allowed_columns_only() -> None:
    masses = masses_of([-3e38, 3e38, -np.inf, 0.0], 1.7e308)
    assert masses[2] == 0
    assert masses[1] > 0 and masses[3] > 0


def test_draw_inverts_the_running_sum_at_its_edges() -> None:
    masses = np.array([3, 0, 5, 2], dtype=np.uint64)
    for target, column in [(0, 0), (2, 0), (3, 2), (7, 2), (8, 3), (9, 3)]:
        word = -(-(target << 32) // 10)  # smallest word that gives `target`
        assert philox.integer_draw(word, 10) == target
        assert sampling.draw(masses, word) == column
    assert sampling.draw(masses, 0xFFFFFFFF) == 3
    assert sampling.draw(np.array([0, 4], dtype=np.uint64), 0) == 1


def test_forced_top_k_cuts_equal_logits_by_lower_id() -> None:
    logits = np.zeros(6000, np.float32)
    logits[[5999, 100]] = 1.0
    kept = sampling.keep_largest(logits, sampling.FORCED_TOP_K)
    assert kept.tolist() == [*range(4095), 5999]  # 100 is among the low ids already


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 10**6))
def test_keep_largest_equals_a_sort_by_value_then_id(vocab: int, count: int, seed: int) -> None:
    logits = np.random.default_rng(seed).integers(-3, 3, vocab).astype(np.float32)
    logits[logits == -3] = -np.inf
    pairs = sorted((-value, column) for column, value in enumerate(logits) if value > -np.inf)
    assert sampling.keep_largest(logits, count).tolist() == sorted(column for _, column in pairs[:count])


def test_tree_sum_does_not_see_trailing_zeros() -> None:
    values = np.random.default_rng(0).random(64).astype(np.float32)
    padded = np.zeros(512, np.float32)
    padded[:64] = values
    assert sampling.tree_sum(values) == sampling.tree_sum(padded)


@pytest.mark.parametrize(
    ("settings_", "kept"),
    [
        ({"top_p": 0.8}, [0, 1, 2]),  # because of the mass: .554, .758, .962
        ({"top_p": 0.7}, [0, 1, 2]),  # the edge falls on 1, the tie keeps 2
        ({"top_k": 2}, [0, 1, 2]),
        ({"top_p": 0.5}, [0]),
        ({"top_p": 0.0}, [0]),
        ({"top_k": 1}, [0]),
        ({"min_p": 0.3}, [0, 1, 2]),  # e^-1 = .368
        ({"min_p": 0.4}, [0]),
        ({"min_p": 1.0}, [0]),
        ({}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.97}, [0, 1, 2, 3]),
        ({"top_k": 4, "top_p": 0.97}, [0, 1, 2]),  # top-p counts what top-k has left: .962 of .990
        ({"top_k": 2, "top_p": 0.5}, [0]),
    ],
)
def test_keep_sets_are_those_specified(settings_: dict, kept: list) -> None:
    a = make_arguments(1, 5, 0)._replace(
        logits=torch.tensor([[3.0, 2.0, 2.0, 0.0, -1.0]]),
        temperatures=torch.ones(1, dtype=torch.float64),
        top_k=torch.tensor([settings_.get("top_k", 0)]),
        top_p=torch.tensor([settings_.get("top_p", 1.0)], dtype=torch.float64),
        min_p=torch.tensor([settings_.get("min_p", 0.0)], dtype=torch.float64),
        mask_index=torch.tensor([-1]),
    )
    found = sampling.distribution(a, 0)
    assert found.ids.tolist() == kept
    if settings_ == {"top_p": 0.8}:
        assert found.masses / 2.0**31 == pytest.approx([0.57612, 0.21194, 0.21194], abs=1e-5)
        assert abs(int(found.masses.sum()) - 2147483647) < 300
