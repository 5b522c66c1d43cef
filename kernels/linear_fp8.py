"""Linear layer: E4M3 weights, one power-of-two scale per 32 x 32 tile, G independent groups (spec 12.4).

    y[r, g, n] = sum_k W[g, n, k] * x[r, g, k]
    W[g, n, k] = e4m3(weight[g, n, k]) * 2^(scale[g, n/32, k/32] - 127)

Shapes    x [rows, G, K] bf16 | fp32, weight uint8 [G, N, K], scale uint8 [G, ceil(N/32), ceil(K/32)], plain
          or packed (`packing.py`), or W unquantised, bf16 | fp32 with scale [0, 0, 0]
          -> y [rows, G, N] like x
Numerics  With `quantize_activation`, x first goes through the FP8 quantiser per `activation_group` inputs
          (spec 12.2; K must be a multiple of it, and it one of 32). Dequantised operands are exact in
          float32, sums are float32, one rounding at the end. Without it (wo_a, float32 precision) x is
          taken as it is; the weights are exact in either case. A NaN in x makes its row (of its group) NaN.
Native    32 inputs of a scale tile form a chain from zero, k ascending by fused multiply-add of the unscaled
          codes; chains are added by fma(chain, scale, sum), ascending. One order for every number of rows.
"""

from __future__ import annotations

import torch

from deepinfer.kernels.checks import FLOAT_DTYPES, check_activation_group, check_tensor
from deepinfer.kernels.formats import (
    FP8_GROUP,
    e4m3_to_float,
    e8m0_to_float,
    matmul_rows,
    rounded_to_fp8,
)
from deepinfer.kernels.packing import check_fp8_weight, scaled_outputs, unpack_groups, unpack_linear_fp8
from deepinfer.kernels.registry import Op


def _check(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, quantize_activation: bool, group: int
) -> None:
    check_tensor("linear_fp8", "x", x, (None, None, None), FLOAT_DTYPES)
    _, groups, inputs = x.shape
    check_fp8_weight("linear_fp8", "weight", weight, scale, groups, inputs)
    if quantize_activation:
        check_activation_group("linear_fp8", "last axis of x", inputs, group)


def dequantize_tiles(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Plain or packed weight with its scales, if it has any -> float32 [G, N, K], exact."""
    if weight.is_floating_point():
        return unpack_groups(weight).to(torch.float32)
    if weight.dim() == 4:
        weight, rows = unpack_linear_fp8(weight, scale)
        return e4m3_to_float(weight) * e8m0_to_float(rows).repeat_interleave(FP8_GROUP, 2)
    _, outputs, inputs = weight.shape
    factor = e8m0_to_float(scale).repeat_interleave(FP8_GROUP, 1)[:, :outputs]
    return e4m3_to_float(weight) * factor.repeat_interleave(FP8_GROUP, 2)[:, :, :inputs]


def linear_fp8_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    quantize_activation: bool,
    activation_group: int = FP8_GROUP,
) -> torch.Tensor:
    """The definition; see the module text."""
    _check(x, weight, scale, quantize_activation, activation_group)
    x32 = rounded_to_fp8(x, activation_group) if quantize_activation else x.to(torch.float32)
    matrices = dequantize_tiles(weight, scale)
    products = [matmul_rows(x32[:, group], matrices[group]) for group in range(x.shape[1])]
    return torch.stack(products, dim=1).to(x.dtype)


def linear_fp8_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    quantize_activation: bool,
    activation_group: int = FP8_GROUP,
) -> torch.Tensor:
    """Shape rule."""
    _check(x, weight, scale, quantize_activation, activation_group)
    return x.new_empty((x.shape[0], x.shape[1], scaled_outputs(weight)))


def _make_inputs(
    rows: int, dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 1, 160, generator=generator).to(dtype)
    weight = (torch.randn(1, 72, 160, generator=generator) * 64).to(torch.float8_e4m3fn).view(torch.uint8)
    scale = torch.randint(115, 119, (1, 3, 5), generator=generator, dtype=torch.uint8)
    return x, weight, scale, dtype == torch.bfloat16


linear_fp8 = Op(
    name="linear_fp8",
    schema=(
        "linear_fp8(Tensor x, Tensor weight, Tensor scale, bool quantize_activation, "
        "int activation_group=32) -> Tensor"
    ),
    reference=linear_fp8_reference,
    fake=linear_fp8_fake,
    make_inputs=_make_inputs,
    tolerance={torch.float32: (1e-5, 2e-6), torch.bfloat16: (2.0**-7, 2e-6)},
)
