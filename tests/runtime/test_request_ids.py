"""Ids of requests, and aborts by id: in use, free again, too early, too late, of one choice or all."""

import pytest
from fake_graphs import fake_limits

from deepinfer.errors import RequestError
from deepinfer.runtime.engine import Engine
from deepinfer.runtime.request import Request
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.table_runner import TableRunner


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def engine(clock: Clock) -> Engine:
    return Engine(TableRunner(fake_limits(num_slots=9, num_blocks=65)), clock=clock)


def long(n: int = 1, **options: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 40, "ignore_eos": True, "seed": 1, "n": n} | options)


def run_all(engine: Engine) -> list[Request]:
    ended = []
    while engine.has_work:
        ended += [request for request in engine.step() if request.finished]
        engine.scheduler.check_integrity()
    return ended


def test_abort_of_a_request_whose_first_choice_has_ended_ends_the_others(engine: Engine) -> None:
    """A caller who leaves leaves all choices: none may go on to its limit for nobody."""
    first = engine.add_request([3, 4], long(n=3), request_id="a")
    while not first.output_token_ids:
        engine.step()
    engine.abort(first)  # as if it had reached a stop token; its choices go too
    assert all(own.finish_reason == "abort" for own in (first, *first.choices))
    again = engine.add_request([3, 4], long(n=3), request_id="b")
    while not again.choices[-1].output_token_ids:
        engine.step()
    engine.scheduler.end(again, "stop")
    engine.step()
    assert again.finished and not any(own.finished for own in again.choices)
    engine.abort("b")
    engine.step()
    assert {own.finish_reason for own in again.choices} == {"abort"}
    assert not engine.has_work


def test_one_choice_can_be_aborted_by_its_own_id(engine: Engine) -> None:
    first = engine.add_request([3, 4], long(n=3), request_id="a")
    engine.step()
    engine.abort("a/2")
    run_all(engine)
    assert [own.finish_reason for own in (first, *first.choices)] == ["length", "length", "abort"]


def test_late_abort_does_not_harm_the_next_request_of_that_id(engine: Engine, clock: Clock) -> None:
    """A caller who says goodbye to an answer that is complete may use the id again at once."""
    engine.add_request([3], long(max_tokens=2), request_id="x")
    run_all(engine)
    engine.abort("x")
    again = engine.add_request([3], long(max_tokens=2), request_id="x")
    run_all(engine)
    assert again.finish_reason == "length"
    clock.now += 61.0  # by now nobody knows of the request that ended, so this is an early one
    engine.abort("x")
    overtaken = engine.add_request([3], long(max_tokens=2), request_id="x")
    run_all(engine)
    assert (overtaken.finish_reason, overtaken.output_token_ids) == ("abort", [])


def test_id_is_in_use_until_all_choices_have_ended(engine: Engine) -> None:
    first = engine.add_request([3], long(n=2), request_id="x")
    while not first.choices[0].output_token_ids:
        engine.step()
    engine.scheduler.end(first, "stop")
    engine.step()
    for name in ("x", "x/1"):
        with pytest.raises(RequestError, match=f"'{name}'"):
            engine.add_request([3], long(), request_id=name)
    engine.abort(first)
    again = engine.add_request([3], long(n=2), request_id="x")  # though the end was not returned yet
    ended = run_all(engine)
    assert ended.count(first.choices[0]) == 1 and {again, *again.choices} < {*ended}
    assert again.finish_reason == "length"


def test_refused_request_with_choices_leaves_no_trace(engine: Engine) -> None:
    """The name of a further choice is in use: nothing of the new request stays behind."""
    other = engine.add_request([3], long(max_tokens=3), request_id="x/2")
    with pytest.raises(RequestError, match="'x/2'"):
        engine.add_request([4], long(n=4), request_id="x")
    assert run_all(engine) == [other]
    engine.add_request([4], long(n=4, max_tokens=2), request_id="x")
    assert len(run_all(engine)) == 4


def test_ids_that_are_made_up_avoid_those_in_use(engine: Engine) -> None:
    for name in ("0", "1", "3/1"):
        engine.add_request([3], long(max_tokens=2), request_id=name)
    made_up = [engine.add_request([3], long(n=n, max_tokens=2)).request_id for n in (1, 2)]
    assert made_up == ["2", "4"]
    assert len(run_all(engine)) == 6


def test_abort_before_its_request_waits_a_minute(engine: Engine, clock: Clock) -> None:
    engine.abort("early")
    engine.abort("forgotten")
    engine.step()
    clock.now += 59.0
    early = engine.add_request([3], long(), request_id="early")
    clock.now += 2.0
    kept = engine.add_request([3], long(max_tokens=1), request_id="forgotten")
    run_all(engine)
    assert (early.finish_reason, early.output_token_ids) == ("abort", [])
    assert kept.finish_reason == "length"


def test_abort_asked_for_again_waits_from_then(engine: Engine, clock: Clock) -> None:
    for name in ("a", "b", "a"):
        engine.abort(name)
        engine.step()
        clock.now += 25.0
    first, second = (engine.add_request([3], long(max_tokens=1), request_id=name) for name in ("a", "b"))
    run_all(engine)
    assert (first.finish_reason, second.finish_reason) == ("abort", "abort")
    clock.now = 200.0
    engine.abort("c")
    engine.step()
    clock.now = 230.0
    engine.abort("d")
    engine.step()
    engine.abort("c")
    engine.step()
    clock.now = 285.0
    assert engine.add_request([3], long(), request_id="c") in engine.step()
    clock.now = 291.0
    kept = engine.add_request([3], long(max_tokens=1), request_id="d")
    run_all(engine)
    assert kept.finish_reason == "length"
