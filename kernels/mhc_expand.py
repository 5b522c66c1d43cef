"""Residual streams after a sublayer: its output spread over the mixed streams (spec 3.5).

    z[t, i] = post[t, i] * y[t] + sum_j comb[t, j, i] * residual[t, j]

Shapes    y [T, D], residual [T, n, D], both bf16 or both fp32; post [T, n], comb [T, n, n] (source, target),
          both fp32 -> z [T, n, D] like residual
Numerics  float32, products and sums rounded one by one, source streams in index order, then post * y + that
          sum, one rounding at the end. A NaN of y or of a stream touches its column of D alone.
Native    the same operations, hence the same bits.
"""

from __future__ import annotations

import torch

from deepinfer.errors import UsageError
from deepinfer.kernels.checks import FLOAT_DTYPES, check_tensor
from deepinfer.kernels.formats import ordered_sum
from deepinfer.kernels.registry import Op


def _check(y: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> None:
    check_tensor("mhc_expand", "y", y, (None, None), FLOAT_DTYPES)
    rows, width = y.shape
    check_tensor("mhc_expand", "residual", residual, (rows, None, width), (y.dtype,))
    streams = residual.shape[1]
    if streams < 1:
        raise UsageError("must have at least 1 stream, got 0", where="mhc_expand: residual")
    check_tensor("mhc_expand", "post", post, (rows, streams), (torch.float32,))
    check_tensor("mhc_expand", "comb", comb, (rows, streams, streams), (torch.float32,))


def mhc_expand_reference(
    y: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """The definition; see the module text."""
    _check(y, residual, post, comb)
    mixed = ordered_sum(comb.unsqueeze(-1) * residual.to(torch.float32).unsqueeze(2), 1)
    return (post.unsqueeze(-1) * y.to(torch.float32).unsqueeze(1) + mixed).to(residual.dtype)


def mhc_expand_fake(
    y: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """Shape rule."""
    _check(y, residual, post, comb)
    return torch.empty_like(residual)


def _make_inputs(
    rows: int, dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randn(rows, 72, generator=generator).to(dtype)
    residual = torch.randn(rows, 4, 72, generator=generator).to(dtype)
    comb = torch.rand(rows, 4, 4, generator=generator) / 2
    return y, residual, torch.rand(rows, 4, generator=generator) * 2, comb


mhc_expand = Op(
    name="mhc_expand",
    schema="mhc_expand(Tensor y, Tensor residual, Tensor post, Tensor comb) -> Tensor",
    reference=mhc_expand_reference,
    fake=mhc_expand_fake,
    make_inputs=_make_inputs,
    tolerance={torch.float32: (0.0, 0.0), torch.bfloat16: (0.0, 0.0)},
    composite=True,
)
