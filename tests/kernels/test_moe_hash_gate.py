"""The router by token: picks of the table, weights from the scores, padding."""

import pytest
import torch

from deepinfer.errors import UsageError
from deepinfer.kernels import moe_gate, moe_hash_gate

ROUTES = ("reference", "native")


@pytest.mark.parametrize("route", ROUTES)
def test_weights_are_those_of_the_scores_of_the_picks(route):
    x, weight, table, tokens, positions, *_ = moe_hash_gate.make_inputs(12, torch.float32, 1)
    logits, picks, weights = getattr(moe_hash_gate, route)(x, weight, table, tokens, positions, True, 1.5)
    valid = positions >= 0
    assert torch.equal(picks[valid], table[tokens[valid]])
    scores = torch.nn.functional.softplus(x.double() @ weight.double().T).sqrt().gather(1, table[tokens])
    want = scores / scores.sum(1, keepdim=True) * 1.5
    torch.testing.assert_close(weights[valid].double(), want[valid], rtol=1e-5, atol=1e-6)
    assert (picks[~valid] == -1).all() and (weights[~valid] == 0).all() and (logits[~valid] == 0).all()


@pytest.mark.parametrize("route", ROUTES)
def test_picks_of_the_other_router_get_its_weights(route):
    """A table with what top-k would pick gives the same bytes."""
    x, weight, _, _, positions, *_ = moe_hash_gate.make_inputs(9, torch.bfloat16, 2)
    want = getattr(moe_gate, route)(x, weight, torch.zeros(24), positions, 6, True, 1.5)
    table = want[1].clamp(min=0)
    got = getattr(moe_hash_gate, route)(x, weight, table, torch.arange(9), positions, True, 1.5)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("route", ROUTES)
def test_a_token_without_a_row_is_refused(route):
    x, weight, table, tokens, positions, *_ = moe_hash_gate.make_inputs(4, torch.float32, 3)
    tokens[1] = len(table)
    with pytest.raises((UsageError, RuntimeError), match="token_ids"):
        getattr(moe_hash_gate, route)(x, weight, table, tokens, positions, True, 1.5)
    positions[1] = -1  # of padding the token is not looked at
    getattr(moe_hash_gate, route)(x, weight, table, tokens, positions, True, 1.5)


def test_an_expert_that_does_not_exist_is_refused():
    x, weight, table, tokens, positions, *_ = moe_hash_gate.make_inputs(4, torch.float32, 3)
    table[tokens[0], 2] = 24
    with pytest.raises(RuntimeError, match="table must hold ids"):
        moe_hash_gate.native(x, weight, table, tokens, positions, True, 1.5)
