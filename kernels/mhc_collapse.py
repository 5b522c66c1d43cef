"""Input of a sublayer: residual streams weighed into one, then RMSNorm (spec 3.4, 3.2).

    y[t] = rms_norm(sum_k pre[t, k] * residual[t, k], norm_weight, eps)

Shapes    residual [T, n, D] bf16 | fp32, pre [T, n] fp32, norm_weight [D] bf16 | fp32
          -> y [T, D] like residual
Numerics  float32, products and sums rounded one by one, streams in index order; the sum is rounded to the
          dtype of residual before the norm (part of the contract of spec 14). A NaN makes its row NaN.
Native    the sum has the bits of the reference; the norm as in `rms_norm.py`.
"""

from __future__ import annotations

import torch

from deepinfer.errors import UsageError
from deepinfer.kernels.checks import FLOAT_DTYPES, check_tensor
from deepinfer.kernels.formats import ordered_sum
from deepinfer.kernels.registry import Op
from deepinfer.kernels.rms_norm import rms_norm


def _check(residual: torch.Tensor, pre: torch.Tensor, norm_weight: torch.Tensor) -> None:
    check_tensor("mhc_collapse", "residual", residual, (None, None, None), FLOAT_DTYPES)
    rows, streams, width = residual.shape
    if streams < 1:
        raise UsageError("must have at least 1 stream, got 0", where="mhc_collapse: residual")
    check_tensor("mhc_collapse", "pre", pre, (rows, streams), (torch.float32,))
    check_tensor("mhc_collapse", "norm_weight", norm_weight, (width,), FLOAT_DTYPES)


def weigh_streams(residual: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """The sum `[T, D]` before the norm, streams first to last, rounded to the dtype of `residual`."""
    return ordered_sum(pre.unsqueeze(-1) * residual.to(torch.float32), 1).to(residual.dtype)


def mhc_collapse_reference(
    residual: torch.Tensor, pre: torch.Tensor, norm_weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """The definition; see the module text."""
    _check(residual, pre, norm_weight)
    return rms_norm(weigh_streams(residual, pre), norm_weight, eps)


def mhc_collapse_fake(
    residual: torch.Tensor, pre: torch.Tensor, norm_weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Shape rule."""
    _check(residual, pre, norm_weight)
    return residual.new_empty((residual.shape[0], residual.shape[2]))


def _make_inputs(
    rows: int, dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    generator = torch.Generator().manual_seed(seed)
    residual = torch.randn(rows, 4, 72, generator=generator).to(dtype)
    weight = torch.rand(72, generator=generator).to(torch.bfloat16)
    return residual, torch.rand(rows, 4, generator=generator), weight, 1e-20


mhc_collapse = Op(
    name="mhc_collapse",
    schema="mhc_collapse(Tensor residual, Tensor pre, Tensor norm_weight, float eps) -> Tensor",
    reference=mhc_collapse_reference,
    fake=mhc_collapse_fake,
    make_inputs=_make_inputs,
    tolerance={torch.float32: (1e-6, 1e-7), torch.bfloat16: (2.0**-7, 0.0)},
    composite=True,
)
