"""Mixture of experts: router, routed experts, shared expert (spec/model.md 8)."""

from torch import Tensor

from deepinfer.graphs.context import StepContext
from deepinfer.kernels import moe_experts, moe_gate, moe_hash_gate, shared_expert


def moe(ctx: StepContext, layer: int, x: Tensor) -> Tensor:
    """Return the MoE sublayer's output `[T, D]` for its normed input `x [T, D]`."""
    config, weights, quantized = ctx.config, ctx.layer_weights(layer), ctx.quantizes_inputs
    scaling = (config.norm_topk_prob, config.routed_scaling_factor)
    gate, positions = weights["ffn.gate.weight"], ctx.inputs.positions
    if config.is_hash_routed(layer):
        routing = moe_hash_gate(
            x, gate, weights["ffn.gate.tid2eid"], ctx.inputs.token_ids, positions, *scaling
        )
    else:
        routing = moe_gate(x, gate, weights["ffn.gate.bias"], positions, config.num_experts_per_tok, *scaling)
    logits, experts, expert_weights = routing
    ctx.tap(layer, "router_logits", logits)
    experts = ctx.tap(layer, "router_picks", experts)
    expert_weights = ctx.tap(layer, "router_weights", expert_weights)
    routed = moe_experts(
        x,
        experts,
        expert_weights,
        *weights.matrix("ffn.experts.w13"),
        *weights.matrix("ffn.experts.w2"),
        config.swiglu_limit,
        quantized,
        *ctx.input_groups,
    )
    out: Tensor = shared_expert(
        x,
        routed,
        *weights.matrix("ffn.shared_experts.w13"),
        *weights.matrix("ffn.shared_experts.w2"),
        config.swiglu_limit,
        quantized,
        *ctx.input_groups,
    )
    return out
