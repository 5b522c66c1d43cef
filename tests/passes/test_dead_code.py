"""Dead code: unused results go, effects stay."""

import torch
from torch.testing import FileCheck
from toy_graph import Function, capture

from deepinfer.passes import PassManager, graph_text
from deepinfer.passes.dead_code import remove_dead_code
from deepinfer.passes.manager import Pass

MANAGER = PassManager([Pass("remove_dead_code", remove_dead_code)])
X, INDEX = torch.ones(4, 8), torch.arange(4)


def swept(function, *inputs):
    """Text after the pass, and the number of calls removed."""
    program = capture(Function(function), *inputs)
    rewrites = MANAGER.run(program).results[0].rewrites
    assert MANAGER.run(program).results[0].rewrites == 0
    return graph_text(program.graph_module), rewrites


def test_a_chain_of_unused_calls_goes():
    def step(x):
        unused = x.exp().sum(-1).sort()
        return (x + 1, unused.values[:0])[:1]

    text, rewrites = swept(step, X)
    FileCheck().check("aten.add.Tensor").check_not("exp").check_not("sort").run(text)
    assert rewrites >= 3


def test_unused_inputs_stay():
    text, _ = swept(lambda x, index: (x + 1,), X, INDEX)
    assert text.count("= input ") == 2


def test_writes_to_inputs_stay_and_keep_what_they_need():
    def step(x, index, region):
        region.index_put_((index + 1,), x.exp())
        return (x * 2,)

    text, rewrites = swept(step, X, INDEX, torch.zeros(9, 8))
    assert rewrites == 0
    FileCheck().check("input inputs_2!").check("aten.exp").check("aten.index_put_").run(text)


def test_a_write_through_a_view_of_an_input_stays():
    def step(x, region):
        region[:, 1:3].fill_(0)
        return (x * 2,)

    text, rewrites = swept(step, X, torch.zeros(9, 8))
    assert "aten.fill_" in text and rewrites == 0


def test_writes_to_an_unused_temporary_go():
    def step(x):
        buffer = torch.zeros(4, 8)
        buffer.add_(x)
        return (x * 2,)

    text, rewrites = swept(step, X)
    assert "add_" not in text and "zeros" not in text and rewrites == 2


def test_writes_to_a_used_temporary_stay_even_through_a_view():
    def step(x):
        buffer = torch.zeros(4, 8)
        half = buffer[:, :4]
        half.add_(x[:, :4])
        return (buffer * 2,)

    text, rewrites = swept(step, X)
    assert "aten.add_.Tensor" in text and rewrites == 0
