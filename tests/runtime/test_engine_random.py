"""Random workloads through the engine: whatever runs beside it, a request gives what it gives alone.

Over a table (`TableRunner`), and over the runners of the CPU and of a card with suspicious graphs. All read
tokens back from the caches: memory that is wrong, shared or stale gives other scores.
"""

import dataclasses
import itertools
import threading
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from fake_card import fake_card
from fake_graphs import fake_limits, fake_runner
from hypothesis import given, settings
from hypothesis import strategies as st
from request_outcome import outcome

from deepinfer.errors import RequestError, ResourceError
from deepinfer.runtime.engine import Engine
from deepinfer.runtime.limits import Limits
from deepinfer.runtime.model_runner import StepRunner
from deepinfer.runtime.request import Request
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.scheduler_config import EngineType, PreemptionMode, SchedulerConfig
from deepinfer.runtime.seeds import derived_seed
from deepinfer.runtime.table_runner import TableRunner

RUNNERS: dict[str, Callable[[Limits], StepRunner]] = {
    "table": TableRunner,
    "graphs": fake_runner,
    "card": fake_card,
}
OPTIONS: list[dict] = [
    {"temperature": 0},
    {},
    {"top_k": 3, "logprobs": 2},
    {"top_p": 0.5, "stop_token_ids": range(2, 9)},
    {"min_p": 0.1, "logprobs": 0, "logprobs_mode": "raw"},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "temperature": 0, "logprobs": 1},
    {"bad_words": [[5], [6, 7]], "min_tokens": 4, "ignore_eos": True},
    {"prompt_logprobs": 2, "logprobs": 1},
    {"prompt_logprobs": 0, "temperature": 0.5, "top_k": 9},
    {"golden_token_ids": [9, 8, 7, 6], "logprobs": 2},
    {"n": 3, "logprobs": 1},
]


def run_all(engine: Engine) -> Counter[str]:
    """Steps until nothing is left; how often each request was returned as finished."""
    ends: Counter[str] = Counter()
    while engine.has_work:
        ends.update(request.request_id for request in engine.step() if request.finished)
        engine.scheduler.check_integrity()
    return ends


def alone(make: Callable[[Limits], StepRunner], prompt: list[int], params: SamplingParams) -> Request:
    engine = Engine(make(fake_limits()))
    request = engine.add_request(prompt, params)
    run_all(engine)
    return request


def single(params: SamplingParams, choice: int) -> SamplingParams:
    """Parameters of a request that is the given choice of one with these."""
    given = {field.name: getattr(params, field.name) for field in dataclasses.fields(params) if field.init}
    asked = {"n": 1, "prompt_logprobs": None} if choice else {"n": 1}
    seed = derived_seed(params.seed, choice) if choice else params.seed
    return SamplingParams(**(given | asked | {"seed": seed}))


def assert_all_memory_is_free(engine: Engine) -> None:
    scheduler = engine.scheduler
    scheduler.check_integrity()
    assert scheduler.blocks.num_free == scheduler.blocks.capacity
    assert scheduler.slots.num_free == scheduler.slots.capacity


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([length, seed]).integers(2, 40, length).tolist()


@settings(max_examples=60, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(RUNNERS)))
def test_random_workloads_give_what_each_request_gives_alone(data: st.DataObject, name: str) -> None:
    """Lengths, arrivals, budgets, chunks, pools, preemption, aborts, n > 1, mixed settings (BAT-07)."""
    pick = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
    limits = fake_limits(
        prefill_buckets=pick((4, 16), (3,), (64,)),
        decode_buckets=pick((1, 4), (2,), (8,)),
        num_blocks=pick(9, 12, 33),
        num_slots=pick(4, 6, 9),
    )
    config = SchedulerConfig(
        max_num_batched_tokens=pick(None, 1, 5, 11),
        watermark=pick(0.9, 1.0),
        min_decode_steps=pick(0, 8),
    )
    engine = Engine(RUNNERS[name](limits), config)
    requests: list[Request] = []
    ends: Counter[str] = Counter()
    for _ in range(data.draw(st.integers(1, 40))):
        action = pick("add", "add", "step", "step", "step", "step", "abort")
        if action == "add":
            options = OPTIONS[data.draw(st.integers(0, len(OPTIONS) - 1))]
            params = SamplingParams(**({"max_tokens": data.draw(st.integers(4, 24)), "seed": 7} | options))
            requests.append(engine.add_request(prompt_of(data.draw(st.integers(1, 40))), params))
        elif action == "abort" and requests:
            engine.abort(requests[data.draw(st.integers(0, len(requests) - 1))].request_id)
        else:
            ends.update(own.request_id for own in engine.step() if own.finished)
            engine.scheduler.check_integrity()
    ends += run_all(engine)
    assert_all_memory_is_free(engine)
    assert set(ends.values()) <= {1}
    for request in requests:
        for own in (request, *request.choices):
            assert ends[own.request_id] == 1
            expected = alone(RUNNERS[name], list(own.prompt_token_ids), single(own.params, own.index))
            if own.finish_reason != "abort":
                assert outcome(own) == outcome(expected)
                continue
            count = len(own.output_token_ids)
            assert own.output_token_ids == expected.output_token_ids[:count]
            assert own.logprobs == expected.logprobs[:count]


