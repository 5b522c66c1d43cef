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
from deepinfer.kernels.rope import rotate
from deepinfer.kernels.sequences import take_rows
from deepinfer.kernels.training_library import (
    MAX_ITERATIONS,
    STREAMS,
    Collapse,
    Expand,
    Mix,
    training_library_fits,
)

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
        whole = value.shape[-1] % TILE == 0 and value.shape[-2] % TILE == 0
        if whole and training_library_fits(value, 0, 0):
            tiles: Tensor = torch.ops.deepinfer_training.round_tiles(value.contiguous())
            return tiles
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


def rope(x: Tensor, table: Tensor, positions: Tensor, inverse: bool) -> Tensor:
    """As the op; no row is padding."""
    return rotate(x, table[positions], inverse)


def window_record(
    kv: Tensor, norm_weight: Tensor, eps: float, table: Tensor, positions: Tensor, quantize: bool
) -> Tensor:
    """As the op, but the record stays a vector."""
    rotated = rope(rms_norm(kv, norm_weight, eps), table, positions, False)
    return round_fp8(rotated) if quantize else rotated


def mhc_collapse(residual: Tensor, pre: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """As the op."""
    if training_library_fits(residual, residual.shape[2], 0) and residual.shape[1] == STREAMS:
        collapsed = Collapse.apply(residual, pre)
    else:
        collapsed = torch.einsum("tn,tnd->td", pre, residual)
    return rms_norm(collapsed, norm_weight, eps)


def mhc_expand(y: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """As the op."""
    if training_library_fits(residual, residual.shape[2], 0) and residual.shape[1] == STREAMS:
        expanded: Tensor = Expand.apply(y.contiguous(), residual, post, comb)
        return expanded
    return torch.einsum("tn,td->tnd", post, y) + torch.einsum("tmn,tmd->tnd", comb, residual)


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
    fits = training_library_fits(mixes, 0, 0) and residual.shape[1] == STREAMS
    if fits and sinkhorn_iters <= MAX_ITERATIONS:
        pre, post, comb = Mix.apply(mixes.contiguous(), base, scale, sinkhorn_iters, hc_eps)
        return pre, post, comb
    return mhc_coefficients(mixes, base, scale, sinkhorn_iters, hc_eps)


def moe_gate(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    positions: Tensor,
    top_k: int,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As the op; the choice has no gradient, the weights have."""
    logits = linear(x, weight, torch.float32)
    scores = F.softplus(logits).sqrt()
    picks = torch.topk(scores.detach() + bias, top_k, dim=1).indices
    weights = scores.gather(1, picks)
    if norm_topk_prob and top_k > 1:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    return logits, picks, weights * routed_scaling_factor


def clamped_swiglu(gate_and_up: Tensor, limit: float) -> Tensor:
    """Return `silu(gate) * up` for `[..., 2 * n]` holding gate then up, both clamped (spec 8.2)."""
    gate, up = gate_and_up.chunk(2, dim=-1)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate) * up


def moe_experts(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    swiglu_limit: float,
    quantize: bool,
) -> Tensor:
    """As the op, `w13 [E, 2 n, D]` and `w2 [E, D, n]` float32 in the values that they have on disk.

    Pairs of row and expert are sorted by expert, so that each expert multiplies one slice.
    """
    rows, picks = expert_ids.shape
    flat = expert_ids.flatten()
    order = flat.argsort()
    counts = torch.bincount(flat, minlength=w13.shape[0]).tolist()
    share = expert_weights.flatten()[order].unsqueeze(1)
    inputs = take_rows(round_fp8(x) if quantize else x, order // picks)
    outputs = []
    for piece, part, up, down in zip(inputs.split(counts), share.split(counts), w13, w2, strict=True):
        hidden = part * clamped_swiglu(F.linear(piece, up), swiglu_limit)
        outputs.append(F.linear(round_fp8(hidden) if quantize else hidden, down))
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    return take_rows(torch.cat(outputs), place).unflatten(0, (rows, picks)).sum(1)


def shared_expert(
    x: Tensor,
    routed: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    swiglu_limit: float,
    quantize: bool,
) -> Tensor:
    """As the op."""
    hidden = clamped_swiglu(linear_fp8(x.unsqueeze(1), w13, None, quantize).squeeze(1), swiglu_limit)
    return routed + linear_fp8(hidden.unsqueeze(1), w2, None, quantize).squeeze(1)


def engram_gather(embed: Tensor, ids: Tensor, out_dtype: torch.dtype) -> Tensor:
    """As the op, for a table whose rows are float32 vectors: rounded straight through."""
    return round_fp8(take_rows(embed, ids)).to(out_dtype).flatten(1)


def engram_gate(residual: Tensor, key_and_value: Tensor, qk_weight: Tensor, eps: float) -> Tensor:
    """As the op."""
    hidden = residual.shape[-1]
    key = key_and_value[:, :-hidden].unflatten(1, residual.shape[1:])
    dot = (residual * qk_weight * key).sum(-1)
    dot = dot * torch.rsqrt(residual.pow(2).mean(-1) + eps) * torch.rsqrt(key.pow(2).mean(-1) + eps)
    dot = dot * hidden**-0.5
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp(min=1e-6).sqrt(), dot))
    return residual + gate.unsqueeze(-1) * key_and_value[:, -hidden:].unsqueeze(1)


TRAINING_FORMS: dict[str, Callable[..., Any]] = {
    form.__name__: form
    for form in (
        rms_norm,
        linear,
        linear_fp8,
        rope,
        window_record,
        mhc_mix,
        mhc_collapse,
        mhc_expand,
        moe_gate,
        moe_experts,
        shared_expert,
        engram_gather,
        engram_gate,
    )
}


@contextlib.contextmanager
def differentiable_ops() -> Iterator[None]:
    """Within the block every op call runs its training form; ops without one fail with a KeyError."""
    with routed_ops(lambda op: TRAINING_FORMS[op.name]):
        yield
