"""Sampling parameters: ranges, and refusal by name."""

import copy
import dataclasses

import numpy as np
import pytest

from deepinfer.errors import RequestError
from deepinfer.runtime.sampling_params import SamplingParams


def test_defaults_are_those_users_know() -> None:
    params = SamplingParams()
    assert (params.max_tokens, params.temperature, params.seed) == (16, 1.0, None)
    assert params.ignore_eos is False and params.stop_token_ids == ()
    assert (params.top_k, params.top_p, params.min_p, params.min_tokens) == (0, 1.0, 0.0, 0)
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    assert penalties == (1.0, 0.0, 0.0)
    assert (params.logit_bias, params.allowed_token_ids, params.bad_words, params.logprobs) == (
        (),
        None,
        (),
        None,
    )
    assert params.plain


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
        {"stop": ""},
        {"stop": [""]},
        {"stop": ["", "x"]},
        {"stop": 7},
        {"stop": [7]},
        {"stop": b"x"},
        {"stop": {"x": 1}},
        {"stop": "x" * 257},
        {"stop": [str(n) for n in range(17)]},
        {"stop": "\ud800"},
        {"include_stop_str_in_output": 1},
        {"skip_special_tokens": None},
        {"min_tokens": -1},
        {"min_tokens": 17},
        {"min_tokens": 1.5},
        {"top_k": -2},
        {"top_k": 2**31},
        {"top_k": 1.0},
        {"top_k": True},
        {"top_k": None},
        {"top_p": 0},
        {"top_p": 1.0000001},
        {"top_p": -0.5},
        {"top_p": float("nan")},
        {"top_p": "0.9"},
        {"top_p": None},
        {"min_p": -1e-9},
        {"min_p": 1.1},
        {"min_p": float("nan")},
        {"repetition_penalty": 0},
        {"repetition_penalty": -1},
        {"repetition_penalty": 1e-7},
        {"repetition_penalty": float("inf")},
        {"presence_penalty": 2.01},
        {"presence_penalty": float("nan")},
        {"frequency_penalty": -2.01},
        {"frequency_penalty": True},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {"3": 1.0}},
        {"logit_bias": {3: 100.5}},
        {"logit_bias": {3: float("-inf")}},
        {"logit_bias": {3: None}},
        {"logit_bias": [3]},
        {"logit_bias": 3},
        {"allowed_token_ids": []},
        {"allowed_token_ids": [-1]},
        {"allowed_token_ids": "12"},
        {"bad_words": "word"},
        {"bad_words": 3},
        {"bad_words": [3]},
        {"bad_words": [[]]},
        {"bad_words": [[1], [1.5]]},
        {"bad_words": ["  "]},
        {"bad_words": [""]},
        {"logprobs": -1},
        {"logprobs": 21},
        {"logprobs": True},
        {"logprobs_mode": "raw_logprobs"},
        {"logprobs_mode": None},
    ],
)
def test_value_out_of_range_is_refused_and_named(bad: dict) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**bad)
    assert caught.value.where == next(iter(bad))


@pytest.mark.parametrize("name", ["stop", "best_of", "max_token", "plain", "guided_json"])
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
    full = SamplingParams(
        logit_bias={4: 1, 2: -1}, bad_words=["a", [3, 4]], allowed_token_ids=[5, 2], top_k=-1
    )
    assert dataclasses.replace(full) == full == copy.deepcopy(full) and hash(full) == hash(copy.copy(full))
    assert full.logit_bias == ((2, -1.0), (4, 1.0)) and full.bad_words == ("a", (3, 4))
    assert full.allowed_token_ids == (2, 5) and full.top_k == 0


@pytest.mark.parametrize(
    ("options", "plain"),
    [
        ({"top_k": -1, "top_p": 1, "min_p": 0, "repetition_penalty": 1, "presence_penalty": -0.0}, True),
        ({"logit_bias": {}, "bad_words": [], "min_tokens": 0, "stop_token_ids": [4], "seed": 3}, True),
        ({"top_k": 1}, False),
        ({"top_p": 0.9}, False),
        ({"min_p": 0.1}, False),
        ({"min_tokens": 1}, False),
        ({"logprobs": 0}, False),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": 0.1}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"logit_bias": {3: 0}}, False),
        ({"allowed_token_ids": [3]}, False),
        ({"bad_words": [[3]]}, False),
    ],
)
def test_plain_means_that_only_the_temperature_decides(options: dict, plain: bool) -> None:
    assert SamplingParams(**options).plain is plain


def test_message_names_field_value_and_range() -> None:
    with pytest.raises(RequestError, match=r"top_p.*1\.5.*above 0, at most 1"):
        SamplingParams(top_p=1.5)
    with pytest.raises(RequestError, match=r"min_tokens.*9.*0 to 8"):
        SamplingParams(max_tokens=8, min_tokens=9)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (None, ()),
        ([], ()),
        ("x", ("x",)),
        (["b", "a", "b"], ("b", "a")),
        (("x" * 256,), ("x" * 256,)),
        ([str(n) for n in range(16)], tuple(str(n) for n in range(16))),
    ],
)
def test_stop_strings_keep_their_order_and_come_once(given: object, kept: tuple[str, ...]) -> None:
    params = SamplingParams(stop=given)
    assert params.stop == kept and params.plain
    assert (params.include_stop_str_in_output, params.skip_special_tokens) == (False, True)
