"""Mixture of experts: router, routed experts, shared expert (spec/model.md 8)."""

from torch import Tensor

from deepinfer.graphs.context import StepContext
from deepinfer.kernels import moe_experts, moe_gate, shared_expert


def moe(ctx: StepContext, layer: int, x: Tensor) -> Tensor:
    """Return the MoE sublayer's output `[T, D]` for its normed input `x [T, D]`."""
    config, weights, quantized = ctx.config, ctx.layer_weights(layer), ctx.precision.quantized
    logits, experts, expert_weights = moe_gate(
        x,
        weights["ffn.gate.weight"],
        weights["ffn.gate.bias"],
        ctx.inputs.positions,
        config.num_experts_per_tok,
        config.norm_topk_prob,
        config.routed_scaling_factor,
    )
    ctx.tap(layer, "router_logits", logits)
    experts = ctx.tap(layer, "router_picks", experts)
    expert_weights = ctx.tap(layer, "router_weights", expert_weights)
    routed = moe_experts(
        x,
        experts,
        expert_weights,
        weights["ffn.experts.w13.weight"],
        weights["ffn.experts.w13.scale"],
        weights["ffn.experts.w2.weight"],
        weights["ffn.experts.w2.scale"],
        config.swiglu_limit,
        quantized,
    )
    out: Tensor = shared_expert(
        x,
        routed,
        weights["ffn.shared_experts.w13.weight"],
        weights["ffn.shared_experts.w13.scale"],
        weights["ffn.shared_experts.w2.weight"],
        weights["ffn.shared_experts.w2.scale"],
        config.swiglu_limit,
        quantized,
    )
    return out
