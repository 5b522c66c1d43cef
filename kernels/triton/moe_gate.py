"""Router: the linear layer, then one program per row that picks; see `kernels/moe_gate.py`."""

import torch
import triton
import triton.language as tl

from deepinfer.kernels.moe_gate import EPSILON, Routing, moe_gate_fake
from deepinfer.kernels.packing import unpack_linear
from deepinfer.kernels.triton.launch import launch, power_of_two
from deepinfer.kernels.triton.linear import project


@triton.jit
def softplus(x):
    """log(1 + e^x), as torch: x itself above 20."""
    exponential = tl.exp(tl.minimum(x, 20.0))
    one_more = 1.0 + exponential
    # log(1 + e) loses the digits of a small e; the quotient gives them back
    small = one_more == 1.0
    quotient = exponential / tl.where(small, 1.0, one_more - 1.0)
    value = tl.where(small, exponential, tl.log(one_more) * quotient)
    return tl.where(x > 20.0, x, tl.where(x != x, x, value))


@triton.jit
def sort_key(values):
    """float32 -> int32 of the same order; NaN above everything, -0 equal to 0; never the least int32."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    key = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    return tl.where(values != values, 0x7FFFFFFF, key)


@triton.jit
def _route_kernel(
    logits,
    bias,
    positions,
    expert_ids,
    expert_weights,
    factor,
    EPS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_TOP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    valid = tl.load(positions + row) >= 0
    expert = tl.arange(0, BLOCK)
    inside = expert < EXPERTS
    values = tl.load(logits + row * EXPERTS + expert, mask=inside, other=0.0)
    score = tl.sqrt_rn(softplus(values))
    ranks = sort_key(score + tl.load(bias + expert, mask=inside, other=0.0))
    ranks = tl.where(inside, ranks, -0x80000000)
    place = tl.arange(0, BLOCK_TOP)
    ids = tl.full((BLOCK_TOP,), -1, tl.int32)
    weights = tl.zeros((BLOCK_TOP,), tl.float32)
    total = 0.0
    for pick in range(TOP_K):
        best = tl.max(ranks, axis=0)
        chosen = tl.min(tl.where(ranks == best, expert, BLOCK), axis=0)
        weight = tl.sum(tl.where(expert == chosen, score, 0.0), axis=0)
        ids = tl.where(place == pick, chosen, ids)
        weights = tl.where(place == pick, weight, weights)
        total += weight
        ranks = tl.where(expert == chosen, -0x80000000, ranks)
    if NORMALIZE:
        weights = tl.div_rn(weights, tl.full((BLOCK_TOP,), 0.0, tl.float32) + (total + EPS))
    stored = place < TOP_K
    ids = tl.where(valid, ids, -1)
    weights = tl.where(valid, weights * factor, 0.0)
    tl.store(expert_ids + row * TOP_K + place, ids.to(tl.int64), mask=stored)
    tl.store(expert_weights + row * TOP_K + place, weights, mask=stored)
    # what a padding row's logits were is nobody's business
    tl.store(logits + row * EXPERTS + expert, tl.zeros((BLOCK,), tl.float32), mask=inside & (valid == 0))


def moe_gate(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    positions: torch.Tensor,
    top_k: int,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
) -> Routing:
    """x [T, D], weight [E, D], bias [E], positions [T] -> logits [T, E], ids and weights [T, top_k]."""
    outputs = moe_gate_fake(x, weight, bias, positions, top_k, norm_topk_prob, routed_scaling_factor)
    logits, expert_ids, expert_weights = outputs
    project(x, unpack_linear(weight), logits)
    experts = bias.shape[0]
    launch(
        _route_kernel,
        (x.shape[0],),
        *(logits, bias, positions, expert_ids, expert_weights, routed_scaling_factor),
        warps=1 if experts <= 512 else 4,
        EPS=EPSILON,
        EXPERTS=experts,
        TOP_K=top_k,
        NORMALIZE=norm_topk_prob and top_k > 1,
        BLOCK=power_of_two(experts),
        BLOCK_TOP=power_of_two(top_k),
    )
    return outputs
