"""Router, clamped SwiGLU and expert against published vectors and the vendor's results (spec 8, 18.6)."""

import dataclasses

import pytest
import torch
from golden import rms_ratio
from graph_steps import bf16_ulps
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.graphs.context import Scope
from deepinfer.kernels import linear_fp8, moe_experts, moe_gate, shared_expert
from deepinfer.kernels.moe_experts import clamped_swiglu


def gate(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, config) -> tuple[torch.Tensor, ...]:
    """Logits, picks and weights of the router under a configuration."""
    count, normalised = config.num_experts_per_tok, config.norm_topk_prob
    factor = config.routed_scaling_factor
    return moe_gate(x, weight, bias, torch.arange(len(x)), count, normalised, factor)


def route(logits: torch.Tensor, bias: torch.Tensor, config) -> tuple[torch.Tensor, torch.Tensor]:
    """The router's choice for given logits: they are its input, the weight is the identity."""
    same, picks, weights = gate(logits, torch.eye(logits.shape[1]), bias, config)
    assert torch.equal(same, logits)
    return picks, weights


def top(config, count: int, **changes):
    return dataclasses.replace(config, num_experts_per_tok=count, **changes)


def test_router_of_the_published_vector(config):
    logits = torch.tensor([[0.0, 1, -1, 2, 3, -2]])
    bias = torch.tensor([0.5, 0, 0.6, -0.4, -1, 0.9])
    picks, weights = route(logits, bias, top(config, 3))
    assert picks.tolist() == [[0, 5, 2]]
    assert weights[0].tolist() == pytest.approx([0.71422143, 0.30563204, 0.48014652], abs=1e-7)


@pytest.mark.parametrize(("bias", "image"), [("bias", False), ("bias_vl", True)])
def test_router_agrees_with_the_vendor(golden, config, bias, image):
    """The image rows differ only in the bias they are ranked with."""
    kernels = golden["kernels"]
    rows = kernels["router.image_mask"].bool() == image
    assert rows.any()
    names = ("x", "weight", bias)
    _, picks, weights = gate(*(kernels[f"router.{name}"] for name in names), config)
    assert torch.equal(picks[rows].short(), kernels["router.picks"][rows])
    assert torch.allclose(weights[rows], kernels["router.weights"][rows], rtol=1e-6, atol=1e-7)


def test_the_bias_changes_picks_and_not_weights(config):
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    cfg = top(config, 2, norm_topk_prob=False, routed_scaling_factor=1.0)
    plain, plain_weights = route(logits, torch.zeros(4), cfg)
    biased, biased_weights = route(logits, torch.tensor([0.0, 0.0, 0.0, 5.0]), cfg)
    assert plain.tolist() == [[0, 1]]
    assert biased.tolist() == [[3, 0]]
    assert biased_weights[0, 1] == plain_weights[0, 0]
    assert biased_weights[0, 0].item() == pytest.approx(0.55969785)


def test_equal_ranks_go_to_the_lower_id(config):
    picks, weights = route(torch.zeros(2, 16), torch.zeros(16), top(config, 4))
    assert picks.tolist() == [[0, 1, 2, 3]] * 2
    assert torch.equal(weights, torch.full((2, 4), 0.375))
    bias = torch.zeros(16)
    bias[[9, 12, 15]] = 1
    assert route(torch.zeros(1, 16), bias, top(config, 4))[0].tolist() == [[9, 12, 15, 0]]


@pytest.mark.parametrize("count", [1, 3])
def test_weights_are_not_normalised_when_the_config_says_so_or_one_is_picked(config, count):
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    cfg = top(config, count, norm_topk_prob=count == 1)
    _, weights = route(logits, torch.zeros(4), cfg)
    scores = torch.log1p(logits.exp()).sqrt()[:, :count]
    assert torch.allclose(weights, scores * cfg.routed_scaling_factor, rtol=1e-6)


def test_large_logits_neither_overflow_nor_vanish(config):
    _, weights = route(torch.tensor([[1e4, 400.0, -200.0, -1e4]]), torch.zeros(4), top(config, 4))
    assert weights.isfinite().all()
    assert weights[0, 0].item() == pytest.approx(1.5 * 100 / 120, rel=1e-4)


