"""Sampling parameters: ranges, and refusal by name."""

import dataclasses

import numpy as np
import pytest

from deepinfer.errors import RequestError
from deepinfer.runtime.sampling_params import SamplingParams


def test_defaults_are_those_users_know() -> None:
    params = SamplingParams()
    assert (params.max_tokens, params.temperature, params.seed) == (16, 1.0, None)
    assert params.ignore_eos is False and params.stop_token_ids == ()


@pytest.mark.parametrize(
    "bad",
    [
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"max_tokens": 1.0},
        {"max_tokens": True},
        {"max_tokens": None},
        {"max_tokens": "4"},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": "1"},
        {"temperature": None},
        {"temperature": True},
        {"temperature": 10**400},
        {"seed": -1},
        {"seed": 2**64},
        {"seed": 1.5},
        {"seed": True},
        {"ignore_eos": 1},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": "12"},
        {"stop_token_ids": 12},
        {"stop_token_ids": [1.0]},
        {"stop_token_ids": [None]},
    ],
)
def test_value_out_of_range_is_refused_and_named(bad: dict) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**bad)
    assert caught.value.where == next(iter(bad))


@pytest.mark.parametrize("name", ["top_p", "n", "logit_bias", "max_token", "guided_json"])
def test_unsupported_parameter_is_refused_by_name(name: str) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: 1})


@pytest.mark.parametrize(
    ("given", "kept"), [(0, 0.0), (-0.0, 0.0), (1e-300, 1e-5), (1e-6, 1e-5), (1e-5, 1e-5), (2, 2.0)]
)
def test_tiny_temperatures_are_clamped_and_zero_is_greedy(given: float, kept: float) -> None:
    params = SamplingParams(temperature=given)
    assert params.temperature == kept
    assert params.greedy == (kept == 0.0)


def test_boundaries_and_numpy_integers_are_accepted() -> None:
    params = SamplingParams(max_tokens=np.int64(1), seed=2**64 - 1, stop_token_ids=np.array([7, 3, 7]))
    assert (params.max_tokens, params.seed, params.stop_token_ids) == (1, 2**64 - 1, (3, 7))
    assert type(params.max_tokens) is int


def test_parameters_cannot_change_after_construction() -> None:
    params = SamplingParams()
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 0.5  # type: ignore[misc]


def test_copy_with_changes_is_validated_too() -> None:
    assert dataclasses.replace(SamplingParams(seed=4), max_tokens=2).seed == 4
    with pytest.raises(RequestError):
        dataclasses.replace(SamplingParams(), max_tokens=0)
