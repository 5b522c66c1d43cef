"""Mixture of experts: router, routed experts, shared expert (spec/model.md 8)."""

import torch
from torch import Tensor

from deepinfer.graphs.attention import project
from deepinfer.graphs.config import ModelConfig
from deepinfer.graphs.context import StepContext, ordered_sum
from deepinfer.kernels import linear, linear_fp4


def moe(ctx: StepContext, layer: int, x: Tensor) -> Tensor:
    """Return the MoE sublayer's output `[T, D]` for its normed input `x [T, D]`."""
    config, weights = ctx.config, ctx.layer_weights(layer)
    logits = ctx.tap(layer, "router_logits", linear(x, weights["ffn.gate.weight"], torch.float32))
    experts, expert_weights = route(logits, weights["ffn.gate.bias"], config)
    experts = ctx.tap(layer, "router_picks", experts)
    expert_weights = ctx.tap(layer, "router_weights", expert_weights)
    # experts are summed in ascending id; padding rows go to none
    experts, order = torch.sort(experts, dim=1)
    expert_weights = expert_weights.gather(1, order)
    experts = torch.where(ctx.rows.valid.unsqueeze(1), experts, -1)

    quantized = ctx.precision.quantized
    w13, w13_scale = weights["ffn.experts.w13.weight"], weights["ffn.experts.w13.scale"]
    w2, w2_scale = weights["ffn.experts.w2.weight"], weights["ffn.experts.w2.scale"]
    hidden = clamped_swiglu(
        linear_fp4(x.unsqueeze(1), w13, w13_scale, experts, quantized), config.swiglu_limit
    )
    hidden = (expert_weights.unsqueeze(-1) * hidden).to(x.dtype)
    routed = ordered_sum(linear_fp4(hidden, w2, w2_scale, experts, quantized).float(), 1)

    hidden = clamped_swiglu(project(ctx, weights, "ffn.shared_experts.w13", x), config.swiglu_limit).to(
        x.dtype
    )
    shared = project(ctx, weights, "ffn.shared_experts.w2", hidden)
    return (routed + shared.float()).to(x.dtype)


def route(logits: Tensor, bias: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Pick experts `[T, K]`, best first, and their weights `[T, K]` from router `logits [T, E]` (8.1).

    The bias ranks, it does not weigh; equal ranks go to the lower id.
    """
    scores = torch.nn.functional.softplus(logits).sqrt()
    _, order = torch.sort(scores + bias, dim=1, descending=True, stable=True)
    picks = order[:, : config.num_experts_per_tok]
    weights = scores.gather(1, picks)
    if config.norm_topk_prob and config.num_experts_per_tok > 1:
        weights = weights / (ordered_sum(weights, 1).unsqueeze(1) + 1e-20)
    return picks, weights * config.routed_scaling_factor


def clamped_swiglu(gate_and_up: Tensor, limit: float) -> Tensor:
    """Return `silu(gate) * up` in float32 for `[..., 2 * n]` holding gate then up (8.2).

    The gate is clamped from above only, the up projection on both sides; no clamp where `limit` is 0.
    """
    gate, up = gate_and_up.float().chunk(2, dim=-1)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate) * up
