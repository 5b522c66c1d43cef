"""Routed experts: two FP4 linears around a clamped SwiGLU, summed over a row's experts (spec 8.2, 8.3).

    gate, up = halves of w13[e] x,  gate = min(gate, limit),  up = clamp(up, -limit, limit)
    y[t] = sum_e w2[e] (weight[t, e] * gate * sigmoid(gate) * up)        e over the row's experts, ascending

Shapes    x [T, D] bf16 | fp32, expert_ids [T, P] int64 in -1 .. E-1 in any order (-1: none), expert_weights
          [T, P] fp32, w13 uint8 [E, 2 I, D/2] with w13_scale [E, 2 I, D/32], w2 uint8 [E, D, I/2] with
          w2_scale [E, D, I/32], plain or packed (`packing.py`) -> y [T, D] fp32
Numerics  With `quantize`, the inputs of both linears go through the FP8 quantiser per `activation_group`.
          Either product and the activation between them are rounded to the dtype of x, the sum over experts
          is float32. A limit of 0 clamps nothing. The weight enters before w2. Experts that no row uses are
          not read.
Native    products as in `linear_fp4.py`: rows are grouped by expert, one row's experts run side by side.
"""

from __future__ import annotations

import torch

from deepinfer.errors import UsageError
from deepinfer.kernels.checks import FLOAT_DTYPES, check_activation_group, check_multiple, check_tensor
from deepinfer.kernels.formats import FP8_GROUP, ordered_sum, pad_rows
from deepinfer.kernels.linear_fp4 import linear_fp4
from deepinfer.kernels.packing import check_fp4_weight, scaled_outputs
from deepinfer.kernels.registry import Op


def _check(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    group: int,
) -> None:
    check_tensor("moe_experts", "x", x, (None, None), FLOAT_DTYPES)
    rows, width = x.shape
    check_activation_group("moe_experts", "last axis of x", width, group)
    check_tensor("moe_experts", "expert_ids", expert_ids, (rows, None), (torch.int64,))
    check_multiple("moe_experts", "number of experts per row", expert_ids.shape[1], 1)
    check_tensor("moe_experts", "expert_weights", expert_weights, tuple(expert_ids.shape), (torch.float32,))
    check_fp4_weight("moe_experts", "w13", w13, w13_scale, width)
    inner = check_halves("moe_experts", w13)
    check_activation_group("moe_experts", "inner width", inner, group)
    check_fp4_weight("moe_experts", "w2", w2, w2_scale, inner)
    if w2.shape[0] != w13.shape[0] or scaled_outputs(w2) != width:
        raise UsageError(
            f"must have {w13.shape[0]} experts with {width} outputs, "
            f"got {w2.shape[0]} with {scaled_outputs(w2)}",
            where="moe_experts: w2",
        )


def check_halves(op: str, w13: torch.Tensor) -> int:
    """Return the inner width of an expert, half the outputs of `w13`; it must be a multiple of 32."""
    check_multiple(op, "outputs of w13", scaled_outputs(w13), 2 * FP8_GROUP)
    return scaled_outputs(w13) // 2


def clamped_swiglu(gate_and_up: torch.Tensor, limit: float) -> torch.Tensor:
    """Return `silu(gate) * up` in float32 for `[rows, ..., 2 I]` holding gate then up.

    The gate is clamped from above only, the up projection on both sides; no clamp where `limit` is 0.
    """
    gate, up = pad_rows(gate_and_up.float()).chunk(2, dim=-1)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * torch.sigmoid(gate) * up)[: gate_and_up.shape[0]]


def moe_experts_reference(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    swiglu_limit: float,
    quantize: bool,
    activation_group: int = FP8_GROUP,
) -> torch.Tensor:
    """The definition; see the module text."""
    _check(x, expert_ids, expert_weights, w13, w13_scale, w2, w2_scale, activation_group)
    ids, order = torch.sort(expert_ids, dim=1, stable=True)
    weights = expert_weights.gather(1, order)
    gate_and_up = linear_fp4(x.unsqueeze(1), w13, w13_scale, ids, quantize, activation_group)
    hidden = (weights.unsqueeze(-1) * clamped_swiglu(gate_and_up, swiglu_limit)).to(x.dtype)
    return ordered_sum(linear_fp4(hidden, w2, w2_scale, ids, quantize, activation_group).float(), 1)


def moe_experts_fake(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    swiglu_limit: float,
    quantize: bool,
    activation_group: int = FP8_GROUP,
) -> torch.Tensor:
    """Shape rule."""
    _check(x, expert_ids, expert_weights, w13, w13_scale, w2, w2_scale, activation_group)
    return x.new_empty(x.shape, dtype=torch.float32)


def _make_inputs(rows: int, dtype: torch.dtype, seed: int) -> tuple[*tuple[torch.Tensor, ...], float, bool]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 160, generator=generator).to(dtype)
    # distinct experts, best first as the router gives them; the last may be none
    ids = torch.rand(rows, 6, generator=generator).argsort(1)[:, :3].contiguous()
    ids[:, 2] = torch.where(torch.rand(rows, generator=generator) < 0.3, -1, ids[:, 2])
    weights = torch.rand(rows, 3, generator=generator)
    w13 = torch.randint(0, 256, (6, 128, 80), generator=generator, dtype=torch.uint8)
    w13_scale = torch.randint(121, 124, (6, 128, 5), generator=generator, dtype=torch.uint8)
    w2 = torch.randint(0, 256, (6, 160, 32), generator=generator, dtype=torch.uint8)
    w2_scale = torch.randint(121, 124, (6, 160, 2), generator=generator, dtype=torch.uint8)
    return x, ids, weights, w13, w13_scale, w2, w2_scale, 1.0, dtype == torch.bfloat16


moe_experts = Op(
    name="moe_experts",
    schema=(
        "moe_experts(Tensor x, Tensor expert_ids, Tensor expert_weights, Tensor w13, Tensor w13_scale, "
        "Tensor w2, Tensor w2_scale, float swiglu_limit, bool quantize, "
        "int activation_group=32) -> Tensor"
    ),
    reference=moe_experts_reference,
    fake=moe_experts_fake,
    make_inputs=_make_inputs,
    # bf16: one flipped rounding may move a value to the next FP8 code, 2^-4 of it
    tolerance={torch.float32: (1e-5, 1e-5), torch.bfloat16: (2.0**-6, 2e-2)},
    composite=True,
)
