"""Routed experts: two expert linear layers, activation between, sum; see `kernels/moe_experts.py`."""

import torch
import triton
import triton.language as tl

from deepinfer.kernels.formats import FP8_GROUP
from deepinfer.kernels.moe_experts import moe_experts_fake
from deepinfer.kernels.packing import scaled_outputs
from deepinfer.kernels.triton.launch import blocks, launch
from deepinfer.kernels.triton.linear_fp4 import expert_tiles, project_fp4
from deepinfer.kernels.triton.linear_fp8 import activations
from deepinfer.kernels.triton.numbers import round_to, to_float32

_COLUMNS = 1024


@triton.jit
def _clamped_swiglu_kernel(
    gate_and_up,
    weights,
    hidden,
    LIMIT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """hidden [n, I] from gate_and_up [n, 2 I], times weights [n]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < INNER
    start = gate_and_up + row * (2 * INNER) + column
    gate = to_float32(tl.load(start, mask=inside, other=0.0))
    up = to_float32(tl.load(start + INNER, mask=inside, other=0.0))
    if LIMIT > 0:
        # comparisons let a NaN through, as the definition's clamp does
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    value = gate * tl.div_rn(1.0, 1.0 + tl.exp(-gate)) * up
    if WEIGHTED:
        value = tl.load(weights + row) * value
    tl.store(hidden + row * INNER + column, round_to(value, hidden.dtype.element_ty), mask=inside)


def clamped_swiglu(gate_and_up: torch.Tensor, weights: torch.Tensor | None, limit: float) -> torch.Tensor:
    """`[..., 2 I]` holding gate then up -> `[..., I]` of the same dtype, times `weights [...]` if given."""
    inner = gate_and_up.shape[-1] // 2
    hidden = gate_and_up.new_empty((*gate_and_up.shape[:-1], inner))
    launch(
        _clamped_swiglu_kernel,
        (hidden.numel() // inner, blocks(inner, _COLUMNS)),
        *(gate_and_up, gate_and_up if weights is None else weights, hidden),
        LIMIT=float(limit),
        WEIGHTED=weights is not None,
        INNER=inner,
        BLOCK=_COLUMNS,
    )
    return hidden


@triton.jit
def _sum_picks_kernel(parts, y, PICKS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """y [T, D] float32, the sum of parts [T, P, D], first to last."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    start = parts + row * PICKS * SIZE + column
    total = to_float32(tl.load(start, mask=inside, other=0.0))
    for pick in range(1, PICKS):
        total += to_float32(tl.load(start + pick * SIZE, mask=inside, other=0.0))
    tl.store(y + row * SIZE + column, total, mask=inside)


def moe_experts(
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
    """x [T, D], ids and weights [T, P], w13 [E, 2 I, D/2], w2 [E, D, I/2], scales -> y [T, D] fp32."""
    y = moe_experts_fake(
        x, expert_ids, expert_weights, w13, w13_scale, w2, w2_scale, swiglu_limit, quantize, activation_group
    )
    rows, size = x.shape
    if not rows:
        return y
    picks = expert_ids.shape[1]
    ids, order = torch.sort(expert_ids, dim=1, stable=True)  # a row's experts are added by rising id
    tiles = expert_tiles(ids, w13.shape[0])
    gate_and_up = x.new_zeros((rows, picks, scaled_outputs(w13)))
    project_fp4(activations(x.unsqueeze(1), quantize, activation_group), w13, w13_scale, tiles, gate_and_up)
    hidden = clamped_swiglu(gate_and_up, expert_weights.gather(1, order), swiglu_limit)
    parts = x.new_zeros((rows, picks, size))
    project_fp4(activations(hidden, quantize, activation_group), w2, w2_scale, tiles, parts)
    launch(
        _sum_picks_kernel,
        (rows, blocks(size, _COLUMNS)),
        *(parts, y),
        PICKS=picks,
        SIZE=size,
        BLOCK=_COLUMNS,
    )
    return y