@pytest.mark.parametrize("name", RUNNERS)
def test_preempted_requests_give_what_they_give_with_memory_to_spare(name: str) -> None:
    """A pool that holds one and a half of four requests; tokens, counts and log-probabilities stay."""
    engine = Engine(RUNNERS[name](fake_limits(num_blocks=10)), SchedulerConfig(watermark=1.0))
    params = [SamplingParams(max_tokens=40, seed=n, ignore_eos=True, logprobs=2) for n in range(4)]
    requests = [engine.add_request(prompt_of(9, n), own) for n, own in enumerate(params)]
    run_all(engine)
    assert engine.scheduler.num_preemptions >= 3
    for n, (request, own) in enumerate(zip(requests, params, strict=True)):
        assert outcome(request) == outcome(alone(RUNNERS[name], prompt_of(9, n), own))
        assert len(request.output_token_ids) == 40
    assert sum(request.num_preemptions for request in requests) == engine.scheduler.num_preemptions
    assert any(own.num_positions_processed > 9 + 39 for own in requests)
    assert all(own.num_positions_processed == 9 + 39 for own in requests if not own.num_preemptions)


def test_rows_processed_alone_are_prompt_plus_outputs_but_the_last() -> None:
    """CCH-02, SPN-09: L + G - 1 rows; the last token of an answer is never processed."""
    for length, count in ((1, 1), (7, 5), (40, 24)):
        request = alone(TableRunner, prompt_of(length), SamplingParams(max_tokens=count, ignore_eos=True))
        assert request.num_positions_processed == length + count - 1


@pytest.mark.parametrize("name", RUNNERS)
def test_choices_compute_the_prompt_once_and_differ_by_their_seeds(name: str) -> None:
    engine = Engine(RUNNERS[name](fake_limits(num_slots=6)))
    request = engine.add_request(prompt_of(19), SamplingParams(n=4, max_tokens=20, seed=5, ignore_eos=True))
    assert [own.seed for own in request.choices] == [derived_seed(5, c) for c in (1, 2, 3)]
    run_all(engine)
    answers = [own.output_token_ids for own in (request, *request.choices)]
    assert len({tuple(answer) for answer in answers}) == 4
    assert engine.counts["prefill_rows"] == 19
    assert [own.num_positions_processed for own in request.choices] == [19] * 3  # decode rows alone


def test_derived_seeds_are_those_of_the_definition() -> None:
    """First 8 bytes of SHA-256 over seed and choice, little-endian."""
    assert derived_seed(0, 1) == int.from_bytes(bytes.fromhex("9d34149fbd1fe777"), "little"), (
        "computed with an independent tool"
    )
    assert len({derived_seed(seed, c) for seed, c in itertools.product(range(50), range(1, 50))}) == 50 * 49


@pytest.mark.parametrize("name", RUNNERS)
@pytest.mark.parametrize("outputs", [1, 5, 6, 13])
def test_fork_goes_on_like_a_request_that_was_led_there(name: str, outputs: int) -> None:
    """D.14: fork, then diverge; the parent is not changed."""
    params = SamplingParams(max_tokens=20, seed=3, ignore_eos=True, logprobs=1)
    engine = Engine(RUNNERS[name](fake_limits()))
    parent = engine.add_request(prompt_of(11), params)
    while len(parent.output_token_ids) < outputs:
        engine.step()
    child = engine.fork(parent)
    second = engine.fork(parent)
    assert (child.seed, second.seed) == (derived_seed(3, 1), derived_seed(3, 2))
    run_all(engine)
    assert outcome(parent) == outcome(alone(RUNNERS[name], prompt_of(11), params))
    for own in (child, second):
        led = SamplingParams(
            max_tokens=20,
            seed=own.seed,
            ignore_eos=True,
            logprobs=1,
            golden_token_ids=parent.output_token_ids[:outputs],
        )
        expected = alone(RUNNERS[name], prompt_of(11), led)
        assert own.output_token_ids == expected.output_token_ids
        assert own.logprobs[outputs:] == expected.logprobs[outputs:]
    assert child.output_token_ids != second.output_token_ids
    assert_all_memory_is_free(engine)


