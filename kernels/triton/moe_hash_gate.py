"""Router by token: the linear layer, then one program per row that weighs; see `kernels/moe_hash_gate.py`."""

import torch
import triton
import triton.language as tl

from deepinfer.kernels.moe_gate import EPSILON, Routing
from deepinfer.kernels.moe_hash_gate import moe_hash_gate_fake
from deepinfer.kernels.packing import linear_outputs, unpack_linear
from deepinfer.kernels.triton.launch import launch, power_of_two
from deepinfer.kernels.triton.linear import project
from deepinfer.kernels.triton.moe_gate import softplus


@triton.jit
def _hash_route_kernel(
    logits,
    table,
    token_ids,
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
    token = tl.load(token_ids + row, mask=valid, other=0)
    place = tl.arange(0, BLOCK_TOP)
    stored = place < TOP_K
    listed = stored & valid
    ids = tl.load(table + token * TOP_K + place, mask=listed, other=-1)
    values = tl.load(logits + row * EXPERTS + ids, mask=listed, other=0.0)
    weights = tl.where(listed, tl.sqrt_rn(softplus(values)), 0.0)
    if NORMALIZE:
        total = 0.0
        for pick in range(TOP_K):  # in the order of the table
            total += tl.sum(tl.where(place == pick, weights, 0.0), axis=0)
        weights = tl.div_rn(weights, tl.full((BLOCK_TOP,), 0.0, tl.float32) + (total + EPS))
    tl.store(expert_ids + row * TOP_K + place, ids, mask=stored)
    tl.store(expert_weights + row * TOP_K + place, tl.where(listed, weights * factor, 0.0), mask=stored)
    # what a padding row's logits were is nobody's business
    expert = tl.arange(0, BLOCK)
    hidden = (expert < EXPERTS) & (valid == 0)
    tl.store(logits + row * EXPERTS + expert, tl.zeros((BLOCK,), tl.float32), mask=hidden)


def moe_hash_gate(
    x: torch.Tensor,
    weight: torch.Tensor,
    table: torch.Tensor,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
) -> Routing:
    """x [T, D], weight [E, D], table [V, k], token_ids, positions [T] -> logits, ids, weights."""
    outputs = moe_hash_gate_fake(
        x, weight, table, token_ids, positions, norm_topk_prob, routed_scaling_factor
    )
    logits, expert_ids, expert_weights = outputs
    project(x, unpack_linear(weight), logits)
    experts, top_k = linear_outputs(weight), table.shape[1]
    launch(
        _hash_route_kernel,
        (x.shape[0],),
        *(logits, table, token_ids, positions, expert_ids, expert_weights, routed_scaling_factor),
        warps=1 if experts <= 512 else 4,
        EPS=EPSILON,
        EXPERTS=experts,
        TOP_K=top_k,
        NORMALIZE=norm_topk_prob and top_k > 1,
        BLOCK=power_of_two(experts),
        BLOCK_TOP=power_of_two(top_k),
    )
    return outputs
