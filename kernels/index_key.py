"""Keys of the indexer: one per compressed entry, from its latent (spec 7.2).

    key[t] = rope(rms_norm(round(wk latent[t])), (position div ratio) * ratio)

Shapes    latent [T, K] (not rotated), wk [d, K] (plain or packed), norm_weight [d], all bf16 | fp32;
          table [P, r] fp32; region [blocks, entries, record] of any outer strides: FP4 records with E8M0
          scales (`quantize`) or float32; positions [T], request_index [T], block_table [R, B] int64
          -> nothing
Effects   rows that close a group, (position + 1) mod ratio = 0, write entry position div ratio. Other rows
          and padding rows (position -1) are not read.
Numerics  float32 inside, rounded to the dtype of the latent after the product, the norm and the rotation. A
          NaN makes its key NaN.
Native    products as `linear.py`, norm as `rms_norm.py`.
"""

from __future__ import annotations

import torch

from deepinfer.kernels.checks import FLOAT_DTYPES, check_tensor
from deepinfer.kernels.compress import check_record_inputs, rotated_to_group, write_entries
from deepinfer.kernels.formats import FP4_GROUP
from deepinfer.kernels.index_topk import check_paged_rows
from deepinfer.kernels.linear import linear
from deepinfer.kernels.packing import check_linear_weight, linear_outputs
from deepinfer.kernels.quantize_fp4 import quantize_fp4
from deepinfer.kernels.registry import Op
from deepinfer.kernels.rms_norm import rms_norm


def index_key_fake(
    latent: torch.Tensor,
    wk: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    table: torch.Tensor,
    region: torch.Tensor,
    positions: torch.Tensor,
    request_index: torch.Tensor,
    block_table: torch.Tensor,
    ratio: int,
    quantize: bool,
) -> None:
    """Shape rule: checks alone."""
    op = "index_key"
    check_tensor(op, "latent", latent, (None, None), FLOAT_DTYPES)
    check_linear_weight(op, "wk", wk, latent.shape[1])
    check_paged_rows(op, latent.shape[0], positions, request_index, block_table, ratio)
    check_record_inputs(
        op, norm_weight, table, region, linear_outputs(wk), FP4_GROUP["e8m0"] if quantize else 0
    )


def index_key_reference(
    latent: torch.Tensor,
    wk: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    table: torch.Tensor,
    region: torch.Tensor,
    positions: torch.Tensor,
    request_index: torch.Tensor,
    block_table: torch.Tensor,
    ratio: int,
    quantize: bool,
) -> None:
    """The definition; see the module text."""
    rows_of_entries = (positions, request_index, block_table, ratio)
    index_key_fake(latent, wk, norm_weight, eps, table, region, *rows_of_entries, quantize)
    key = rms_norm(linear(latent, wk, latent.dtype), norm_weight, eps)
    record = rotated_to_group(key, table, positions, ratio)
    if quantize:
        record = quantize_fp4(record, "e8m0")
    closes = (positions >= 0) & ((positions + 1) % ratio == 0)
    write_entries(region, record, closes, *rows_of_entries)


def _make_inputs(rows: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor | int | float | bool, ...]:
    generator = torch.Generator().manual_seed(seed)
    ratio, quantize = 1 + seed % 2, dtype == torch.bfloat16
    latent = torch.randn(rows, 64, generator=generator).to(dtype)
    wk = torch.randn(32, 64, generator=generator).div(8).to(dtype)
    angles = torch.randn(16 * ratio, 8, generator=generator) * 3
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    region = torch.zeros(
        rows + 1, 16, 17 if quantize else 32, dtype=torch.uint8 if quantize else torch.float32
    )
    positions, own = torch.randint(-1, 16 * ratio, (rows,), generator=generator), torch.arange(rows)
    norm_weight = torch.rand(32, generator=generator) + 0.5
    return (
        *(
            latent,
            wk,
            norm_weight,
            1e-20,
            table,
            region,
            positions,
            own,
            own.unsqueeze(1) + 1,
            ratio,
            quantize,
        ),
    )


index_key = Op(
    name="index_key",
    schema=(
        "index_key(Tensor latent, Tensor wk, Tensor norm_weight, float eps, Tensor table, Tensor(a!) region, "
        "Tensor positions, Tensor request_index, Tensor block_table, int ratio, bool quantize) -> ()"
    ),
    reference=index_key_reference,
    fake=index_key_fake,
    make_inputs=_make_inputs,
    tolerance={torch.float32: (2e-5, 2e-6), torch.bfloat16: (2.0**-6, 2e-6)},
    composite=True,
)
