"""RMSNorm over the last axis (spec 3.2).

    y[..., d] = weight[d] * (x[..., d] / sqrt(mean_d(x[..., d]^2) + eps))

Shapes    x [..., D] bf16 | fp32, weight [D] bf16 | fp32 -> y like x
Numerics  float32 inside, one rounding to the dtype of x at the end. A NaN or an infinity makes its row NaN.
Native    16 lanes; lane l adds x[l]^2, x[16 + l]^2, ... without fused multiply-add, the lanes are halved
          8 + 8, 4 + 4, 2 + 2, 1 + 1; then sum / D, + eps, sqrt, 1 / it.
"""

from __future__ import annotations

import torch

from deepinfer.kernels.checks import FLOAT_DTYPES, check_dtype, check_tensor, last_size
from deepinfer.kernels.formats import pad_rows
from deepinfer.kernels.registry import Op


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    check_dtype("rms_norm", "x", x, FLOAT_DTYPES)
    check_tensor("rms_norm", "weight", weight, (last_size("rms_norm", "x", x),), FLOAT_DTYPES)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The definition; see the module text."""
    _check(x, weight)
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    x32 = pad_rows(x.reshape(rows, x.shape[-1])).to(torch.float32)
    y = weight.to(torch.float32) * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps))
    return y[:rows].to(x.dtype).reshape(x.shape)


def rms_norm_fake(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Shape rule."""
    _check(x, weight)
    return torch.empty_like(x)


def _make_inputs(rows: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 128, generator=generator).to(dtype)
    return x, torch.rand(128, generator=generator).to(torch.bfloat16), 1e-20


rms_norm = Op(
    name="rms_norm",
    schema="rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    reference=rms_norm_reference,
    fake=rms_norm_fake,
    make_inputs=_make_inputs,
    tolerance={torch.float32: (1e-6, 1e-7), torch.bfloat16: (2.0**-7, 0.0)},
)
