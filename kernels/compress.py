"""KV compression: one latent per `ratio` tokens, and its record in the paged cache (spec 6).

    pool[t, d]   = sum_i u[i, d] * exp(g[i, d]) / sum_j exp(g[j, d])      i, j: the group that row t closes
    latent[t]    = rms_norm(round(pool[t])), with u = wkv x, g = wgate x; at ratio 1 rms_norm(round(wkv x[t]))
    entry        = position div ratio, written when (position + 1) mod ratio is 0:
                   round(rope(latent, entry * ratio)) as FP4 with E4M3 scales (`quantize`) or float32

Shapes    x [T, D], wkv and wgate [d, D] (plain or packed; ratio 1: wgate [0, D]), norm_weight [d], all
          bf16 | fp32; table [P, r] fp32; open_group [slots, L >= ratio, 2 d] fp32, a value, then a gate
          (ratio 1: [0, 0, 0]);
          region [blocks, entries, record], both of any outer strides; positions [T], request_index [T],
          block_table [R, B], slot_ids [R], num_computed_tokens [R], row_counts [R] int64
          -> latent [T, d] like x, not rotated, zero in rows that close no group
Effects   writes the entries that close in this step; at ratio > 1 also the values and gates of a request's
          last L rows, position p at open_group[slot, p mod L]. Earlier members of a group come from this
          step's rows or, before the request's first, from the ring as it was. Padding rows (position -1)
          read and write nothing.
Numerics  products, softmax and pool float32, rounded to the dtype of x before the norm; softmax with the
          maximum taken off, sums oldest first. A NaN in a group makes its whole latent NaN.
Native    products as `linear.py`, norm as `rms_norm.py`, exp of `vector_math.h`.
"""

from __future__ import annotations

import torch

from deepinfer.errors import UsageError
from deepinfer.kernels.checks import FLOAT_DTYPES, check_multiple, check_tensor
from deepinfer.kernels.formats import FP4_GROUP, ordered_sum
from deepinfer.kernels.index_topk import check_paged_rows, check_records
from deepinfer.kernels.linear import linear
from deepinfer.kernels.packing import check_linear_weight, linear_outputs
from deepinfer.kernels.quantize_fp4 import quantize_fp4
from deepinfer.kernels.registry import Op
from deepinfer.kernels.ring_write import write_kept
from deepinfer.kernels.rms_norm import rms_norm
from deepinfer.kernels.rope import MAX_ROTATED, rotate


