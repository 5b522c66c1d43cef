"""Router of a layer whose experts the token alone decides (spec 16.2, 8.1).

    logit = weight x,  score = sqrt(softplus(logit)),  picks = table[token]
    w     = score[picks] / (sum of score[picks] + 1e-20) * routed_scaling_factor

Shapes    x [T, D] bf16 | fp32, weight [E, D] bf16 | fp32, plain or packed (`packing.py`), table [V, top_k]
          int64 ids of experts, token_ids [T], positions [T] int64
          -> logits [T, E] fp32, expert_ids [T, top_k] int64, expert_weights [T, top_k] fp32
Numerics  as `moe_gate.py`; weights are added in the order of the table. Padding rows (position -1) get id -1
          and zeros, whatever their token.
Native    as `moe_gate.py`.
"""

from __future__ import annotations

import torch

from deepinfer.errors import UsageError
from deepinfer.kernels.checks import FLOAT_DTYPES, check_tensor, check_values
from deepinfer.kernels.linear import linear
from deepinfer.kernels.moe_gate import Routing, expert_scores, weigh_picks
from deepinfer.kernels.packing import check_linear_weight, linear_outputs
from deepinfer.kernels.registry import Op


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    table: torch.Tensor,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    op = "moe_hash_gate"
    check_tensor(op, "x", x, (None, None), FLOAT_DTYPES)
    check_linear_weight(op, "weight", weight, x.shape[1])
    check_tensor(op, "table", table, (None, None), (torch.int64,))
    if not 1 <= table.shape[1] <= linear_outputs(weight):
        raise UsageError(
            f"must have 1 to {linear_outputs(weight)} experts per token, got {table.shape[1]}",
            where=f"{op}: table",
        )
    for name, value in (("token_ids", token_ids), ("positions", positions)):
        check_tensor(op, name, value, (x.shape[0],), (torch.int64,))


def moe_hash_gate_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    table: torch.Tensor,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
) -> Routing:
    """The definition; see the module text."""
    _check(x, weight, table, token_ids, positions)
    valid = positions >= 0
    known = ~valid | ((token_ids >= 0) & (token_ids < table.shape[0]))
    check_values("moe_hash_gate", "token_ids", known, f"must lie in 0 .. {table.shape[0] - 1}")
    logits = linear(x, weight, torch.float32)
    picks = table[torch.where(valid, token_ids, 0)]
    weights = weigh_picks(expert_scores(logits), picks, norm_topk_prob, routed_scaling_factor)
    valid = valid.unsqueeze(1)
    return torch.where(valid, logits, 0), torch.where(valid, picks, -1), torch.where(valid, weights, 0)


def moe_hash_gate_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    table: torch.Tensor,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
) -> Routing:
    """Shape rule."""
    _check(x, weight, table, token_ids, positions)
    rows, picks = x.shape[0], table.shape[1]
    return (
        x.new_empty((rows, linear_outputs(weight)), dtype=torch.float32),
        positions.new_empty((rows, picks)),
        x.new_empty((rows, picks), dtype=torch.float32),
    )


def _make_inputs(
    rows: int, dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, bool, float]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 96, generator=generator).to(dtype)
    weight = (torch.randn(24, 96, generator=generator) / 96**0.5).to(torch.bfloat16)
    table = torch.rand(50, 24, generator=generator).argsort(1)[:, :6].contiguous()
    token_ids, positions = torch.randint(50, (rows,), generator=generator), torch.arange(rows)
    positions[2::7] = -1
    return x, weight, table, token_ids, positions, True, 1.5


moe_hash_gate = Op(
    name="moe_hash_gate",
    schema=(
        "moe_hash_gate(Tensor x, Tensor weight, Tensor table, Tensor token_ids, Tensor positions, "
        "bool norm_topk_prob, float routed_scaling_factor) "
        "-> (Tensor logits, Tensor expert_ids, Tensor expert_weights)"
    ),
    reference=moe_hash_gate_reference,
    fake=moe_hash_gate_fake,
    make_inputs=_make_inputs,
    tolerance={torch.float32: (1e-5, 2e-6), torch.bfloat16: (1e-5, 2e-6)},
    composite=True,
)
