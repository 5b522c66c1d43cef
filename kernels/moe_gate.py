"""Router of the experts: scores, picks and their weights (spec 8.1).

    logit = weight x,  score = sqrt(softplus(logit))
    picks = the top_k of score + bias, best first; equal ranks go to the lower id
    w     = score[picks] / (sum of score[picks] + 1e-20) * routed_scaling_factor

Shapes    x [T, D] bf16 | fp32, weight [E, D] bf16 | fp32, plain or packed (`packing.py`), bias [E] fp32,
          positions [T] int64
          -> logits [T, E] fp32, expert_ids [T, top_k] int64, expert_weights [T, top_k] fp32
Numerics  float32 throughout, the weights are added best first. The bias ranks, it does not weigh. Without
          `norm_topk_prob`, or for top_k = 1, nothing is divided. Padding rows (position -1) get id -1 and
          zeros. A NaN ranks above everything, NaN among NaN by id: the ids are always distinct ids of
          experts, and the weights of a row with a NaN logit are NaN (with `norm_topk_prob`), so it shows.
Native    logits with the bits of `linear`; softplus of `cpu/vector_math.h`, which is 0 where e^logit is not a
          normal number: there the bias alone ranks, then the id.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from deepinfer.errors import UsageError
from deepinfer.kernels.checks import FLOAT_DTYPES, check_tensor
from deepinfer.kernels.formats import ordered_sum, pad_rows
from deepinfer.kernels.linear import linear
from deepinfer.kernels.packing import check_linear_weight, linear_outputs
from deepinfer.kernels.registry import Op

Routing = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
EPSILON = 1e-20


def _check(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, positions: torch.Tensor, top_k: int
) -> None:
    check_tensor("moe_gate", "x", x, (None, None), FLOAT_DTYPES)
    check_linear_weight("moe_gate", "weight", weight, x.shape[1])
    experts = linear_outputs(weight)
    check_tensor("moe_gate", "bias", bias, (experts,), (torch.float32,))
    check_tensor("moe_gate", "positions", positions, (x.shape[0],), (torch.int64,))
    if not 1 <= top_k <= experts:
        raise UsageError(f"must lie in 1 .. {experts}, got {top_k}", where="moe_gate: top_k")


def route(
    logits: torch.Tensor, bias: torch.Tensor, top_k: int, norm_topk_prob: bool, routed_scaling_factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The second half of the definition: logits [T, E] -> picks and weights [T, top_k], best first."""
    scores = expert_scores(logits)
    _, order = torch.sort(scores + bias, dim=1, descending=True, stable=True)
    picks = order[:, :top_k]
    return picks, weigh_picks(scores, picks, norm_topk_prob, routed_scaling_factor)


def expert_scores(logits: torch.Tensor) -> torch.Tensor:
    """The score of every expert, like `logits [T, E]`."""
    return F.softplus(pad_rows(logits)).sqrt()[: logits.shape[0]]


def weigh_picks(
    scores: torch.Tensor, picks: torch.Tensor, norm_topk_prob: bool, routed_scaling_factor: float
) -> torch.Tensor:
    """Weights of the `picks [T, k]`, added in their order."""
    weights = scores.gather(1, picks)
    if norm_topk_prob and picks.shape[1] > 1:
        weights = weights / (ordered_sum(weights, 1).unsqueeze(1) + EPSILON)
    return weights * routed_scaling_factor


def moe_gate_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    positions: torch.Tensor,
    top_k: int,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
) -> Routing:
    """The definition; see the module text."""
    _check(x, weight, bias, positions, top_k)
    logits = linear(x, weight, torch.float32)
    picks, weights = route(logits, bias, top_k, norm_topk_prob, routed_scaling_factor)
    valid = (positions >= 0).unsqueeze(1)
    return torch.where(valid, logits, 0), torch.where(valid, picks, -1), torch.where(valid, weights, 0)


def moe_gate_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    positions: torch.Tensor,
    top_k: int,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
) -> Routing:
    """Shape rule."""
    _check(x, weight, bias, positions, top_k)
    rows = x.shape[0]
    return (
        bias.new_empty((rows, bias.shape[0])),
        positions.new_empty((rows, top_k)),
        bias.new_empty((rows, top_k)),
    )


def _make_inputs(
    rows: int, dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, bool, float]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 96, generator=generator).to(dtype)
    weight = (torch.randn(24, 96, generator=generator) / 96**0.5).to(torch.bfloat16)
    bias = torch.randn(24, generator=generator) / 4
    positions = torch.arange(rows)
    positions[2::7] = -1
    return x, weight, bias, positions, 6, True, 1.5


moe_gate = Op(
    name="moe_gate",
    schema=(
        "moe_gate(Tensor x, Tensor weight, Tensor bias, Tensor positions, int top_k, bool norm_topk_prob, "
        "float routed_scaling_factor) -> (Tensor logits, Tensor expert_ids, Tensor expert_weights)"
    ),
    reference=moe_gate_reference,
    fake=moe_gate_fake,
    make_inputs=_make_inputs,
    tolerance={torch.float32: (1e-5, 2e-6), torch.bfloat16: (1e-5, 2e-6)},
    composite=True,
)
