"""Ops as training sees them: matrices in float32 masters, rounding straight through, gradients everywhere.

Each function has the arguments of its op. Packed weights are replaced by float32 matrices of the unpacked
shape, to which `round_tiles`, `round_fp4` and `round_bf16` give the values that a format holds; activations
are rounded where the op rounds them. The gradient passes every rounding as if there were none. Sums may be in
any order: this is not the definition, and a test holds it close to it.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.kernels.mhc_mix import mhc_coefficients
from deepinfer.kernels.quantize_fp4 import dequantize_fp4 as from_fp4
from deepinfer.kernels.quantize_fp4 import quantize_fp4 as to_fp4
from deepinfer.kernels.quantize_fp8 import dequantize_fp8 as from_fp8
from deepinfer.kernels.quantize_fp8 import quantize_fp8 as to_fp8
from deepinfer.kernels.registry import routed_ops

TILE = 32
_native = False  # whether the op library is loaded, so that rounding may use it


def use_native_rounding(enabled: bool) -> None:
    """Let roundings run in the op library, which must be loaded; results are the same."""
    global _native
    _native = enabled


class _Straight(torch.autograd.Function):
    """Forward a rounded value, backward the gradient untouched."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, round_value: Callable[[Tensor], Tensor]) -> Tensor:
        return round_value(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def round_fp8(x: Tensor) -> Tensor:
    """Round activations through FP8 in groups of 32 along the last axis, straight through."""

    def rounded(value: Tensor) -> Tensor:
        if _native:
            return from_fp8.native(to_fp8.native(value.contiguous()), value.dtype)
        return from_fp8.reference(to_fp8.reference(value), value.dtype)

    return _Straight.apply(x, rounded)


def round_fp4(x: Tensor, scale_format: str) -> Tensor:
    """Round through FP4 with the given scale format along the last axis, straight through."""

    def rounded(value: Tensor) -> Tensor:
        if _native:
            record = to_fp4.native(value.contiguous(), scale_format)
            return from_fp4.native(record, scale_format, value.dtype)
        record = to_fp4.reference(value, scale_format)
        return from_fp4.reference(record, scale_format, value.dtype)

    return _Straight.apply(x, rounded)


def tile_scales(weight: Tensor) -> Tensor:
    """Return the power-of-two scale of every 32 x 32 tile of `weight [..., N, K]`: `[..., N/32, K/32]`."""
    tiles = weight.unflatten(-1, (-1, TILE)).unflatten(-3, (-1, TILE))
    amax = tiles.abs().amax(dim=(-1, -3)).clamp(min=1e-4)
    return torch.exp2(torch.ceil(torch.log2(amax / 448)))


def round_tiles(weight: Tensor) -> Tensor:
    """Round a matrix through E4M3 with one power-of-two scale per 32 x 32 tile, straight through."""

    def rounded(value: Tensor) -> Tensor:
        scale = tile_scales(value).repeat_interleave(TILE, -2).repeat_interleave(TILE, -1)
        return (value / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale

    return _Straight.apply(weight, rounded)


def round_bf16(weight: Tensor) -> Tensor:
    """Round to bfloat16 values, straight through."""
    return _Straight.apply(weight, lambda value: value.bfloat16().float())


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As the op."""
    return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)


def linear(x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
    """As the op."""
    return F.linear(x.float(), weight.float()).to(out_dtype)


def linear_fp8(x: Tensor, weight: Tensor, scale: Tensor | None, quantize_activation: bool) -> Tensor:
    """As the op, `weight [G, N, K]` float32 in the values that it has on disk; `scale` is not used."""
    if quantize_activation:
        x = round_fp8(x)
    if weight.shape[0] == 1:
        return F.linear(x[:, 0], weight[0]).unsqueeze(1)
    return torch.einsum("rgk,gnk->rgn", x, weight)


def linear_fp4(
    x: Tensor, weight: Tensor, scale: Tensor | None, expert_ids: Tensor, quantize_activation: bool
) -> Tensor:
    """As the op, `weight [E, N, K]` float32 in the values that it has on disk; `scale` is not used.

    Pairs of row and expert are sorted by expert, so that each expert multiplies one slice.
    """
    if quantize_activation:
        x = round_fp8(x)
    rows, picks = expert_ids.shape
    flat = expert_ids.flatten()
    order = flat.argsort()
    source = order if x.shape[1] == picks and picks > 1 else order // picks
    sorted_x = F.embedding(source, x.flatten(0, 1))
    counts = torch.bincount(flat, minlength=weight.shape[0]).tolist()
    pieces = [F.linear(piece, matrix) for piece, matrix in zip(sorted_x.split(counts), weight, strict=True)]
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    return F.embedding(place, torch.cat(pieces)).unflatten(0, (rows, picks))


def mhc_mix(
    residual: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    sinkhorn_iters: int,
    rms_eps: float,
    hc_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As the op."""
    x = residual.float().flatten(1)
    mixes = F.linear(x, fn) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + rms_eps)
    return mhc_coefficients(mixes, base, scale, sinkhorn_iters, hc_eps)


def dequantize_fp8(table: Tensor, out_dtype: torch.dtype) -> Tensor:
    """As the op, for a memory table whose rows are float32 already: rounded straight through."""
    return round_fp8(table).to(out_dtype)


TRAINING_FORMS: dict[str, Callable[..., Any]] = {
    "rms_norm": rms_norm,
    "linear": linear,
    "linear_fp8": linear_fp8,
    "linear_fp4": linear_fp4,
    "mhc_mix": mhc_mix,
    "dequantize_fp8": dequantize_fp8,
}


@contextlib.contextmanager
def differentiable_ops() -> Iterator[None]:
    """Within the block every op call runs its training form; ops without one fail with a KeyError."""
    with routed_ops(lambda op: TRAINING_FORMS[op.name]):
        yield
