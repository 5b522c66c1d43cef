"""A request's state over time: what is processed, what is selected, what a fault or an abort leaves of it.

P is the number of processed inputs, U what is selected and not processed, L the prompt and O the outputs.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from fake_graphs import fake_limits, fake_runner
from spy_runner import PROMPT, Fault, Spy, alone, at, fail, limits, params, run_all, spied

from deepinfer.errors import RequestError
from deepinfer.runtime.engine import Engine
from deepinfer.runtime.limits import Limits
from deepinfer.runtime.outputs import CompletionOutput, RequestOutput
from deepinfer.runtime.request import Request, RequestStatus
from deepinfer.runtime.sampler_interface import Sampled
from deepinfer.runtime.scheduler import Scheduler
from deepinfer.runtime.scheduler_config import EngineType, SchedulerConfig
from deepinfer.runtime.table_runner import WINDOW, TableRunner

EOS, POISON = 1, 9


def test_model_decision_and_commit_alternate_and_the_last_token_is_never_processed() -> None:
    """SPN-01, SPN-06, SPN-12, SPN-08: the row at position t scores the token at position t + 1."""
    engine, spy = spied()
    request = engine.add_request(PROMPT, params(3), request_id="a")
    while engine.has_work:
        (own,) = engine.step()
        assert own is request and len(own.logprobs) == len(own.output_token_ids)
        spy.log.append(("commit", own.output_token_ids[-1]))
    first, second, third = request.output_token_ids
    assert spy.log == [
        ("model", "a", (0, 1, 2, 3, 4, 5, 6)),
        ("decision", 7),
        ("commit", first),
        ("model", "a", (7,)),
        ("decision", 8),
        ("commit", second),
        ("model", "a", (8,)),
        ("decision", 9),
        ("commit", third),
    ]
    assert (request.num_computed_tokens, request.num_tokens) == (9, 10)


def test_ledger_of_processed_and_selected_tokens() -> None:
    """SPN-07, SPN-08, STA-08: P + U = L + O throughout; one token is pending, or closed for good."""
    engine, _ = spied()
    request = engine.add_request(PROMPT, params(3))
    ledger = [(len(request.output_token_ids), request.num_computed_tokens, request.status.value)]
    while engine.has_work:
        engine.step()
        pending = request.num_tokens - request.num_computed_tokens
        assert pending == 1, "what was selected last"
        ledger.append((len(request.output_token_ids), request.num_computed_tokens, request.status.value))
    assert ledger == [(0, 0, "waiting"), (1, 7, "running"), (2, 8, "running"), (3, 9, "finished")]
    with pytest.raises(AssertionError):
        engine.scheduler.finish(request, "stop")  # a closed token does not become another one
    with pytest.raises(RequestError, match="decodes"):
        engine.fork(request)


@pytest.mark.parametrize(("length", "count"), [(7, 1), (2048, 128)])
def test_processed_inputs_are_those_of_prompt_and_outputs_but_the_last(length: int, count: int) -> None:
    """SPN-09, CCH-02: L = 2048 and G = 128 give 2,175; an answer of one token gives L."""
    sizes = limits(max_model_len=2200, num_blocks=300, prefill_buckets=(512,))
    engine = Engine(TableRunner(sizes))
    request = engine.add_request([3] * length, params(count, logprobs=None))
    run_all(engine)
    assert request.num_computed_tokens == request.num_positions_processed == length + count - 1


def entries(runner: TableRunner, request: Request) -> tuple[list[int], set[int]]:
    """What blocks and slot hold of a request; fresh memory holds negative numbers."""
    state = runner.read_state(request)
    return np.frombuffer(state.blocks, np.int64).tolist(), set(np.frombuffer(state.slot, np.int64).tolist())


def test_selected_token_is_not_in_the_caches_until_a_step_processes_it() -> None:
    """SPN-10, CCH-05: a step writes its own positions and no other; the token just made is at none."""
    engine, spy = spied()
    request = engine.add_request(PROMPT, params(6))
    engine.step()
    for made in range(1, 5):
        tokens = [*request.prompt_token_ids, *request.output_token_ids]
        blocks, slot = entries(spy.inner, request)
        assert blocks[: len(tokens) - 1] == tokens[:-1]
        assert all(entry < 0 for entry in blocks[len(tokens) - 1 :]), "nothing behind what was processed"
        assert len(request.output_token_ids) == made and slot == set(tokens[-1 - WINDOW : -1])
        engine.step()


def test_quantities_that_are_easily_taken_for_each_other_are_six() -> None:
    """STA-07: processed, known, retained, reserved, most ever reserved, and the model's length."""
    engine, spy = spied()
    request = engine.add_request(PROMPT, params(9))
    for _ in range(3):
        engine.step()
    _, slot = entries(spy.inner, request)
    assert request.num_computed_tokens == 9
    assert request.num_tokens == 10
    assert len(slot) == WINDOW == 4
    assert len(request.block_table) * spy.limits.block_tokens == 16
    engine.abort(request)
    assert (len(request.block_table), request.num_peak_blocks) == (0, 2)
    assert spy.limits.max_model_len == 64


