"""Shared expert: two FP8 linears around a clamped SwiGLU, added to the sum of the routed ones (spec 8.3).

    gate, up = halves of w13 x,  gate = min(gate, limit),  up = clamp(up, -limit, limit)
    y[t] = routed[t] + w2 (gate * sigmoid(gate) * up)

Shapes    x [T, D] bf16 | fp32, routed [T, D] fp32, w13 uint8 [1, 2 I, D] and w2 uint8 [1, D, I] with their
          tile scales as in `linear_fp8.py`, plain or packed (`packing.py`) -> y [T, D] like x
Numerics  With `quantize`, the inputs of both linears go through the FP8 quantiser per `activation_group`.
          Either product and the activation between them are rounded to the dtype of x; the last sum is
          float32, rounded once. A limit of 0 clamps nothing.
Native    products as in `linear_fp8.py`.
"""

from __future__ import annotations

import torch

from deepinfer.errors import UsageError
from deepinfer.kernels.checks import FLOAT_DTYPES, check_activation_group, check_tensor
from deepinfer.kernels.formats import FP8_GROUP
from deepinfer.kernels.linear_fp8 import linear_fp8
from deepinfer.kernels.moe_experts import check_halves, clamped_swiglu
from deepinfer.kernels.packing import check_fp8_weight, scaled_outputs
from deepinfer.kernels.registry import Op


def _check(
    x: torch.Tensor,
    routed: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    group: int,
) -> None:
    check_tensor("shared_expert", "x", x, (None, None), FLOAT_DTYPES)
    width = x.shape[1]
    check_activation_group("shared_expert", "last axis of x", width, group)
    check_tensor("shared_expert", "routed", routed, tuple(x.shape), (torch.float32,))
    check_fp8_weight("shared_expert", "w13", w13, w13_scale, 1, width)
    inner = check_halves("shared_expert", w13)
    check_activation_group("shared_expert", "inner width", inner, group)
    check_fp8_weight("shared_expert", "w2", w2, w2_scale, 1, inner)
    if scaled_outputs(w2) != width:
        raise UsageError(f"must have {width} outputs, got {scaled_outputs(w2)}", where="shared_expert: w2")


def shared_expert_reference(
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
    """The definition; see the module text."""
    _check(x, routed, w13, w13_scale, w2, w2_scale, activation_group)
    gate_and_up = linear_fp8(x.unsqueeze(1), w13, w13_scale, quantize, activation_group)
    hidden = clamped_swiglu(gate_and_up, swiglu_limit).to(x.dtype)
    shared = linear_fp8(hidden, w2, w2_scale, quantize, activation_group).squeeze(1)
    return (routed + shared.float()).to(x.dtype)


def shared_expert_fake(
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
    """Shape rule."""
    _check(x, routed, w13, w13_scale, w2, w2_scale, activation_group)
    return torch.empty_like(x)


def _make_inputs(rows: int, dtype: torch.dtype, seed: int) -> tuple[*tuple[torch.Tensor, ...], float, bool]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 160, generator=generator).to(dtype)
    routed = torch.randn(rows, 160, generator=generator)
    w13 = (torch.randn(1, 128, 160, generator=generator) * 64).to(torch.float8_e4m3fn).view(torch.uint8)
    w13_scale = torch.randint(116, 119, (1, 4, 5), generator=generator, dtype=torch.uint8)
    w2 = (torch.randn(1, 160, 64, generator=generator) * 64).to(torch.float8_e4m3fn).view(torch.uint8)
    w2_scale = torch.randint(116, 119, (1, 5, 2), generator=generator, dtype=torch.uint8)
    return x, routed, w13, w13_scale, w2, w2_scale, 1.0, dtype == torch.bfloat16


shared_expert = Op(
    name="shared_expert",
    schema=(
        "shared_expert(Tensor x, Tensor routed, Tensor w13, Tensor w13_scale, Tensor w2, Tensor w2_scale, "
        "float swiglu_limit, bool quantize, "
        "int activation_group=32) -> Tensor"
    ),
    reference=shared_expert_reference,
    fake=shared_expert_fake,
    make_inputs=_make_inputs,
    # bf16: one flipped rounding may move a value to the next FP8 code, 2^-4 of it
    tolerance={torch.float32: (1e-5, 1e-5), torch.bfloat16: (2.0**-6, 2e-2)},
    composite=True,
)
