"""The engine over a suspicious model: a request's tokens depend on nothing but the request."""

import numpy as np
import pytest
from fake_graphs import EOS, POISON, VOCAB, expected_tokens, fake_limits, fake_runner
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.errors import RequestError
from deepinfer.runtime.engine import Engine
from deepinfer.runtime.request import Request
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.timing import timing_of

MIXED_LENGTHS = (1, 3, 4, 5, 16, 17, 40)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([length, seed]).integers(2, 40, length).tolist()


def run_all(engine: Engine, check: bool = True) -> None:
    while engine.has_work:
        engine.step()
        if check:
            engine.scheduler.check_integrity()


def assert_all_memory_is_free(engine: Engine) -> None:
    engine.scheduler.check_integrity()
    assert engine.scheduler.blocks.num_free == engine.scheduler.blocks.capacity
    assert engine.scheduler.slots.num_free == engine.scheduler.slots.capacity


def mixed_requests() -> list[tuple[list[int], SamplingParams]]:
    temperatures = (0.0, 1.0, 0.7, 1e-5, 3.0, 1.0, 0.0)
    return [
        (prompt_of(length), SamplingParams(max_tokens=20, temperature=heat, seed=length, ignore_eos=True))
        for length, heat in zip(MIXED_LENGTHS, temperatures, strict=True)
    ]


def test_seven_requests_of_mixed_lengths_give_what_each_gives_alone() -> None:
    engine = Engine(fake_runner())
    requests = [engine.add_request(prompt, params) for prompt, params in mixed_requests()]
    run_all(engine)
    for request, (prompt, params) in zip(requests, mixed_requests(), strict=True):
        alone = Engine(fake_runner())
        single = alone.add_request(prompt, params)
        run_all(alone)
        assert (
            request.output_token_ids
            == single.output_token_ids
            == expected_tokens(prompt, params, params.seed)
        )
        assert (request.finish_reason, len(request.output_token_ids)) == ("length", 20)
    assert_all_memory_is_free(engine)


@pytest.mark.parametrize(
    "sizes",
    [
        {"prefill_buckets": (1,)},
        {"prefill_buckets": (64,)},
        {"prefill_buckets": (3, 5, 7)},
        {"decode_buckets": (1,)},
        {"decode_buckets": (2, 3)},
        {"decode_buckets": (8,), "num_slots": 9, "num_blocks": 65},
        {"logits_buckets": (3,), "decode_buckets": (7,), "num_slots": 9, "num_blocks": 65},
        {"num_blocks": 9},
        {"num_slots": 2},
    ],
    ids=str,
)
def test_buckets_chunks_and_pool_sizes_change_no_token(sizes: dict) -> None:
    engine = Engine(fake_runner(fake_limits(**sizes)))
    requests = [engine.add_request(prompt, params) for prompt, params in mixed_requests()]
    run_all(engine)
    for request, (prompt, params) in zip(requests, mixed_requests(), strict=True):
        assert request.output_token_ids == expected_tokens(prompt, params, params.seed)
    assert_all_memory_is_free(engine)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_arrivals_and_aborts_at_any_step_change_no_other_request(data: st.DataObject) -> None:
    engine = Engine(fake_runner())
    live: list[Request] = []
    aborted: set[int] = set()
    for _ in range(data.draw(st.integers(1, 60))):
        action = data.draw(st.sampled_from(["add", "step", "step", "step", "abort"]))
        if action == "add":
            params = SamplingParams(
                max_tokens=data.draw(st.integers(1, 24)),
                temperature=data.draw(st.sampled_from([0.0, 0.8])),
                seed=data.draw(st.integers(0, 5)),
                stop_token_ids=[7],
            )
            live.append(engine.add_request(prompt_of(data.draw(st.integers(1, 40))), params))
        elif action == "step":
            engine.step()
        elif live:
            victim = live[data.draw(st.integers(0, len(live) - 1))]
            if not victim.finished:
                aborted.add(victim.request_id)
            engine.abort(victim)
        engine.scheduler.check_integrity()
    run_all(engine)
    for request in live:
        expected = expected_tokens(request.prompt_token_ids, request.params, request.seed)
        if request.request_id in aborted:
            assert request.finish_reason == "abort"
            assert request.output_token_ids == expected[: len(request.output_token_ids)]
        else:
            assert request.output_token_ids == expected
    assert_all_memory_is_free(engine)


def first_token(prompt: list[int]) -> int:
    return expected_tokens(prompt, SamplingParams(max_tokens=1, temperature=0), 0)[0]