@pytest.mark.parametrize("name", RUNNERS)
def test_prompts_in_one_engine_and_decoding_in_another_give_the_same(name: str) -> None:
    """D.15: PROMPT hands on what COMPLETION goes on with, cache contents included."""
    first = Engine(RUNNERS[name](fake_limits()), SchedulerConfig(engine_type=EngineType.PROMPT))
    second = Engine(
        RUNNERS[name](fake_limits(num_slots=3)), SchedulerConfig(engine_type=EngineType.COMPLETION)
    )
    params = [SamplingParams(max_tokens=1 + 6 * n, seed=n, logprobs=1, prompt_logprobs=1) for n in range(4)]
    lengths = (3, 16, 21, 32)  # two of them fill their blocks, so that the next token needs one more
    handed = [first.add_request(prompt_of(lengths[n]), own) for n, own in enumerate(params)]
    run_all(first)
    assert_all_memory_is_free(first)
    assert first.counts["decode_steps"] == 0
    results = [own if own.finish_reason != "prefilled" else second.add_prefilled(own) for own in handed]
    assert results[0].finish_reason in ("length", "stop") and len(results[1:]) == 3
    run_all(second)
    assert_all_memory_is_free(second)
    assert second.counts["prefill_steps"] == 0
    for n, (request, own) in enumerate(zip(results, params, strict=True)):
        assert outcome(request) == outcome(alone(RUNNERS[name], prompt_of(lengths[n]), own))


def test_completion_engine_refuses_what_was_not_handed_on() -> None:
    engine = Engine(fake_runner(), SchedulerConfig(engine_type=EngineType.COMPLETION))
    finished = alone(fake_runner, [3], SamplingParams(max_tokens=1))
    with pytest.raises(RequestError, match="handed on"):
        engine.add_prefilled(finished)
    with pytest.raises(RequestError, match="computes no prompts"):
        engine.add_request([3], SamplingParams())


def test_cache_contents_of_another_layout_are_refused() -> None:
    first = Engine(TableRunner(fake_limits()), SchedulerConfig(engine_type=EngineType.PROMPT))
    request = first.add_request(prompt_of(9), SamplingParams(max_tokens=9, ignore_eos=True))
    run_all(first)
    runner = fake_runner()
    runner.identity = request.cache_state.identity  # even if it claims to be the same
    second = Engine(runner, SchedulerConfig(engine_type=EngineType.COMPLETION))
    second.add_prefilled(request)
    with pytest.raises(ResourceError, match="other sizes"):
        second.step()
    second.abort_all()
    assert_all_memory_is_free(second)


def test_completion_engine_stops_what_it_cannot_compute_again() -> None:
    first = Engine(TableRunner(fake_limits()), SchedulerConfig(engine_type=EngineType.PROMPT))
    handed = [
        first.add_request(prompt_of(9, n), SamplingParams(max_tokens=40, seed=n, ignore_eos=True))
        for n in range(3)
    ]
    run_all(first)
    config = SchedulerConfig(engine_type=EngineType.COMPLETION, preemption_mode=PreemptionMode.RECOMPUTE)
    second = Engine(TableRunner(fake_limits(num_blocks=9)), config)
    requests = [second.add_prefilled(own) for own in handed]
    run_all(second)
    stopped = [own for own in requests if own.finish_reason == "error"]
    assert stopped and all(own.stop_reason == "kv_overflow" for own in stopped)
    assert any(own.finish_reason == "length" for own in requests)


@pytest.mark.parametrize("name", RUNNERS)
@pytest.mark.parametrize("mode", ["processed", "raw"])
def test_golden_tokens_of_the_free_run_change_nothing(name: str, mode: str) -> None:
    """Spec engine H.3; other golden tokens are followed, then sampling goes on by itself."""
    base = {"max_tokens": 16, "seed": 5, "logprobs": 3, "ignore_eos": True, "top_k": 8, "logprobs_mode": mode}
    free = alone(RUNNERS[name], prompt_of(12), SamplingParams(**base))
    led = alone(RUNNERS[name], prompt_of(12), SamplingParams(**base, golden_token_ids=free.output_token_ids))
    assert outcome(led) == outcome(free)
    other = [(token + 1) % 40 for token in free.output_token_ids[:5]]
    forced = alone(RUNNERS[name], prompt_of(12), SamplingParams(**base, golden_token_ids=other))
    assert forced.output_token_ids[:5] == other and len(forced.output_token_ids) == 16
    for token, entry in zip(other, forced.logprobs, strict=False):
        assert token in entry and np.isfinite(entry[token].logprob)
        best = {place.rank: place.logprob for place in entry.values()}
        assert all(best[rank] >= best[rank + 1] for rank in (1, 2))
    first_free, first_forced = free.logprobs[0], forced.logprobs[0]
    for token in first_free.keys() & first_forced.keys():
        assert first_forced[token].logprob == pytest.approx(first_free[token].logprob, abs=2e-6)


