"""Which of several reasons a request ended for."""

import itertools

import pytest

from deepinfer.runtime.finish import PRECEDENCE, Trigger, decide

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
