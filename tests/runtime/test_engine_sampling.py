"""Sampling parameters through the engine: bans, mixed batches, rows that end, refusal."""

import numpy as np
import pytest
from fake_graphs import EOS, POISON, VOCAB, expected_tokens, fake_runner

from deepinfer.errors import RequestError
from deepinfer.runtime.engine import Engine
from deepinfer.runtime.request import Request
from deepinfer.runtime.sampling_params import SamplingParams

OPTIONS: list[dict] = [
    {},
    {"temperature": 0},
    {"top_k": 3},
    {"top_p": 0.4, "logprobs": 2},
    {"min_p": 0.2, "min_tokens": 6, "stop_token_ids": range(2, 20)},
    {"repetition_penalty": 1.5, "logprobs": 0},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5, "temperature": 0, "ignore_eos": True},
    {"logit_bias": {7: 4, 8: -50}, "logprobs": 20, "logprobs_mode": "raw"},
    {"allowed_token_ids": [4, 5, 6, 7]},
    {"bad_words": [[5], [6, 7], [8, 9, 10]], "temperature": 2},
]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([length, seed]).integers(2, 40, length).tolist()


def run_all(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
        engine.scheduler.check_integrity()


def alone(prompt: list[int], params: SamplingParams, **fakes: object) -> Request:
    engine = Engine(fake_runner(**fakes))
    request = engine.add_request(prompt, params)
    run_all(engine)
    return request


def test_requests_with_every_option_give_together_what_each_gives_alone() -> None:
    engine = Engine(fake_runner())
    params = [SamplingParams(max_tokens=18, seed=n, **options) for n, options in enumerate(OPTIONS)]
    prompts = [prompt_of(3 + 2 * n) for n in range(len(params))]
    requests = [engine.add_request(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    run_all(engine)
    for request, prompt, own in zip(requests, prompts, params, strict=True):
        single = alone(prompt, own)
        assert request.output_token_ids == single.output_token_ids
        assert request.logprobs == single.logprobs
        assert (request.finish_reason, request.stop_reason) == (single.finish_reason, single.stop_reason)
        assert len(request.logprobs) == (len(request.output_token_ids) if own.logprobs is not None else 0)
        if own.plain:
            assert request.output_token_ids == expected_tokens(prompt, own, own.seed)


def ends_at_once() -> list[int]:
    """A prompt whose greedy answer begins with the end token."""
    params = SamplingParams(max_tokens=1, temperature=0)
    return next(p for p in (prompt_of(5, n) for n in range(5000)) if expected_tokens(p, params, 0) == [EOS])


def test_min_tokens_masks_end_and_stop_tokens_before_selection() -> None:
    """POL-13; also ROW-07, as the prompt itself may hold the end token."""
    prompt = ends_at_once()
    assert alone(prompt, SamplingParams(temperature=0)).output_token_ids == [EOS]
    for min_tokens in (1, 3, 8):
        params = SamplingParams(
            max_tokens=8, temperature=0, min_tokens=min_tokens, stop_token_ids=range(2, 48), logprobs=20
        )
        request = alone(prompt, params)
        assert len(request.output_token_ids) >= min(min_tokens + 1, 8)
        banned = request.logprobs[:min_tokens]
        assert all(set(entry) <= {0, 48, 49} for entry in banned)
        assert all(len(entry) == 20 for entry in request.logprobs[min_tokens:])


def test_min_tokens_holds_with_ignore_eos_too() -> None:
    params = SamplingParams(max_tokens=1, temperature=0, min_tokens=1, ignore_eos=True)
    assert EOS not in alone(ends_at_once(), params).output_token_ids


def test_bad_words_ban_only_their_last_token_and_only_after_the_others() -> None:
    plain = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    tokens = expected_tokens(prompt_of(6), plain, 0)
    word = tokens[4:7]
    changed = alone(
        prompt_of(6), SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, bad_words=[word])
    )
    assert changed.output_token_ids[:6] == tokens[:6] and changed.output_token_ids[6] != tokens[6]
    # The prompt does not count: a word that begins there is not seen.
    crossing = SamplingParams(
        max_tokens=12, temperature=0, ignore_eos=True, bad_words=[[prompt_of(6)[-1], tokens[0]]]
    )
    assert alone(prompt_of(6), crossing).output_token_ids[0] == tokens[0]


def test_request_without_an_allowed_token_ends_alone() -> None:
    """POL-15."""
    engine = Engine(fake_runner())
    params = SamplingParams(max_tokens=9, seed=4, ignore_eos=True)
    first, last = engine.add_request(prompt_of(4), params), engine.add_request(prompt_of(7), params)
    stuck = engine.add_request(
        prompt_of(5), SamplingParams(allowed_token_ids=[EOS, 5], bad_words=[[5]], min_tokens=2, logprobs=1)
    )
    run_all(engine)
    assert (stuck.finish_reason, stuck.stop_reason) == ("error", "no_allowed_token")
    assert stuck.output_token_ids == [] and stuck.logprobs == []
    for request, prompt in ((first, prompt_of(4)), (last, prompt_of(7))):
        assert request.output_token_ids == expected_tokens(prompt, params, 4)


def test_request_with_logits_that_are_no_numbers_ends_alone_whatever_it_asks_for() -> None:
    for options in OPTIONS:
        own = SamplingParams(max_tokens=9, seed=1, **options)
        request = alone([3, POISON], own, poison=POISON)
        assert (request.finish_reason, request.stop_reason) == ("error", "numerical_error")
        assert request.output_token_ids == [] and request.logprobs == []


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ({"logit_bias": {VOCAB: 1}}, "logit_bias"),
        ({"allowed_token_ids": [3, VOCAB]}, "allowed_token_ids"),
        ({"bad_words": [[3], [VOCAB, 4]]}, "bad_words"),
        ({"bad_words": ["text"]}, "bad_words"),
    ],
)
def test_ids_outside_the_vocabulary_and_text_are_refused_at_admission(options: dict, where: str) -> None:
    engine = Engine(fake_runner())
    with pytest.raises(RequestError) as caught:
        engine.add_request([3], SamplingParams(**options))
    assert caught.value.where == where
    assert not engine.has_work
