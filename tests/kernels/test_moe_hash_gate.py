"""The router by token: picks of the table, weights from the scores, padding."""

import pytest
import torch
import torch.nn.functional as F
from routes import ROUTES

from deepinfer.errors import UsageError
from deepinfer.kernels import moe_gate, moe_hash_gate


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


@pytest.mark.parametrize("route", ["reference", "native"])
def test_a_token_without_a_row_is_refused(route):
    x, weight, table, tokens, positions, *_ = moe_hash_gate.make_inputs(4, torch.float32, 3)
    tokens[1] = len(table)
    with pytest.raises((UsageError, RuntimeError), match="token_ids"):
        getattr(moe_hash_gate, route)(x, weight, table, tokens, positions, True, 1.5)
    positions[1] = -1  # of padding the token is not looked at
    getattr(moe_hash_gate, route)(x, weight, table, tokens, positions, True, 1.5)


@pytest.mark.parametrize("route", ROUTES)
def test_odd_values_keep_to_their_row_and_no_rows_are_fine(route):
    x, weight, table, tokens, positions, *_ = moe_hash_gate.make_inputs(6, torch.float32, 4)
    run = getattr(moe_hash_gate, route)
    positions[:] = torch.tensor([0, 1, -1, 3, -1, 5])
    tokens[2] = 10**12  # of padding the token is not looked at
    want = run(x, weight, table, tokens, positions, True, 1.5)
    x[1], x[2], x[3] = float("nan"), float("nan"), float("inf")
    got = run(x, weight, table, tokens, positions, True, 1.5)
    assert got[2][1].isnan().all() and got[2][3].isnan().any()
    for left, right in zip(got, want, strict=True):
        assert torch.equal(left[[0, 2, 4, 5]], right[[0, 2, 4, 5]])
    masked = run(x, weight, table, tokens, torch.full_like(positions, -1), True, 1.5)
    assert (masked[1] == -1).all() and not masked[0].any() and not masked[2].any()
    empty = run(x[:0], weight, table, tokens[:0], positions[:0], False, 1.0)
    assert [part.shape[0] for part in empty] == [0, 0, 0]
    one = run(x[:1], weight, table[:, :1].contiguous(), tokens[:1], positions[:1], True, 2.0)
    assert one[2].shape == (1, 1)
    torch.testing.assert_close(one[2][0, 0], F.softplus(one[0][0, one[1][0, 0]]).sqrt() * 2)


def test_an_expert_that_does_not_exist_is_refused():
    x, weight, table, tokens, positions, *_ = moe_hash_gate.make_inputs(4, torch.float32, 3)
    table[tokens[0], 2] = 24
    with pytest.raises(RuntimeError, match="table must hold ids"):
        moe_hash_gate.native(x, weight, table, tokens, positions, True, 1.5)
