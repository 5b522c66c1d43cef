"""Canonicalisation: what goes, what stays, and that nothing changes a bit."""

import pytest
import torch
from torch.testing import FileCheck
from toy_graph import Function, capture

from deepinfer.passes import PassManager, graph_text
from deepinfer.passes.canonicalize import canonicalize
from deepinfer.passes.manager import Pass

MANAGER = PassManager([Pass("canonicalize", canonicalize)])


def canonical(function, *inputs):
    """Captured program before and after, as text, with the count."""
    program = capture(Function(function), *inputs)
    before = graph_text(program.graph_module)
    rewrites = MANAGER.run(program).results[0].rewrites
    return before, graph_text(program.graph_module), rewrites, program


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))


def test_assertions_and_identities_go():
    def step(x):
        y = x.to(torch.bfloat16).to(torch.bfloat16)
        y = y.view(4, 8).reshape(4, 8).contiguous().detach().clone()
        return (torch.add(y, y, alpha=1)[:, :],)

    before, after, rewrites, _ = canonical(step, X)
    assert "_assert_tensor_metadata" in before and rewrites >= 7
    FileCheck().check("aten.to.dtype").check("aten.add.Tensor(%1, %1) :").check("return [%2]").run(after)
    for gone in (
        "_assert_tensor_metadata",
        "view",
        "reshape",
        "contiguous",
        "detach",
        "clone",
        "alpha",
        "slice",
    ):
        assert gone not in after


def test_running_again_rewrites_nothing():
    _, after, _, program = canonical(lambda x: (x.float().view(4, 8).bfloat16() + 1,), X.bfloat16())
    assert MANAGER.run(program).results[0].rewrites == 0
    assert graph_text(program.graph_module) == after


@pytest.mark.parametrize(
    ("function", "kept"),
    [
        (lambda x: (x + 0,), "aten.add.Tensor"),
        (lambda x: (x * 1,), "aten.mul.Tensor"),
        (lambda x: (x.bfloat16().float() * 2,), "aten.to.dtype(%0, bfloat16)"),
        (lambda x: (torch.add(x, x, alpha=2),), "alpha=2"),
        (lambda x: (x.t() * 2,), "aten.t.default"),
        (lambda x: (x.view(8, 4) * 2,), "aten.view.default"),
        (lambda x: (x[:, 1:5] * 2,), "aten.slice.Tensor"),
        (lambda x: (x.t().contiguous().view(4, 8) * 2,), "aten.contiguous.default"),
        (lambda x: (x.view(torch.int32) + 1,), "aten.view.dtype"),
    ],
)
def test_near_misses_are_left_alone(function, kept):
    before, after, _, _ = canonical(function, X)
    assert kept in before and kept in after


def test_copies_that_can_be_told_from_the_original_stay():
    def written_copy(x):
        y = x.clone()
        y.add_(1)
        return (y * x,)

    def written_original(x, index, region):
        old = region.clone()
        region.index_put_((index,), x)
        return (old * 2,)

    assert "aten.clone.default" in canonical(written_copy, X)[1]
    region, index = torch.zeros(9, 8), torch.arange(4)
    assert "aten.clone.default" in canonical(written_original, X, index, region)[1]
    assert "aten.clone.default" in canonical(lambda x: (x.clone(),), X)[1]


def test_a_copy_of_unwritten_memory_goes():
    assert "aten.clone.default" not in canonical(lambda x: (x.clone() * 2,), X)[1]


def test_outputs_are_equal_by_bytes():
    def step(x):
        y = x.to(torch.bfloat16).to(torch.bfloat16).clone().view(4, 8)
        return (torch.sub(y, 0.5, alpha=1).float(), y.expand(4, 8) * 2)

    x = torch.cat([X, torch.tensor([[-0.0, torch.inf, torch.nan, 1e-40, -1e-45, 3e38, 1.0, -1.0]])])[1:]
    program = canonical(step, x)[3]
    for a, b in zip(program.module()(x), step(x), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