@settings(max_examples=50, deadline=None)
@given(
    logits=st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=8, max_size=8),
    bias=st.lists(st.sampled_from([-0.5, 0.0, 0.25]), min_size=8, max_size=8),
    count=st.integers(2, 8),
)
def test_router_equals_its_plain_definition(config, logits, bias, count):
    cfg = top(config, count)
    scores = torch.nn.functional.softplus(torch.tensor(logits)).sqrt()
    ranks = (scores + torch.tensor(bias)).tolist()
    expected = sorted(range(8), key=lambda expert: (-ranks[expert], expert))[:count]
    picks, weights = route(torch.tensor([logits]), torch.tensor(bias), cfg)
    assert picks[0].tolist() == expected
    total = sum(scores[expert].item() for expert in expected)
    assert weights[0].tolist() == pytest.approx(
        [scores[expert].item() / total * cfg.routed_scaling_factor for expert in expected], rel=1e-5
    )
    assert weights.sum().item() == pytest.approx(cfg.routed_scaling_factor, rel=1e-5)


def silu(value: float) -> float:
    return value * torch.sigmoid(torch.tensor(value)).item()


@pytest.mark.parametrize(
    ("gate", "up", "limit", "expected"),
    [
        (0.5, 0.25, 1.0, silu(0.5) * 0.25),
        (3.0, 0.25, 1.0, silu(1.0) * 0.25),  # the gate is clamped from above
        (-30.0, 0.5, 1.0, silu(-30.0) * 0.5),  # and not from below
        (0.5, 4.0, 1.0, silu(0.5)),  # up is clamped on both sides
        (0.5, -4.0, 1.0, -silu(0.5)),
        (3.0, -4.0, 0.0, silu(3.0) * -4.0),  # no limit, no clamp
        (12.0, 12.0, 10.0, silu(10.0) * 10.0),
        (-1.5, 1.0, 1.0, silu(-1.5)),
    ],
)
def test_swiglu_clamps(gate, up, limit, expected):
    result = clamped_swiglu(torch.tensor([[gate, up]], dtype=torch.bfloat16), limit)
    assert result.dtype == torch.float32
    assert result.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("weighted", "output"), [(True, "y"), (False, "y_shared")])
def test_an_expert_agrees_with_the_vendor(golden, weighted, output):
    """FP8 linears, clamp 1, the route weight before the rounding and before w2 (8.2)."""
    stored = golden["kernels"]

    def stacked(*names: str) -> torch.Tensor:
        return torch.cat([stored[f"expert.{name}"].view(torch.uint8) for name in names]).unsqueeze(0)

    x = stored["expert.x"]
    gate_and_up = linear_fp8(x.unsqueeze(1), stacked("w1", "w3"), stacked("w1_scale", "w3_scale"), True)
    assert (gate_and_up.abs() > 1).any()  # the clamp has something to do
    hidden = clamped_swiglu(gate_and_up, 1.0)
    if weighted:
        hidden = hidden * stored["expert.route_weight"].float().unsqueeze(1)
    y = linear_fp8(hidden.to(x.dtype), stacked("w2"), stacked("w2_scale"), True).squeeze(1)
    if not weighted:
        matrices = (stacked("w1", "w3"), stacked("w1_scale", "w3_scale"), stacked("w2"), stacked("w2_scale"))
        assert torch.equal(shared_expert(x, torch.zeros(x.shape), *matrices, 1.0, True), y)
    ulps = bf16_ulps(y, stored[f"expert.{output}"])
    assert (ulps > 0).float().mean() <= 0.01
    assert torch.allclose(y.float(), stored[f"expert.{output}"].float(), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("layer", range(8))
def test_golden_inputs_give_the_golden_picks_and_outputs(golden, config, weights, layer):
    """Router, routed experts and shared expert, each fed with what the reference feeds it (8.1-8.4)."""
    stored, scope = golden["intermediates"], Scope(weights, layer)
    x, picks = stored[f"L{layer}.ffn_x"], stored[f"L{layer}.router_picks"].long()
    shares = stored[f"L{layer}.router_weights"].float()
    _, got_picks, got_shares = gate(x, scope["ffn.gate.weight"], scope["ffn.gate.bias"], config)
    assert torch.equal(got_picks, picks)
    assert torch.allclose(got_shares, shares, atol=1e-6)

    def matrices(stem: str) -> list[torch.Tensor]:
        return [scope[f"ffn.{stem}.{name}.{part}"] for name in ("w13", "w2") for part in ("weight", "scale")]

    settings = (config.swiglu_limit, True)
    routed = moe_experts(x, picks, shares, *matrices("experts"), *settings)
    assert routed.dtype == torch.float32
    y = shared_expert(x, routed, *matrices("shared_experts"), *settings)
    assert y.dtype == torch.bfloat16
    assert rms_ratio(y, stored[f"L{layer}.ffn_y"]) <= 2e-3
