"""KV compression with a bias per position, over windows that may overlap (spec 16.2: V4's C4 and C128).

    u = wkv x,  g = wgate x + bias[position mod ratio]
    pool[t, d]   = sum_i u[i, d] * exp(g[i, d]) / sum_j exp(g[j, d])      i, j: the members of row t's entry
    latent[t]    = rms_norm(round(pool[t]))
    entry        = position div ratio, written when (position + 1) mod ratio is 0

The members are the rows of the window that row t closes. With `overlap` u and g have two halves: of the rows
of that window the second one counts, and the rows of the window before it are members with their first.

Shapes    x [T, D], wkv and wgate [w, D] (plain or packed), norm_weight [d], all bf16 | fp32, w = 2 d with
          `overlap`, else d; bias [ratio, w] fp32; open_group [slots, L, 2 w] fp32, a value, then a gate with
          its bias, L at least the number of members; the rest as `compress.py`
          -> latent [T, d] like x, not rotated, zero in rows that close no window
Effects   as `compress.py`. The record of an entry, rotated by the first position of its window, is float32;
          with `quantize` that of `quantize_tail.py`, or of an `index` key, FP4 with E8M0 scales, after the
          rotation of `hadamard.py`.
Numerics  as `compress.py`; members before the request's first position have no share.
Native    as `compress.py`.
"""

from __future__ import annotations

import torch

from deepinfer.errors import UsageError
from deepinfer.kernels.checks import FLOAT_DTYPES, check_tensor
from deepinfer.kernels.compress import group_members, rotated_to_group, softmax_pool, write_entries
from deepinfer.kernels.hadamard import hadamard
from deepinfer.kernels.index_topk import check_paged_rows, check_records, index_record_width
from deepinfer.kernels.linear import linear
from deepinfer.kernels.packing import check_linear_weight, linear_outputs
from deepinfer.kernels.quantize_fp4 import quantize_fp4
from deepinfer.kernels.quantize_tail import quantize_tail, tail_record_bytes
from deepinfer.kernels.registry import Op
from deepinfer.kernels.ring_write import write_kept
from deepinfer.kernels.rms_norm import rms_norm
from deepinfer.kernels.rope import MAX_ROTATED

_OP = "compress_biased"


def _check(
    x: torch.Tensor,
    wkv: torch.Tensor,
    wgate: torch.Tensor,
    bias: torch.Tensor,
    norm_weight: torch.Tensor,
    open_group: torch.Tensor,
    table: torch.Tensor,
    region: torch.Tensor,
    rows_of_entries: tuple[torch.Tensor, torch.Tensor, torch.Tensor, int],
    requests: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    flags: tuple[bool, bool, bool],
) -> int:
    """Check the arguments and return the size of an entry."""
    overlap, quantize, index = flags
    check_tensor(_OP, "x", x, (None, None), FLOAT_DTYPES)
    for name, weight in (("wkv", wkv), ("wgate", wgate)):
        check_linear_weight(_OP, name, weight, x.shape[1])
    width = linear_outputs(wkv)
    size = width // 2 if overlap else width
    if linear_outputs(wgate) != width or size == 0 or overlap and width % 2:
        raise UsageError(
            f"must have one number of outputs, with overlap two halves, got {width} and "
            f"{linear_outputs(wgate)}",
            where=f"{_OP}: wkv and wgate",
        )
    check_paged_rows(_OP, x.shape[0], *rows_of_entries)
    ratio, lines = rows_of_entries[3], rows_of_entries[2].shape[0]
    if ratio < 2:
        raise UsageError(f"must be at least 2, got {ratio}", where=f"{_OP}: ratio")
    check_tensor(_OP, "bias", bias, (ratio, width), (torch.float32,))
    for name, value in zip(("slot_ids", "num_computed_tokens", "row_counts"), requests, strict=True):
        check_tensor(_OP, name, value, (lines,), (torch.int64,))
    check_tensor(_OP, "norm_weight", norm_weight, (size,), FLOAT_DTYPES)
    check_tensor(_OP, "table", table, (None, None), (torch.float32,))
    rotated = table.shape[1]
    if (
        rotated <= 0
        or rotated % 2
        or rotated > min(size, MAX_ROTATED)
        or rotated == size
        and quantize
        and not index
    ):
        raise UsageError(f"must have an even number of columns within {size}", where=f"{_OP}: table")
    record = tail_record_bytes(size, rotated) if quantize else size
    if index:
        record = index_record_width(size, quantize)
    check_records(_OP, "region", region, record, torch.uint8 if quantize else torch.float32)
    check_records(_OP, "open_group", open_group, 2 * width, torch.float32)
    members = 2 * ratio if overlap else ratio
    if open_group.shape[1] < members:
        raise UsageError(
            f"must hold at least {members} positions, got {open_group.shape[1]}", where=f"{_OP}: open_group"
        )
    return size


def _halves(members: torch.Tensor, ratio: int) -> torch.Tensor:
    """`members [T, 2 ratio, 2 d]` -> `[T, 2 ratio, d]`: of the window before the first halves."""
    size = members.shape[2] // 2
    return torch.cat((members[:, :ratio, :size], members[:, ratio:, size:]), dim=1)