def test_stop_rules_hold_for_golden_tokens_unless_eos_is_ignored() -> None:
    golden = [5, 1, 6]
    stopped = alone(TableRunner, [3], SamplingParams(max_tokens=9, golden_token_ids=golden, seed=1))
    assert (stopped.output_token_ids, stopped.finish_reason) == ([5, 1], "stop")
    params = SamplingParams(max_tokens=9, golden_token_ids=golden, seed=1, ignore_eos=True)
    assert alone(TableRunner, [3], params).output_token_ids[:3] == golden


def test_prompt_logprobs_are_those_of_the_scores_before_each_token() -> None:
    """ROW-09: one entry per prompt token, the first None; a chunk more or less changes nothing."""
    prompt = prompt_of(21)
    runner = TableRunner(fake_limits())
    scores = runner.scores(prompt).astype(np.float64)
    expected = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    found = []
    for budget in (None, 1, 4, 7):
        engine = Engine(TableRunner(fake_limits()), SchedulerConfig(max_num_batched_tokens=budget))
        request = engine.add_request(prompt, SamplingParams(max_tokens=1, prompt_logprobs=3, temperature=0))
        run_all(engine)
        found.append(request.prompt_logprobs)
    assert all(other == found[0] for other in found)
    assert found[0][0] is None and len(found[0]) == 21
    for place, entry in enumerate(found[0][1:], start=1):
        own = entry[prompt[place]]
        row = expected[place - 1]
        assert own.logprob == pytest.approx(row[prompt[place]], abs=1e-5)
        assert 3 <= len(entry) <= 4
        assert (
            own.rank
            == 1
            + (row > row[prompt[place]]).sum()
            + (scores[place - 1][: prompt[place]] == scores[place - 1][prompt[place]]).sum()
        )


def test_no_token_at_all_when_only_the_prompt_is_of_interest() -> None:
    """SPN-11: max_tokens 0 is allowed with prompt_logprobs: L rows are processed, nothing is generated."""
    params = SamplingParams(max_tokens=0, prompt_logprobs=1, logprobs=1)
    request = alone(TableRunner, prompt_of(9), params)
    assert (request.output_token_ids, request.logprobs, request.finish_reason) == ([], [], "length")
    assert len(request.prompt_logprobs) == 9 and request.num_positions_processed == 9
    with pytest.raises(RequestError, match="max_tokens"):
        SamplingParams(max_tokens=0)


def test_timeout_ends_a_request_with_what_it_has() -> None:
    now = [0.0]
    engine = Engine(TableRunner(fake_limits()), clock=lambda: now[0])
    request = engine.add_request([3], SamplingParams(max_tokens=30, ignore_eos=True), timeout=2.5)
    other = engine.add_request([4], SamplingParams(max_tokens=9, ignore_eos=True))
    for _ in range(4):
        engine.step()
        now[0] += 1.0
    assert (request.stop_reason, len(request.output_token_ids)) == ("timeout", 3)
    assert request.times["end"] - request.times["arrival"] == 3.0
    run_all(engine)
    assert other.finish_reason == "length"
    assert_all_memory_is_free(engine)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf"), "3", True])
def test_impossible_timeout_is_refused(timeout: float) -> None:
    engine = Engine(TableRunner(fake_limits()))
    with pytest.raises(RequestError, match="timeout"):
        engine.add_request([3], SamplingParams(), timeout=timeout)
    assert not engine.has_work


def test_abort_by_id_comes_from_any_thread_and_may_overtake_its_request() -> None:
    """D.8: applied by the next step; exactly one end, without an invented token."""
    now = [0.0]
    engine = Engine(TableRunner(fake_limits()), clock=lambda: now[0])
    request = engine.add_request([3], SamplingParams(max_tokens=30, ignore_eos=True, n=2), request_id="a")
    engine.step()
    thread = threading.Thread(target=engine.abort, args=("a",))
    thread.start()
    thread.join()
    assert {own.request_id for own in engine.step() if own.finished} == {"a", "a/1"}
    assert (request.finish_reason, len(request.output_token_ids)) == ("abort", 1)
    assert not engine.has_work
    engine.abort("late")
    engine.step()
    early = engine.add_request([3], SamplingParams(), request_id="late")
    assert engine.step() == [early] and early.finish_reason == "abort" and early.output_token_ids == []
    engine.abort("forgotten")
    engine.step()
    now[0] = 61.0
    kept = engine.add_request([3], SamplingParams(max_tokens=1, seed=2), request_id="forgotten")
    assert run_all(engine) == {"forgotten": 1} and kept.finish_reason != "abort"
    assert_all_memory_is_free(engine)