def check_record_inputs(
    op: str, norm_weight: torch.Tensor, table: torch.Tensor, region: torch.Tensor, size: int, group: int
) -> None:
    """What turns a vector of `size` values into a record of `region`; `group` values a scale, 0: float32."""
    check_tensor(op, "norm_weight", norm_weight, (size,), FLOAT_DTYPES)
    check_tensor(op, "table", table, (None, None), (torch.float32,))
    rotated = table.shape[1]
    if rotated <= 0 or rotated % 2 or rotated > min(size, MAX_ROTATED):
        raise UsageError(
            f"must have an even number of columns, at most {min(size, MAX_ROTATED)}, got {rotated}",
            where=f"{op}: table",
        )
    if group:
        check_multiple(op, "outputs of the projection", size, group)
        check_records(op, "region", region, size // 2 + size // group, torch.uint8)
    else:
        check_records(op, "region", region, size, torch.float32)


def _check(
    x: torch.Tensor,
    wkv: torch.Tensor,
    wgate: torch.Tensor,
    norm_weight: torch.Tensor,
    open_group: torch.Tensor,
    table: torch.Tensor,
    region: torch.Tensor,
    rows_of_entries: tuple[torch.Tensor, torch.Tensor, torch.Tensor, int],
    requests: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    quantize: bool,
) -> int:
    op = "compress"
    check_tensor(op, "x", x, (None, None), FLOAT_DTYPES)
    check_linear_weight(op, "wkv", wkv, x.shape[1])
    size = linear_outputs(wkv)
    check_paged_rows(op, x.shape[0], *rows_of_entries)
    ratio, lines = rows_of_entries[3], rows_of_entries[2].shape[0]
    for name, value in zip(("slot_ids", "num_computed_tokens", "row_counts"), requests, strict=True):
        check_tensor(op, name, value, (lines,), (torch.int64,))
    check_record_inputs(op, norm_weight, table, region, size, FP4_GROUP["e4m3"] if quantize else 0)
    if ratio > 1:
        check_linear_weight(op, "wgate", wgate, x.shape[1])
        if linear_outputs(wgate) != size:
            raise UsageError(f"must have {size} outputs, got {list(wgate.shape)}", where=f"{op}: wgate")
        check_records(op, "open_group", open_group, 2 * size, torch.float32)
        if open_group.shape[1] < ratio:
            raise UsageError(
                f"must hold at least {ratio} positions, got {open_group.shape[1]}", where=f"{op}: open_group"
            )
    return size


def write_entries(
    region: torch.Tensor,
    record: torch.Tensor,
    closes: torch.Tensor,
    positions: torch.Tensor,
    request_index: torch.Tensor,
    block_table: torch.Tensor,
    ratio: int,
) -> None:
    """Store `record [T, r]` as the entry of each row that `closes [T]` its group."""
    entries = torch.where(closes, positions, 0) // ratio
    tables = block_table[torch.where(closes, request_index, 0)]
    blocks = tables.gather(1, (entries // region.shape[1]).unsqueeze(1)).squeeze(1)
    write_kept(region, blocks, entries % region.shape[1], record, closes)


def rotated_to_group(
    x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, ratio: int
) -> torch.Tensor:
    """`x [T, d]` rotated by the first position of each row's group."""
    return rotate(x, table[positions.clamp(min=0) // ratio * ratio], False)


def group_members(
    parked: torch.Tensor,
    open_group: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    count: int,
) -> torch.Tensor:
    """Values and gates `[T, count, 2 d]` of each row and the `count - 1` before it, oldest first.

    `parked [T, 2 d]` are the step's own rows, earlier ones come from the ring; those before position 0 are
    arbitrary.
    """
    offsets = torch.arange(count - 1, 0, -1)
    earlier = (positions.unsqueeze(1) - offsets).clamp(min=0)
    own_row = (torch.arange(len(positions)).unsqueeze(1) - offsets).clamp(min=0)
    from_ring = open_group[slots.unsqueeze(1), earlier % open_group.shape[1]]
    in_step = (earlier >= starts.unsqueeze(1)).unsqueeze(-1)
    before = torch.where(in_step, parked[own_row], from_ring)
    return torch.cat((before, parked.unsqueeze(1)), dim=1)


def softmax_pool(values: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Sum `values [T, n, d]` with the softmax of `gates [T, n, d]` over their members."""
    shares = torch.exp(gates - gates.amax(1, keepdim=True))
    shares = shares / ordered_sum(shares, 1).unsqueeze(1)
    return ordered_sum(values * shares, 1)


def compress_reference(
    x: torch.Tensor,
    wkv: torch.Tensor,
    wgate: torch.Tensor,
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
    quantize: bool,
) -> torch.Tensor:
    """The definition; see the module text."""
    rows_of_entries = (positions, request_index, block_table, ratio)
    requests = (slot_ids, num_computed_tokens, row_counts)
    _check(x, wkv, wgate, norm_weight, open_group, table, region, rows_of_entries, requests, quantize)
    valid = positions >= 0
    if ratio == 1:
        pooled = linear(x, wkv, x.dtype)
    else:
        value, gate = (linear(x, weight, torch.float32) for weight in (wkv, wgate))
        parked = torch.cat((value, gate), dim=-1)
        line = torch.where(valid, request_index, 0)
        slots, starts = torch.where(valid, slot_ids[line], 0), num_computed_tokens[line]
        members = group_members(parked, open_group, positions, slots, starts, ratio)
        pooled = softmax_pool(*members.chunk(2, dim=-1)).to(x.dtype)
        length = open_group.shape[1]
        last = valid & (positions >= starts + row_counts[line] - length)
        write_kept(open_group, slots, positions % length, parked, last)
    closes = valid & ((positions + 1) % ratio == 0)
    latent = torch.where(closes.unsqueeze(1), rms_norm(pooled, norm_weight, eps), 0)
    record = rotated_to_group(latent, table, positions, ratio)
    if quantize:
        record = quantize_fp4(record, "e4m3")
    write_entries(region, record, closes, *rows_of_entries)
    return latent


def compress_fake(
    x: torch.Tensor,
    wkv: torch.Tensor,
    wgate: torch.Tensor,
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
    quantize: bool,
) -> torch.Tensor:
    """Shape rule."""
    rows_of_entries = (positions, request_index, block_table, ratio)
    requests = (slot_ids, num_computed_tokens, row_counts)
    size = _check(x, wkv, wgate, norm_weight, open_group, table, region, rows_of_entries, requests, quantize)
    return x.new_empty((x.shape[0], size))


def _make_inputs(rows: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor | int | float | bool, ...]:
    """Every row is a request of its own, with the earlier members of its group in the ring."""
    generator = torch.Generator().manual_seed(seed)
    ratio, quantize = (2, 1, 4)[seed % 3], dtype == torch.bfloat16
    x = torch.randn(rows, 96, generator=generator).to(dtype)
    wkv, wgate = (torch.randn(64, 96, generator=generator).div(96**0.5).to(dtype) for _ in range(2))
    norm_weight = torch.rand(64, generator=generator) + 0.5
    open_group = torch.randn(rows + 1, 7, 128, generator=generator)
    angles = torch.randn(16 * ratio, 16, generator=generator) * 3
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    region = torch.zeros(
        rows + 1, 16, 36 if quantize else 64, dtype=torch.uint8 if quantize else torch.float32
    )
    positions = torch.randint(-1, 16 * ratio, (rows,), generator=generator)
    own = torch.arange(rows)
    if ratio == 1:
        wgate, open_group = wgate[:0], open_group[:0, :0, :0]
    return (
        *(x, wkv, wgate, norm_weight, 1e-20, open_group, table, region),
        *(positions, own, own.unsqueeze(1) + 1, own + 1, positions.clamp(min=0), torch.ones_like(own)),
        *(ratio, quantize),
    )


compress = Op(
    name="compress",
    schema=(
        "compress(Tensor x, Tensor wkv, Tensor wgate, Tensor norm_weight, float eps, Tensor(a!) open_group, "
        "Tensor table, Tensor(b!) region, Tensor positions, Tensor request_index, Tensor block_table, "
        "Tensor slot_ids, Tensor num_computed_tokens, Tensor row_counts, int ratio, bool quantize) -> Tensor"
    ),
    reference=compress_reference,
    fake=compress_fake,
    make_inputs=_make_inputs,
    tolerance={torch.float32: (2e-5, 2e-6), torch.bfloat16: (2.0**-6, 2e-6)},
    composite=True,
)
