"""Hyper-connection coefficients of one sublayer: pre, post, Sinkhorn-normalised mixing matrix (spec 3.3).

Shapes    residual [rows, n, D] bf16 | fp32; fn [(2 + n) n, n D], base [(2 + n) n], scale [3], all fp32
          -> pre [rows, n], post [rows, n], comb [rows, n, n] (first index = source stream), all fp32
Numerics  float32 throughout; the scale of the RMS is applied after the matrix product. `sinkhorn_iters`
          counts column passes and is at least 1, the last pass is over columns. A NaN makes its row NaN.
Native    16 lanes; lane l adds the products k = l, 16 + l, ... by fused multiply-add and the squares as
          `rms_norm.py`; lanes are halved as there. exp and sigmoid of `cpu/vector_math.h`, sums over n in
          index order.
"""

from __future__ import annotations

import torch

from deepinfer.errors import UsageError
from deepinfer.kernels.checks import FLOAT_DTYPES, check_tensor
from deepinfer.kernels.formats import matmul_rows, pad_rows
from deepinfer.kernels.registry import Op

Coefficients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
MAX_STREAMS = 16


def _check(
    residual: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, sinkhorn_iters: int
) -> None:
    check_tensor("mhc_mix", "residual", residual, (None, None, None), FLOAT_DTYPES)
    _, streams, width = residual.shape
    if not 1 <= streams <= MAX_STREAMS:
        raise UsageError(f"must have 1 to {MAX_STREAMS} streams, got {streams}", where="mhc_mix: residual")
    outputs = (2 + streams) * streams
    check_tensor("mhc_mix", "fn", fn, (outputs, streams * width), (torch.float32,))
    check_tensor("mhc_mix", "base", base, (outputs,), (torch.float32,))
    check_tensor("mhc_mix", "scale", scale, (3,), (torch.float32,))
    if sinkhorn_iters < 1:
        raise UsageError(f"must be at least 1, got {sinkhorn_iters}", where="mhc_mix: sinkhorn_iters")


def mhc_coefficients(
    mixes: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, sinkhorn_iters: int, hc_eps: float
) -> Coefficients:
    """The second half of the definition, from m: mixes [rows, (2 + n) n] fp32 -> pre, post, comb."""
    streams = int((mixes.shape[1] + 1) ** 0.5) - 1
    pre_logits, post_logits, comb_logits = mixes.split((streams, streams, streams * streams), dim=1)
    base_pre, base_post, base_comb = base.split((streams, streams, streams * streams))
    pre = torch.sigmoid(pre_logits * scale[0] + base_pre) + hc_eps
    post = 2 * torch.sigmoid(post_logits * scale[1] + base_post)
    comb = (comb_logits * scale[2] + base_comb).unflatten(1, (streams, streams))
    comb = comb.softmax(-1) + hc_eps
    comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    for _ in range(sinkhorn_iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + hc_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    return pre, post, comb


def mhc_mix_reference(
    residual: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    sinkhorn_iters: int,
    rms_eps: float,
    hc_eps: float,
) -> Coefficients:
    """The definition; see the module text."""
    _check(residual, fn, base, scale, sinkhorn_iters)
    rows = residual.shape[0]
    x = pad_rows(residual).to(torch.float32).flatten(1)
    mixes = matmul_rows(x, fn) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + rms_eps)
    pre, post, comb = mhc_coefficients(mixes, base, scale, sinkhorn_iters, hc_eps)
    return pre[:rows].contiguous(), post[:rows].contiguous(), comb[:rows].contiguous()


def mhc_mix_fake(
    residual: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    sinkhorn_iters: int,
    rms_eps: float,
    hc_eps: float,
) -> Coefficients:
    """Shape rule."""
    _check(residual, fn, base, scale, sinkhorn_iters)
    rows, streams, _ = residual.shape
    return (
        fn.new_empty((rows, streams)),
        fn.new_empty((rows, streams)),
        fn.new_empty((rows, streams, streams)),
    )


def _make_inputs(
    rows: int, dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, float, float]:
    generator = torch.Generator().manual_seed(seed)
    residual = torch.randn(rows, 4, 40, generator=generator).to(dtype)
    fn = torch.randn(24, 160, generator=generator) / 160**0.5
    base = torch.randn(24, generator=generator) * 0.5
    return residual, fn, base, torch.tensor([0.7, 1.3, 2.0]), 20, 1e-20, 1e-6


mhc_mix = Op(
    name="mhc_mix",
    schema=(
        "mhc_mix(Tensor residual, Tensor fn, Tensor base, Tensor scale, int sinkhorn_iters, float rms_eps, "
        "float hc_eps) -> (Tensor, Tensor, Tensor)"
    ),
    reference=mhc_mix_reference,
    fake=mhc_mix_fake,
    make_inputs=_make_inputs,
    tolerance={torch.float32: (1e-5, 2e-6), torch.bfloat16: (1e-5, 2e-6)},
)
