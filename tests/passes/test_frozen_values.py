"""Values frozen while tracing are found by a second trace."""

import itertools

import pytest
import torch
from toy_graph import Function, capture

from deepinfer.errors import CaptureError
from deepinfer.passes import check_same_trace
from deepinfer.passes.frozen_values import capture_twice

X, Y = torch.ones(4, 8), torch.full((4, 8), 3.0)


def twice(function):
    return capture_twice(lambda inputs: capture(Function(function), *inputs), (X,), (Y,), "decode-4")


def test_a_pure_step_gives_the_first_program():
    program = twice(lambda x: (x * 2 + torch.arange(8),))
    assert torch.equal(program.module()(X)[0], X * 2 + torch.arange(8))


def test_a_host_counter_frozen_into_an_argument_is_named():
    counter = itertools.count(5)
    with pytest.raises(CaptureError, match=r"decode-4: node mul .*inputs_0, 5\).*inputs_0, 6\)"):
        twice(lambda x: (x * next(counter),))


def test_a_host_decision_frozen_into_the_calls_is_named():
    counter = itertools.count()
    with pytest.raises(CaptureError, match="node (exp|log) depends on values at tracing time"):
        twice(lambda x: (x.exp() if next(counter) == 0 else x.log(),))


def test_a_longer_trace_is_noticed():
    first = capture(Function(lambda x: (x * 2,)), X)
    second = capture(Function(lambda x: (x * 2 + 1,)), X)
    with pytest.raises(CaptureError):
        check_same_trace(first, second)


def test_a_literal_tensor_that_differs_is_found_by_bytes():
    values = iter([[0.0, 1.0], [-0.0, 1.0]])
    with pytest.raises(CaptureError, match="the literal .* depends on values"):
        twice(lambda x: (x[:, :2] + torch.tensor(next(values)),))


def test_equal_literals_pass_even_with_nan():
    twice(lambda x: (x[:, :2] + torch.tensor([float("nan"), 1.0]),))
