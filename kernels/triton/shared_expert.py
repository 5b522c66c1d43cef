"""Shared expert: two FP8 linear layers, activation between, sum; see `kernels/shared_expert.py`."""

import torch
import triton
import triton.language as tl

from deepinfer.kernels.formats import FP8_GROUP
from deepinfer.kernels.packing import scaled_outputs
from deepinfer.kernels.shared_expert import shared_expert_fake
from deepinfer.kernels.triton.launch import blocks, launch
from deepinfer.kernels.triton.linear_fp8 import activations, project_fp8
from deepinfer.kernels.triton.moe_experts import clamped_swiglu
from deepinfer.kernels.triton.numbers import round_to, to_float32

_COLUMNS = 1024


@triton.jit
def _add_routed_kernel(routed, shared, y, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * SIZE
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    total = tl.load(routed + row + column, mask=inside, other=0.0)
    total += to_float32(tl.load(shared + row + column, mask=inside, other=0.0))
    tl.store(y + row + column, round_to(total, y.dtype.element_ty), mask=inside)


def shared_expert(
    x: torch.Tensor,
    routed: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    swiglu_limit: float,
    quantize: bool,
    activation_group: int = FP8_GROUP,
) -> torch.Tensor:
    """x [T, D], routed [T, D] fp32, w13 [1, 2 I, D], w2 [1, D, I] and their scales -> y [T, D] like x."""
    y = shared_expert_fake(x, routed, w13, w13_scale, w2, w2_scale, swiglu_limit, quantize, activation_group)
    rows, size = x.shape
    gate_and_up = x.new_empty((rows, 1, scaled_outputs(w13)))
    project_fp8(activations(x.unsqueeze(1), quantize, activation_group), w13, w13_scale, gate_and_up)
    hidden = clamped_swiglu(gate_and_up, None, swiglu_limit)
    shared = x.new_empty((rows, 1, size))
    project_fp8(activations(hidden, quantize, activation_group), w2, w2_scale, shared)
    launch(
        _add_routed_kernel, (rows, blocks(size, _COLUMNS)), *(routed, shared, y), SIZE=size, BLOCK=_COLUMNS
    )
    return y