def test_finish_reasons() -> None:
    by_first_token = {first_token([a, b]): [a, b] for a in range(2, 40) for b in range(2, 12)}
    assert EOS in by_first_token
    ends_at_once, other = by_first_token.pop(EOS), next(iter(by_first_token.values()))
    token = first_token(other)
    cases = [
        (ends_at_once, {}, ("stop", None, 1)),
        (ends_at_once, {"ignore_eos": True}, ("length", None, 3)),
        (ends_at_once, {"max_tokens": 1}, ("stop", None, 1)),
        (other, {"stop_token_ids": [token]}, ("stop", token, 1)),
        (other, {"stop_token_ids": [token], "ignore_eos": True, "max_tokens": 1}, ("stop", token, 1)),
        (other, {"max_tokens": 1}, ("length", None, 1)),
    ]
    engine = Engine(fake_runner())
    requests = [
        engine.add_request(prompt, SamplingParams(**{"max_tokens": 3, "temperature": 0} | options))
        for prompt, options, _ in cases
    ]
    run_all(engine)
    for request, (_, _, expected) in zip(requests, cases, strict=True):
        assert (request.finish_reason, request.stop_reason, len(request.output_token_ids)) == expected


def test_request_whose_logits_are_not_numbers_ends_alone() -> None:
    engine = Engine(fake_runner(poison=POISON))
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    clean = [prompt_of(9, seed) for seed in range(30)]
    clean = [p for p in clean if POISON not in [*p, *expected_tokens(p, params, 0)]][:3]
    assert len(clean) == 3
    requests = [engine.add_request(prompt, params) for prompt in (clean[0], [5, POISON], clean[1], clean[2])]
    run_all(engine)
    bad = requests.pop(1)
    assert (bad.finish_reason, bad.stop_reason, bad.output_token_ids) == ("error", "numerical_error", [])
    for request, prompt in zip(requests, clean, strict=True):
        assert request.output_token_ids == expected_tokens(prompt, params, 0)
    assert_all_memory_is_free(engine)


def test_error_while_decoding_keeps_the_tokens_made_before() -> None:
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    prompt = next(
        p for p in (prompt_of(6, seed) for seed in range(200))
        if POISON not in p and POISON in expected_tokens(p, params, 0)[1:-1]
    )  # fmt: skip
    expected = expected_tokens(prompt, params, 0)
    engine = Engine(fake_runner(poison=POISON))
    request = engine.add_request(prompt, params)
    run_all(engine)
    assert request.output_token_ids == expected[: expected.index(POISON) + 1]
    assert (request.finish_reason, request.stop_reason) == ("error", "numerical_error")


class Interrupting:
    """A runner that raises at its n-th step, after the caches have been written."""

    def __init__(self, at: int) -> None:
        self.inner, self.left = fake_runner(), at
        self.limits = self.inner.limits

    def run(self, batch):  # noqa: ANN001, ANN201
        logits = self.inner.run(batch)
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return logits


@pytest.mark.parametrize("at", [1, 2, 5, 9])
def test_engine_is_as_new_after_an_interrupt(at: int) -> None:
    engine = Engine(Interrupting(at))
    interrupted = [engine.add_request(prompt, params) for prompt, params in mixed_requests()]
    with pytest.raises(KeyboardInterrupt):
        run_all(engine)
    engine.abort_all()
    assert_all_memory_is_free(engine)
    assert not engine.has_work and all(request.finished for request in interrupted)
    again = [engine.add_request(prompt, params) for prompt, params in mixed_requests()]
    run_all(engine)
    for request, (prompt, params) in zip(again, mixed_requests(), strict=True):
        assert request.output_token_ids == expected_tokens(prompt, params, params.seed)


def test_omitted_seed_is_drawn_recorded_and_reproduces_the_result() -> None:
    engine = Engine(fake_runner())
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    first, second = engine.add_request([3, 4], params), engine.add_request([3, 4], params)
    run_all(engine)
    assert first.seed != second.seed and first.output_token_ids != second.output_token_ids
    again = engine.add_request([3, 4], SamplingParams(max_tokens=10, ignore_eos=True, seed=first.seed))
    run_all(engine)
    assert again.output_token_ids == first.output_token_ids


def test_longest_request_fits_exactly() -> None:
    engine = Engine(fake_runner())
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    request = engine.add_request(prompt_of(40), params)
    with pytest.raises(RequestError):
        engine.add_request(prompt_of(41), params)
    run_all(engine)
    assert request.num_tokens == engine.runner.limits.max_model_len
    assert request.output_token_ids == expected_tokens(prompt_of(40), params, 0)


def test_counts_and_times_tell_what_was_done() -> None:
    engine = Engine(fake_runner())
    request = engine.add_request(prompt_of(20), SamplingParams(max_tokens=5, ignore_eos=True, seed=1))
    assert engine.step() == []  # the first chunk makes no token
    run_all(engine)
    assert engine.counts == {
        "prefill_steps": 2, "prefill_rows": 20, "decode_steps": 4, "decode_rows": 4, "tokens": 5
    }  # fmt: skip
    times = timing_of(request.times, request.visible_times).seconds
    assert 0 <= times["queue"] <= times["first_token"] <= times["total"]
    assert times["decode"] == pytest.approx(times["total"] - times["first_token"])


def test_vocabulary_of_the_fake_model_is_covered() -> None:
    """The comparisons above would prove little if the fake model always said the same."""
    seen = {first_token([a, b]) for a in range(40) for b in range(40)}
    assert len(seen) > VOCAB // 2