def test_numbers_in_results_say_of_what_they_are() -> None:
    """STA-06: no bare length or size among the public fields."""
    bare = {"length", "len", "size", "count", "seq_len", "num", "position", "offset"}
    for kind in (RequestOutput, CompletionOutput, Request, Limits, SchedulerConfig):
        fields = {own.name: str(own.type) for own in dataclasses.fields(kind)}
        assert not bare & set(fields), kind
        for name, type_name in fields.items():
            if type_name == "int":
                named = name.startswith(("num_", "max_", "min_")) or name.endswith(
                    ("_id", "_size", "_len", "_tokens", "_request")
                )
                assert named or name in ("index", "seed", "arrival"), f"{kind.__name__}.{name}"


def test_identity_of_a_request_does_not_change_while_it_runs() -> None:
    """STA-01, STA-02: a caller's list and parameters are taken as they were; the state is apart."""
    prompt, stops = list(PROMPT), [17]
    own = params(32, stop_token_ids=stops, allowed_token_ids=range(2, 16))
    engine, _ = spied()
    request = engine.add_request(prompt, own)
    before = (request.prompt_token_ids, dataclasses.replace(request.params), request.seed)
    engine.step()
    prompt[0], stops[0] = 19, 2
    for name in ("temperature", "seed", "stop_token_ids"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(request.params, name, 1)
    run_all(engine)
    assert (request.prompt_token_ids, request.params, request.seed) == before
    assert request.output_token_ids == alone(PROMPT, own).output_token_ids
    assert len(request.output_token_ids) == 32


def test_state_without_its_cache_contents_is_refused() -> None:
    """STA-03, TXN-07: tokens alone do not make a request that goes on; contents can be taken in once."""
    first = Engine(TableRunner(limits()), SchedulerConfig(engine_type=EngineType.PROMPT))
    request = first.add_request(PROMPT, params(9))
    run_all(first)
    second = Engine(TableRunner(limits()), SchedulerConfig(engine_type=EngineType.COMPLETION))
    state, request.cache_state = request.cache_state, None
    with pytest.raises(RequestError, match="not handed on"):
        second.add_prefilled(request)
    assert not second.has_work
    request.cache_state = state
    resumed = second.add_prefilled(request)
    run_all(second)
    assert resumed.output_token_ids == alone(PROMPT, params(9)).output_token_ids


def test_sampler_that_leaves_a_row_out_gives_nobody_a_token() -> None:
    """SPN-13: a score counts only with those of all rows of its step."""
    engine, spy = spied()
    requests = [engine.add_request(PROMPT[n:], params(5, logprobs=None)) for n in range(2)]
    original = spy.sample
    spy.sample = lambda *arguments: Sampled(*(part[:-1] for part in original(*arguments)))  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="one result per sampled request"):
        engine.step()
    assert all(own.output_token_ids == [] for own in requests)


def test_a_batch_is_committed_once() -> None:
    """SPN-03, SPN-04: neither twice, nor after a newer one was made, nor after everything was given up."""
    scheduler = Scheduler(limits())
    request = scheduler.add(PROMPT, params(5), 0)
    batch = scheduler.schedule()
    assert batch is not None
    with pytest.raises(AssertionError, match="not committed"):
        scheduler.schedule()
    scheduler.commit(batch, [3], [None])
    for newer in (None, scheduler.schedule()):
        with pytest.raises(AssertionError, match="committed once"):
            scheduler.commit(batch, [4], [None])
        assert request.output_token_ids == [3] and newer is not batch
    scheduler.abort_all()
    with pytest.raises(AssertionError, match="committed once"):
        scheduler.commit(newer, [4], [None])
    assert request.output_token_ids == [3]


ENDS: dict[str, tuple[dict, tuple]] = {
    # what happens -> parameters, then (O, P, finish_reason, stop_reason, rows of the model)
    "no tokens wanted": ({"max_tokens": 0, "prompt_logprobs": 0}, (0, 7, "length", None, 7)),
    "no number to choose by": ({"poison_token_id": 6}, (0, 7, "error", "numerical_error", 7)),
    "stop token": ({"stop_token_ids": range(20)}, (1, 7, "stop", "the token", 7)),
    "length": ({}, (3, 9, "length", None, 9)),
    "abort before the launch": ({}, (0, 0, "abort", None, 0)),
    "abort in flight": ({}, (1, 7, "abort", None, 8)),
    "abort after the choice": ({}, (1, 7, "abort", None, 8)),
    "timeout in flight": ({}, (1, 7, "abort", "timeout", 8)),
    "timeout with the stop token": ({"max_tokens": 2}, (1, 7, "abort", "timeout", 8)),
    "fault in flight": ({}, (1, 7, "abort", None, 8)),
}


