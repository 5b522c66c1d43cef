"""Dense linear layer with bf16 or fp32 weights (spec 12.4): the bf16 linears, gate, ratio-2 compressor, head.

    y[r, n] = sum_k weight[n, k] * x[r, k]

Shapes    x [rows, K] bf16 | fp32, weight [N, K] bf16 | fp32, plain or packed (`packing.py`)
          -> y [rows, N] in out_dtype (bf16 | fp32)
Numerics  operands widened to float32, float32 sums, one rounding. A NaN in x makes its row NaN.
Native    256 inputs form a chain from zero, k ascending by fused multiply-add; chains are added in ascending
          order. The order depends on K alone, so neither the number of rows, their order, nor the number of
          threads can change a bit; nor can packing.
"""

from __future__ import annotations

import torch

from deepinfer.kernels.checks import FLOAT_DTYPES, check_out_dtype, check_tensor
from deepinfer.kernels.formats import matmul_rows
from deepinfer.kernels.packing import check_linear_weight, linear_outputs, unpack_linear
from deepinfer.kernels.registry import Op


def _check(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> None:
    check_tensor("linear", "x", x, (None, None), FLOAT_DTYPES)
    check_linear_weight("linear", "weight", weight, x.shape[1])
    check_out_dtype("linear", out_dtype)


def linear_reference(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """The definition; see the module text."""
    _check(x, weight, out_dtype)
    return matmul_rows(x, unpack_linear(weight)).to(out_dtype)


def linear_fake(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Shape rule."""
    _check(x, weight, out_dtype)
    return x.new_empty((x.shape[0], linear_outputs(weight)), dtype=out_dtype)


def _make_inputs(rows: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.dtype]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 160, generator=generator).to(dtype)
    weight = (torch.randn(72, 160, generator=generator) / 160**0.5).to(dtype)
    return x, weight, dtype


linear = Op(
    name="linear",
    schema="linear(Tensor x, Tensor weight, ScalarType out_dtype) -> Tensor",
    reference=linear_reference,
    fake=linear_fake,
    make_inputs=_make_inputs,
    tolerance={torch.float32: (1e-5, 2e-6), torch.bfloat16: (2.0**-7, 2e-6)},
)
