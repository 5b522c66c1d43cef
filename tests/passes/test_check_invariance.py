"""The lint names what would make a row depend on its company, and accepts what cannot."""

import pytest
import torch
from toy_graph import Function, capture

from deepinfer.errors import PassError
from deepinfer.passes import Pass, PassManager
from deepinfer.passes.check_invariance import check_invariance

X = torch.randn(4, 8)
MANAGER = PassManager([Pass("check_invariance", check_invariance)])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x @ x.t(),
        lambda x: x.sum(-1),
        lambda x: x.mean(0),
        lambda x: torch.softmax(x, -1),
        lambda x: x.exp(),
        lambda x: torch.sigmoid(x),
        lambda x: x.cumsum(1),
        lambda x: torch.nn.functional.linear(x, x),
        lambda x: torch.nn.functional.silu(x),
        lambda x: x.pow(3),
    ],
)
def test_what_depends_on_the_number_of_rows_is_refused(function):
    with pytest.raises(PassError, match="may depend on the number of rows"):
        MANAGER.run(capture(Function(lambda x: (function(x),)), X))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x * 2 + 1) / 3,
        lambda x: torch.where(x > 0, x, 0).bfloat16(),
        lambda x: x[torch.tensor([1, 0])].flatten().unflatten(0, (8, 2)),
        lambda x: torch.cat((x, x.new_zeros(4, 8))).expand(2, 8, 8).contiguous(),
        lambda x: (x > 0).sum(-1) + x.long().sum(-1),  # of integers any order gives the same
        lambda x: x.amax(-1),
    ],
)
def test_moves_and_single_roundings_are_accepted(function):
    assert MANAGER.run(capture(Function(lambda x: (function(x),)), X)).results[0].rewrites == 0
