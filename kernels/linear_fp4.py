"""Expert linear layer: packed E2M1 weights, one power-of-two scale per row and 32 inputs (spec 8.2, 12.4).

    y[r, p] = W[expert_ids[r, p]] . x[r, p]    (x[r, 0] if x has one vector per row; 0 where the id is -1)

Shapes    x [rows, 1 | P, K] bf16 | fp32, weight uint8 [E, N, K/2], scale uint8 [E, N, K/32], plain or packed
          (`packing.py`), or W unquantised, bf16 | fp32 [E, N, K] with scale [0, 0, 0]; expert_ids int64
          [rows, P] in -1 .. E-1 -> y [rows, P, N] like x
Numerics  as `linear_fp8.py`. Weights of an expert that no row uses are not read.
Native    order of sums as in `linear_fp8.py`; the rows of one expert share each decoded block of weights.
"""

from __future__ import annotations

import torch

from deepinfer.errors import UsageError
from deepinfer.kernels.checks import FLOAT_DTYPES, check_activation_group, check_tensor
from deepinfer.kernels.formats import (
    FP8_GROUP,
    dequantize_fp4_groups,
    matmul_rows,
    rounded_to_fp8,
)
from deepinfer.kernels.packing import check_fp4_weight, scaled_outputs, unpack_groups, unpack_linear_fp4
from deepinfer.kernels.registry import Op


def _check(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, expert_ids: torch.Tensor, group: int
) -> None:
    check_tensor("linear_fp4", "x", x, (None, None, None), FLOAT_DTYPES)
    rows, vectors, inputs = x.shape
    check_activation_group("linear_fp4", "last axis of x", inputs, group)
    check_fp4_weight("linear_fp4", "weight", weight, scale, inputs)
    check_tensor("linear_fp4", "expert_ids", expert_ids, (rows, None), (torch.int64,))
    if vectors not in (1, expert_ids.shape[1]):
        raise UsageError(
            f"must have 1 or {expert_ids.shape[1]} vectors per row, got {vectors}", where="linear_fp4: x"
        )


def dequantize_experts(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Plain or packed weight with its scales, if it has any -> float32 [E, N, K], exact."""
    if weight.is_floating_point():
        return unpack_groups(weight).to(torch.float32)
    weight, scale = unpack_linear_fp4(weight, scale)
    experts, outputs, half = weight.shape
    matrices = torch.empty(experts, outputs, 2 * half)
    for expert in range(experts):  # one by one, since decoding takes several times the memory of its result
        matrices[expert] = _matrix(weight, scale, expert)
    return matrices


def _matrix(weight: torch.Tensor, scale: torch.Tensor, expert: int) -> torch.Tensor:
    """The matrix [N, K] of one expert, float32 unless it is unquantised."""
    if weight.is_floating_point():
        return weight[expert]
    return dequantize_fp4_groups(weight[expert], scale[expert], "e8m0")


def linear_fp4_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    expert_ids: torch.Tensor,
    quantize_activation: bool,
    activation_group: int = FP8_GROUP,
) -> torch.Tensor:
    """The definition; see the module text. Dequantises one expert at a time, so memory is bounded."""
    _check(x, weight, scale, expert_ids, activation_group)
    if weight.is_floating_point():
        weight = unpack_groups(weight)
    else:
        weight, scale = unpack_linear_fp4(weight, scale)
    rows, picks = expert_ids.shape
    used = [expert for expert in expert_ids.unique().tolist() if expert != -1]
    if used and not 0 <= min(used) <= max(used) < weight.shape[0]:
        raise UsageError(
            f"must lie in -1 .. {weight.shape[0] - 1}, got {min(used)} .. {max(used)}",
            where="linear_fp4: expert_ids",
        )
    x32 = rounded_to_fp8(x, activation_group) if quantize_activation else x.to(torch.float32)
    pairs = x32.expand(rows, picks, x.shape[2])
    y = x32.new_zeros(rows, picks, weight.shape[1])
    for expert in used:
        row, pick = (expert_ids == expert).nonzero(as_tuple=True)
        y[row, pick] = matmul_rows(pairs[row, pick], _matrix(weight, scale, expert))
    return y.to(x.dtype)


def linear_fp4_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    expert_ids: torch.Tensor,
    quantize_activation: bool,
    activation_group: int = FP8_GROUP,
) -> torch.Tensor:
    """Shape rule."""
    _check(x, weight, scale, expert_ids, activation_group)
    return x.new_empty((expert_ids.shape[0], expert_ids.shape[1], scaled_outputs(weight)))


def _make_inputs(
    rows: int, dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, bool]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 1, 160, generator=generator).to(dtype)
    weight = torch.randint(0, 256, (6, 72, 80), generator=generator, dtype=torch.uint8)
    scale = torch.randint(121, 124, (6, 72, 5), generator=generator, dtype=torch.uint8)
    expert_ids = torch.randint(-1, 6, (rows, 3), generator=generator)
    return x, weight, scale, expert_ids, dtype == torch.bfloat16


linear_fp4 = Op(
    name="linear_fp4",
    schema=(
        "linear_fp4(Tensor x, Tensor weight, Tensor scale, Tensor expert_ids, bool quantize_activation, "
        "int activation_group=32) -> Tensor"
    ),
    reference=linear_fp4_reference,
    fake=linear_fp4_fake,
    make_inputs=_make_inputs,
    tolerance={torch.float32: (1e-5, 2e-6), torch.bfloat16: (2.0**-7, 2e-6)},
)
