"""Router: golden vectors, hand values, the step functions, float64, ties, odd values, packed weights."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from routes import ROUTES

from deepinfer.errors import UsageError
from deepinfer.kernels import linear, moe_gate
from deepinfer.kernels.packing import pack_linear


def plain_route(logits, bias, config):
    """The plain form: picks best first, weights in their order."""
    scores = torch.nn.functional.softplus(logits).sqrt()
    _, order = torch.sort(scores + bias, dim=1, descending=True, stable=True)
    picks = order[:, : config.num_experts_per_tok]
    weights = scores.gather(1, picks)
    if config.norm_topk_prob and config.num_experts_per_tok > 1:
        total, *others = weights.unbind(1)
        for other in others:
            total = total + other
        weights = weights / (total.unsqueeze(1) + 1e-20)
    return picks, weights * config.routed_scaling_factor


NAN, INF = float("nan"), float("inf")


def run(route, *args):
    return getattr(moe_gate, route)(*args)


def gate_logits(route, logits, bias, top_k, norm=True, factor=1.5):
    """Send given logits [T, E] through the op: x is the logits, the weight the identity."""
    rows, experts = logits.shape
    return run(route, logits, torch.eye(experts), bias, torch.arange(rows), top_k, norm, factor)[1:]


def choose_logits(route, logits, bias, top_k):
    """The same for one row of logits that no product with zeros survives: x is 1, the weight the logits."""
    weight = torch.tensor(logits).unsqueeze(1)
    _, ids, weights = run(
        route, torch.ones(1, 1), weight, torch.tensor(bias), torch.zeros(1).long(), top_k, True, 1.0
    )
    return ids[0].tolist(), weights[0]


@pytest.mark.parametrize("route", ROUTES)
def test_golden_vectors(route, golden_kernels):
    names = ("x", "weight", "bias", "picks", "weights")
    x, weight, bias, picks, weights = (golden_kernels[f"router.{name}"] for name in names)
    text = golden_kernels["router.image_mask"] == 0
    args = (weight, bias, torch.arange(int(text.sum())), 4, True, 1.5)
    _, got_picks, got_weights = run(route, x[text].contiguous(), *args)
    assert torch.equal(got_picks, picks[text].long())
    torch.testing.assert_close(got_weights, weights[text], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("route", ROUTES)
def test_hand_values(route):
    """Spec 18.6."""
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0, 3.0, -2.0]])
    bias = torch.tensor([0.5, 0.0, 0.6, -0.4, -1.0, 0.9])
    ids, weights = gate_logits(route, logits, bias, 3)
    assert ids.tolist() == [[0, 5, 2]]
    want = torch.tensor([[0.71422143, 0.30563204, 0.48014652]])
    torch.testing.assert_close(weights, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("top_k", [1, 6])
def test_the_reference_is_the_step_functions_and_native_agrees(top_k, norm, same_bytes):
    generator = torch.Generator().manual_seed(top_k)
    logits, bias = torch.randn(16, 40, generator=generator) * 4, torch.randn(40, generator=generator)
    config = SimpleNamespace(num_experts_per_tok=top_k, norm_topk_prob=norm, routed_scaling_factor=1.5)
    want_ids, want = plain_route(logits, bias, config)
    for route in ROUTES:
        ids, weights = gate_logits(route, logits, bias, top_k, norm)
        assert torch.equal(ids, want_ids)
        if route == "reference":
            same_bytes(weights, want)
        torch.testing.assert_close(weights, want, rtol=2e-6, atol=0)


@pytest.mark.parametrize("route", ROUTES)
def test_close_to_float64(route):
    x, weight, bias, positions, top_k, norm, factor = moe_gate.make_inputs(20, torch.float32, 1)
    logits, ids, weights = run(route, x, weight, bias, positions, top_k, norm, factor)
    valid = positions >= 0
    exact = x.double() @ weight.double().T
    torch.testing.assert_close(logits[valid].double(), exact[valid], rtol=1e-5, atol=2e-6)
    scores = torch.nn.functional.softplus(exact).sqrt()
    picked = scores.gather(1, ids.clamp(min=0))
    want = picked / picked.sum(1, keepdim=True) * factor
    torch.testing.assert_close(weights[valid].double(), want[valid], rtol=5e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 5])
def test_logits_have_the_bits_of_linear_for_plain_and_packed_weights(dtype, rows, same_bytes):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 600, generator=generator).to(dtype)
    for weight in (
        torch.randn(48, 600, generator=generator),
        torch.randn(48, 600, generator=generator).bfloat16(),
    ):
        rest = (torch.zeros(48), torch.arange(rows), 6, True, 1.5)
        plain = moe_gate.native(x, weight, *rest)
        same_bytes(plain[0], linear.native(x, weight, torch.float32))
        packed = pack_linear(weight)
        assert packed.dim() == 3
        for got, want in zip(moe_gate.native(x, packed, *rest), plain, strict=True):
            same_bytes(got, want)
        reference = moe_gate.reference(x, weight, *rest)
        for got, want in zip(moe_gate.reference(x, packed, *rest), reference, strict=True):
            same_bytes(got, want)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_equal_ranks_and_odd_values_are_ordered_as_torch_sorts(data):
    """Ranks come from the bias alone (all logits equal), so both routes see the same ones."""
    values = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-30, -1e-30, INF, -INF, NAN, 3.0])
    bias = data.draw(st.lists(values, min_size=1, max_size=40))
    top_k = data.draw(st.integers(1, len(bias)))
    experts = len(bias)
    args = (torch.zeros(2, 3), torch.zeros(experts, 3), torch.tensor(bias), torch.arange(2), top_k, True, 1.0)
    score = torch.nn.functional.softplus(torch.zeros(1)).sqrt()
    order = torch.sort(score + torch.tensor(bias), descending=True, stable=True).indices[:top_k]
    for route in ROUTES:
        _, ids, weights = run(route, *args)
        assert ids.tolist() == [order.tolist()] * 2
        torch.testing.assert_close(
            weights, torch.full((2, top_k), 1.0 / top_k if top_k > 1 else float(score))
        )


@pytest.mark.parametrize("route", ROUTES)
def test_a_nan_logit_is_picked_first_and_shows_in_the_weights(route):
    ids, weights = choose_logits(route, [0.5, 1.0, NAN, 2.0, NAN], [0.0] * 5, 3)
    assert ids == [2, 4, 3]
    assert weights.isnan().all()
    ids, weights = choose_logits(route, [NAN] * 5, [0.0, 9.0, 0.0, 0.0, 0.0], 4)
    assert ids == [0, 1, 2, 3]
    assert weights.isnan().all()


@pytest.mark.parametrize("route", ROUTES)
def test_infinite_logits_are_ranked_and_never_leave_the_range(route):
    ids, weights = choose_logits(route, [-INF, 1.0, INF, 2.0], [0.0] * 4, 4)
    assert ids == [2, 3, 1, 0]
    assert weights[0].isnan()
    ids, weights = choose_logits(route, [-INF, -INF, -INF], [0.0, 1.0, 1.0], 2)
    assert ids == [1, 2]
    assert (weights == 0).all()
    ids, weights = choose_logits(route, [3e38, -3e38, 0.0], [0.0] * 3, 3)
    assert ids == [0, 2, 1]
    assert weights.isfinite().all()


@pytest.mark.parametrize("route", ROUTES)
def test_padding_rows_pick_nobody(route):
    x, weight, bias, _, top_k, norm, factor = moe_gate.make_inputs(5, torch.bfloat16, 0)
    x[1] = NAN
    positions = torch.tensor([3, -1, 0, -1, 9])
    logits, ids, weights = run(route, x, weight, bias, positions, top_k, norm, factor)
    assert (ids[[1, 3]] == -1).all()
    assert (logits[[1, 3]] == 0).all()
    assert (weights[[1, 3]] == 0).all()
    assert (ids[[0, 2, 4]] >= 0).all()


def test_wrong_arguments_are_refused():
    x, weight, bias, positions, top_k, norm, factor = moe_gate.make_inputs(3, torch.bfloat16, 0)
    for route, error in (("reference", UsageError), ("native", RuntimeError)):
        with pytest.raises(error, match="moe_gate: top_k:? must lie in 1 .. 24, got 25"):
            run(route, x, weight, bias, positions, 25, norm, factor)
        with pytest.raises(error, match="moe_gate: top_k:? must lie in 1 .. 24, got 0"):
            run(route, x, weight, bias, positions, 0, norm, factor)
        with pytest.raises(error, match="moe_gate: bias:? must have shape"):
            run(route, x, weight, bias[1:].contiguous(), positions, top_k, norm, factor)
        with pytest.raises(error, match="moe_gate: weight:? must have shape"):
            run(route, x, weight[:, 1:].contiguous(), bias, positions, top_k, norm, factor)
        with pytest.raises(error, match="moe_gate: positions:? must have shape"):
            run(route, x, weight, bias, positions[1:], top_k, norm, factor)
