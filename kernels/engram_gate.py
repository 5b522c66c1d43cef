"""Add the n-gram memory to the residual streams, each through a gate of its own (spec 9.6).

    dot  = sum_d residual[t, k, d] * qk_weight[k, d] * key[t, k, d]
           / sqrt(mean_d residual^2 + eps) / sqrt(mean_d key^2 + eps) * D^-0.5
    gate = sigmoid(copysign(sqrt(max(|dot|, 1e-6)), dot))
    y[t, k] = residual[t, k] + gate * value[t]

Shapes    residual [T, n, D], key_and_value [T, (n + 1) D] (keys of the streams, then the value), both bf16 or
          both fp32; qk_weight [n, D] fp32 -> y like residual
Numerics  float32 inside, one rounding at the end. A NaN in a stream or its key makes that stream NaN; one in
          the value makes its column of D NaN.
Native    the three sums as the squares of `rms_norm.py`: 16 lanes, no fused multiply-add; sigmoid of
          `cpu/vector_math.h`.
"""

from __future__ import annotations

import torch

from deepinfer.kernels.checks import FLOAT_DTYPES, check_tensor
from deepinfer.kernels.formats import pad_rows
from deepinfer.kernels.registry import Op

MIN_DOT = 1e-6


def _check(residual: torch.Tensor, key_and_value: torch.Tensor, qk_weight: torch.Tensor) -> None:
    check_tensor("engram_gate", "residual", residual, (None, None, None), FLOAT_DTYPES)
    rows, streams, width = residual.shape
    kv_shape = (rows, (streams + 1) * width)
    check_tensor("engram_gate", "key_and_value", key_and_value, kv_shape, (residual.dtype,))
    check_tensor("engram_gate", "qk_weight", qk_weight, (streams, width), (torch.float32,))


def memory_gate(
    residual: torch.Tensor, key: torch.Tensor, qk_weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return the gate `[T, n]` of `residual` and `key`, both float32 `[T, n, D]`."""
    dot = (residual * qk_weight * key).sum(-1)
    dot = dot * torch.rsqrt(residual.pow(2).mean(-1) + eps) * torch.rsqrt(key.pow(2).mean(-1) + eps)
    dot = dot * residual.shape[-1] ** -0.5
    return torch.sigmoid(torch.copysign(dot.abs().clamp(min=MIN_DOT).sqrt(), dot))


def engram_gate_reference(
    residual: torch.Tensor, key_and_value: torch.Tensor, qk_weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """The definition; see the module text."""
    _check(residual, key_and_value, qk_weight)
    rows, streams, width = residual.shape
    residual32 = pad_rows(residual).to(torch.float32)
    parts = pad_rows(key_and_value).to(torch.float32).unflatten(1, (streams + 1, width))
    gate = memory_gate(residual32, parts[:, :-1], qk_weight, eps)
    return (residual32 + gate.unsqueeze(-1) * parts[:, -1:])[:rows].to(residual.dtype)


def engram_gate_fake(
    residual: torch.Tensor, key_and_value: torch.Tensor, qk_weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Shape rule."""
    _check(residual, key_and_value, qk_weight)
    return torch.empty_like(residual)


def _make_inputs(
    rows: int, dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    generator = torch.Generator().manual_seed(seed)
    residual = torch.randn(rows, 4, 72, generator=generator).to(dtype)
    key_and_value = torch.randn(rows, 360, generator=generator).to(dtype)
    return residual, key_and_value, torch.rand(4, 72, generator=generator), 1e-20


engram_gate = Op(
    name="engram_gate",
    schema="engram_gate(Tensor residual, Tensor key_and_value, Tensor qk_weight, float eps) -> Tensor",
    reference=engram_gate_reference,
    fake=engram_gate_fake,
    make_inputs=_make_inputs,
    tolerance={torch.float32: (1e-5, 2e-6), torch.bfloat16: (2.0**-7, 1e-5)},
    composite=True,
)
