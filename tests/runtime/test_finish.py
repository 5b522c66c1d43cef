"""Which of several reasons a request ended for."""

import itertools

import pytest
from fake_graphs import POISON, fake_runner

from deepinfer.runtime.engine import Engine
from deepinfer.runtime.finish import PRECEDENCE, Trigger, decide
from deepinfer.runtime.sampling_params import SamplingParams

ORDER = [
    Trigger("abort"),
    Trigger("timeout"),
    Trigger("error", "not_finite"),
    Trigger("structured_complete"),
    Trigger("stop_string", "\n"),
    Trigger("eos"),
    Trigger("stop_token", 7),
    Trigger("max_tokens"),
    Trigger("max_model_len"),
]
REASONS = ["abort", "abort", "error", "stop", "stop", "stop", "stop", "length", "length"]
STOP_REASONS = [None, "timeout", "not_finite", None, "\n", None, 7, None, None]


@pytest.mark.parametrize("higher, lower", list(itertools.combinations(range(len(ORDER)), 2)))
def test_of_two_reasons_the_higher_counts_and_both_are_recorded(higher: int, lower: int) -> None:
    """STP-17, STP-18, STP-24: all 36 pairs, whichever was found first."""
    assert len(ORDER) == len(PRECEDENCE)
    for triggers in ([ORDER[higher], ORDER[lower]], [ORDER[lower], ORDER[higher]]):
        finish = decide(triggers)
        assert finish is not None
        assert (finish.kind, finish.finish_reason) == (ORDER[higher].kind, REASONS[higher])
        assert finish.stop_reason == STOP_REASONS[higher]
        assert finish.triggers == (ORDER[higher], ORDER[lower])


@pytest.mark.parametrize("index", range(len(ORDER)))
def test_each_reason_alone_ends_a_request(index: int) -> None:
    """STP-01."""
    finish = decide([ORDER[index]])
    assert finish == (ORDER[index].kind, REASONS[index], STOP_REASONS[index], (ORDER[index],))


def test_without_a_reason_it_goes_on() -> None:
    assert decide([]) is None


def test_ends_that_no_token_brings_are_recorded_too() -> None:
    """STP-18: an abort, a deadline, an error, no tokens wanted, and the end of everything."""
    now = 0.0
    engine = Engine(fake_runner(poison=POISON), clock=lambda: now)
    many = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0)
    late, gone, scored, bad, last = (
        engine.add_request([5, 6], many, timeout=1.0),
        engine.add_request([7, 8], many),
        engine.add_request([5, 9], SamplingParams(max_tokens=0, prompt_logprobs=1)),
        engine.add_request([5, POISON], many),
        engine.add_request([9], many),
    )
    engine.abort(gone)
    now = 2.0
    while not (late.finished and scored.finished and bad.finished):
        engine.step()
    engine.abort_all()
    assert (late.triggers, gone.triggers) == ((Trigger("timeout"),), (Trigger("abort"),))
    assert (scored.triggers, bad.triggers) == (
        (Trigger("max_tokens"),),
        (Trigger("error", "numerical_error"),),
    )
    assert last.triggers == (Trigger("abort"),)