@pytest.mark.parametrize("end", ENDS)
def test_every_way_to_end_leaves_a_known_state(end: str) -> None:
    """SPN-17, STP-20, STP-21: tokens, log-probabilities and frontier of the last whole step."""
    options, expected = ENDS[end]
    poison = {key: options[key] for key in options if key == "poison_token_id"}
    own = params(**({"max_tokens": 3} | {key: options[key] for key in options if key not in poison}))
    now = [0.0]

    def jump() -> None:
        now[0] = 10.0

    acts = {
        "abort in flight": ("half", lambda: engine.abort("a")),
        "abort after the choice": ("sampled", lambda: engine.abort("a")),
        "timeout in flight": ("half", jump),
        "timeout with the stop token": ("head", jump),
        "fault in flight": ("head", fail),
    }
    stage, act = acts.get(end, ("never", fail))
    spy = Spy(at(stage, 2, act), **poison)
    engine = Engine(spy, sampler=spy, clock=lambda: now[0])
    request = engine.add_request(PROMPT, own, request_id="a", timeout=5.0)
    if end == "abort before the launch":
        engine.abort("a")
    ends = 0
    try:
        while engine.has_work:
            ends += sum(each.finished for each in engine.step())
    except Fault:
        engine.abort_all()
    stop_reason = request.output_token_ids[-1] if expected[3] == "the token" else expected[3]
    assert (len(request.output_token_ids), request.num_computed_tokens) == expected[:2]
    assert (request.finish_reason, request.stop_reason) == (expected[2], stop_reason)
    assert len(request.logprobs) == len(request.output_token_ids)
    assert sum(len(entry[2]) for entry in spy.log if entry[0] == "model") == expected[4] - (
        end == "fault in flight"
    )
    assert ends == (end != "fault in flight") and request.status is RequestStatus.FINISHED
    assert engine.counts["tokens"] == len(request.output_token_ids)
    engine.scheduler.check_integrity()
    assert engine.scheduler.blocks.num_used == engine.scheduler.slots.num_used == 0


def test_refused_request_reaches_neither_model_nor_sampler() -> None:
    """SPN-17: the first way to end is not to begin."""
    engine, spy = spied()
    for prompt, own in (([], params(1)), ([20], params(1)), ([3], params(64)), ([3], params(1, n=9))):
        with pytest.raises(RequestError):
            engine.add_request(prompt, own)
    assert engine.step() == [] and spy.log == [] and not engine.has_work


def test_a_branch_that_is_given_up_leaves_no_trace() -> None:
    """TXN-05, TXN-08, CCH-19: what a fork computed is never the parent's."""
    engine, spy = spied()
    parent = engine.add_request(PROMPT, params(20))
    for steps in (1, 4, 2):
        for _ in range(steps):
            engine.step()
        branch = engine.fork(parent)
        engine.step()
        blocks, _ = entries(spy.inner, parent)
        assert blocks[: parent.num_computed_tokens] == [*PROMPT, *parent.output_token_ids[:-1]]
        assert len(branch.output_token_ids) == len(parent.output_token_ids)
        engine.abort(branch)
    run_all(engine)
    other = alone(PROMPT, params(20))
    assert (parent.output_token_ids, parent.logprobs) == (other.output_token_ids, other.logprobs)


@pytest.mark.parametrize("make", [TableRunner, fake_runner], ids=["table", "graphs"])
def test_branch_of_a_request_whose_memory_was_handed_out_again_has_its_state(
    make: Callable[[Limits], Any],
) -> None:
    """A fork, then the end of its parent, then a start in the parent's slot and blocks: all before a step."""
    own = params(12, seed=3)
    first = Engine(make(fake_limits()), SchedulerConfig(engine_type=EngineType.PROMPT))
    handed = [first.add_request(prompt, own) for prompt in (PROMPT, [5] * 11)]
    run_all(first)
    config = SchedulerConfig(engine_type=EngineType.COMPLETION)
    second = Engine(make(fake_limits(num_slots=3, num_blocks=9)), config)
    parent = second.add_prefilled(handed[0])
    for _ in range(4):
        second.step()
    slot, tokens = parent.slot_id, list(parent.output_token_ids)
    branch = second.fork(parent, seed=3)
    second.abort(parent)
    late = second.add_prefilled(handed[1])
    second.step()
    assert late.slot_id == slot
    run_all(second)

    def expected(prompt: Sequence[int]) -> list[int]:
        engine = Engine(make(fake_limits()))
        request = engine.add_request(prompt, own)
        run_all(engine)
        return request.output_token_ids

    assert branch.output_token_ids == expected(PROMPT) and branch.output_token_ids[: len(tokens)] == tokens
    assert late.output_token_ids == expected([5] * 11)


def test_requests_that_have_ended_take_no_row_and_no_draw() -> None:
    """BAT-08, STP-02, STP-19: no step after the last token, whoever goes on beside it."""
    engine, spy = spied()
    short = engine.add_request(PROMPT, params(2), request_id="short")
    long = engine.add_request([4, 5], params(6), request_id="long")
    run_all(engine)
    rows = [(name, positions) for kind, name, positions in (e for e in spy.log if len(e) == 3)]
    assert [positions for name, positions in rows if name == "short"] == [tuple(range(7)), (7,)]
    assert len([name for name, _ in rows if name == "long"]) == 6
    assert sum(entry[0] == "decision" for entry in spy.log) == 8
    assert (len(short.output_token_ids), len(long.output_token_ids)) == (2, 6)
    assert (len(short.logprobs), len(long.logprobs)) == (2, 6)