def compress_biased_reference(
    x: torch.Tensor,
    wkv: torch.Tensor,
    wgate: torch.Tensor,
    bias: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    open_group: torch.Tensor,
    table: torch.Tensor,
    region: torch.Tensor,
    positions: torch.Tensor,
    request_index: torch.Tensor,
    block_table: torch.Tensor,
    slot_ids: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    row_counts: torch.Tensor,
    ratio: int,
    overlap: bool,
    quantize: bool,
    index: bool,
) -> torch.Tensor:
    """The definition; see the module text."""
    rows_of_entries = (positions, request_index, block_table, ratio)
    requests = (slot_ids, num_computed_tokens, row_counts)
    flags = (overlap, quantize, index)
    _check(x, wkv, wgate, bias, norm_weight, open_group, table, region, rows_of_entries, requests, flags)
    valid = positions >= 0
    value, gate = (linear(x, weight, torch.float32) for weight in (wkv, wgate))
    gate = gate + bias[torch.where(valid, positions, 0) % ratio]
    parked = torch.cat((value, gate), dim=-1)
    line = torch.where(valid, request_index, 0)
    slots, starts = torch.where(valid, slot_ids[line], 0), num_computed_tokens[line]
    count = 2 * ratio if overlap else ratio
    values, gates = group_members(parked, open_group, positions, slots, starts, count).chunk(2, dim=-1)
    if overlap:
        values, gates = _halves(values, ratio), _halves(gates, ratio)
        absent = (positions.unsqueeze(1) < torch.arange(count - 1, -1, -1)).unsqueeze(-1)
        values, gates = torch.where(absent, 0, values), torch.where(absent, -torch.inf, gates)
    pooled = softmax_pool(values, gates).to(x.dtype)
    length = open_group.shape[1]
    last = valid & (positions >= starts + row_counts[line] - length)
    write_kept(open_group, slots, positions % length, parked, last)
    closes = valid & ((positions + 1) % ratio == 0)
    latent = torch.where(closes.unsqueeze(1), rms_norm(pooled, norm_weight, eps), 0)
    record = rotated_to_group(latent, table, positions, ratio)
    if quantize:
        record = quantize_fp4(hadamard(record), "e8m0") if index else quantize_tail(record, table.shape[1])
    write_entries(region, record, closes, *rows_of_entries)
    return latent


def compress_biased_fake(
    x: torch.Tensor,
    wkv: torch.Tensor,
    wgate: torch.Tensor,
    bias: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    open_group: torch.Tensor,
    table: torch.Tensor,
    region: torch.Tensor,
    positions: torch.Tensor,
    request_index: torch.Tensor,
    block_table: torch.Tensor,
    slot_ids: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    row_counts: torch.Tensor,
    ratio: int,
    overlap: bool,
    quantize: bool,
    index: bool,
) -> torch.Tensor:
    """Shape rule."""
    rows_of_entries = (positions, request_index, block_table, ratio)
    requests = (slot_ids, num_computed_tokens, row_counts)
    flags = (overlap, quantize, index)
    size = _check(
        x, wkv, wgate, bias, norm_weight, open_group, table, region, rows_of_entries, requests, flags
    )
    return x.new_empty((x.shape[0], size))


def _make_inputs(rows: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor | int | float | bool, ...]:
    """Every row is a request of its own, with the earlier members of its entry in the ring."""
    generator = torch.Generator().manual_seed(seed)
    ratio, overlap = ((4, True), (8, False), (4, True), (2, False))[seed % 4]
    quantize, index = dtype == torch.bfloat16, seed % 4 == 2
    width = 128 if overlap else 64
    x = torch.randn(rows, 96, generator=generator).to(dtype)
    wkv, wgate = (torch.randn(width, 96, generator=generator).div(96**0.5).to(dtype) for _ in range(2))
    bias = torch.randn(ratio, width, generator=generator)
    norm_weight = torch.rand(64, generator=generator) + 0.5
    open_group = torch.randn(rows + 1, 13, 2 * width, generator=generator)
    angles = torch.randn(16 * ratio, 16, generator=generator) * 3
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    record = (index_record_width(64, True) if index else tail_record_bytes(64, 32)) if quantize else 64
    region = torch.zeros(rows + 1, 16, record, dtype=torch.uint8 if quantize else torch.float32)
    positions = torch.randint(-1, 16 * ratio, (rows,), generator=generator)
    own = torch.arange(rows)
    return (
        *(x, wkv, wgate, bias, norm_weight, 1e-6, open_group, table, region),
        *(positions, own, own.unsqueeze(1) + 1, own + 1, positions.clamp(min=0), torch.ones_like(own)),
        *(ratio, overlap, quantize, index),
    )


compress_biased = Op(
    name=_OP,
    schema=(
        "compress_biased(Tensor x, Tensor wkv, Tensor wgate, Tensor bias, Tensor norm_weight, float eps, "
        "Tensor(a!) open_group, Tensor table, Tensor(b!) region, Tensor positions, Tensor request_index, "
        "Tensor block_table, Tensor slot_ids, Tensor num_computed_tokens, Tensor row_counts, int ratio, "
        "bool overlap, bool quantize, bool index) -> Tensor"
    ),
    reference=compress_biased_reference,
    fake=compress_biased_fake,
    make_inputs=_make_inputs,
    tolerance={torch.float32: (2e-5, 2e-6), torch.bfloat16: (2.0**-6, 2e-6)},
    composite=True,
)
