"""Look up FP8 records of the n-gram table and lay them side by side (spec 9.5).

    y[t, c * d + i] = e4m3(embed[ids[t, c], i]) * 2^(embed[ids[t, c], d + i / 32] - 127)

Shapes    embed uint8 [rows, d + d / 32] (d codes, then their scales; d a multiple of 32), ids [T, columns]
          int64 -> y [T, columns * d] bf16 | fp32
Numerics  exact in bf16 for real tables; rounded once where a scale makes the value subnormal.
Native    the same bits. The table may be larger than memory: only the records asked for are touched, and they
          are asked for some records ahead. An id outside the table is an error.
"""

from __future__ import annotations

import torch

from deepinfer.kernels.checks import check_multiple, check_out_dtype, check_tensor
from deepinfer.kernels.formats import FP8_GROUP
from deepinfer.kernels.quantize_fp8 import dequantize_fp8, quantize_fp8
from deepinfer.kernels.registry import Op


def _check(embed: torch.Tensor, ids: torch.Tensor, out_dtype: torch.dtype) -> int:
    """Return d."""
    check_tensor("engram_gather", "embed", embed, (None, None), (torch.uint8,))
    check_tensor("engram_gather", "ids", ids, (None, None), (torch.int64,))
    check_multiple("engram_gather", "last axis of embed", embed.shape[1], FP8_GROUP + 1)
    check_out_dtype("engram_gather", out_dtype)
    return embed.shape[1] // (FP8_GROUP + 1) * FP8_GROUP


def engram_gather_reference(embed: torch.Tensor, ids: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """The definition; see the module text."""
    _check(embed, ids, out_dtype)
    return dequantize_fp8.reference(embed[ids], out_dtype).flatten(1)


def engram_gather_fake(embed: torch.Tensor, ids: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Shape rule."""
    size = _check(embed, ids, out_dtype)
    return embed.new_empty((ids.shape[0], ids.shape[1] * size), dtype=out_dtype)


def _make_inputs(rows: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.dtype]:
    generator = torch.Generator().manual_seed(seed)
    embed = quantize_fp8.reference(torch.randn(200, 64, generator=generator))
    return embed, torch.randint(0, 200, (rows, 6), generator=generator), dtype


engram_gather = Op(
    name="engram_gather",
    schema="engram_gather(Tensor embed, Tensor ids, ScalarType out_dtype) -> Tensor",
    reference=engram_gather_reference,
    fake=engram_gather_fake,
    make_inputs=_make_inputs,
    tolerance={torch.float32: (0.0, 0.0), torch.bfloat16: (0.0, 0.0)},
    composite=True,
)
