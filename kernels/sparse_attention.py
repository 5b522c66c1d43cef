"""Attention over the window and the picked compressed entries, with a sink (spec 5.2, 5.3).

    a[h, j] = scale * sum_i query[t, h, i] * key[j, i]
    m[h]    = max(-1e30, max_j a[h, j])
    den[h]  = sum_j exp(a[h, j] - m[h]) + exp(sink[h] - m[h])
    output[t, h, i] = (sum_j exp(a[h, j] - m[h]) * key[j, i]) / den[h]
    mass[t, column of j] = sum_h exp(a[h, j] - m[h]) / den[h]

One vector per position is key and value of all heads. The keys of a row at position p: the last `window`
positions of its request up to p, oldest first, then the entries picks[t] other than -1, in their order. A
position from num_computed_tokens[l] on (l = request_index[t]) is a row of this step, row t - (p - position);
an earlier one is ring[slot_ids[l], position mod L]. Entry e is compressed[block_table[l, e / n], e mod n].

Shapes    query [T, H, d] bf16 | fp32; record [T, r]; ring [slots, L, r], L >= window; compressed
          [blocks, n, c]; picks [T, k] int64, k = 0 without compressed keys; sink [H] fp32; positions,
          request_index [T], block_table [R, B], slot_ids, num_computed_tokens [R], all int64
          -> output like query, mass fp32 [T, window + k] (window oldest first, then picks; zeros where
          nothing is visible), [T, 0] without `with_mass`
          With `quantize` records are uint8, FP8 (r = d + d/32) and FP4 with E4M3 scales (c = d/2 + d/16),
          with a `tail` both are those of `quantize_tail.py`; without, they are the fp32 vectors. Outer axes
          of ring and compressed may have any stride.
Numerics  Records are decoded exactly; float32 inside, probabilities included, one rounding at the end. What
          is not visible counts nothing, NaN included. A row that sees nothing, like a padding row (position
          -1), gives zeros.
Native    the order of sums, stated in `cpu/attention.cpp`, rests on a row's own list of keys, hence is the
          same in one step, in chunks and in decode; exp of `vector_math.h`. Work follows the visible keys.
"""

from __future__ import annotations

import torch

from deepinfer.errors import UsageError
from deepinfer.kernels.checks import FLOAT_DTYPES, check_multiple, check_region, check_tensor, check_values
from deepinfer.kernels.formats import FP8_GROUP, pad_rows
from deepinfer.kernels.quantize_fp4 import dequantize_fp4, quantize_fp4_reference
from deepinfer.kernels.quantize_fp8 import dequantize_fp8, quantize_fp8_reference
from deepinfer.kernels.quantize_tail import dequantize_tail, tail_record_bytes
from deepinfer.kernels.registry import Op

_INT64 = (torch.int64,)
Arguments = tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    float,
    int,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    bool,
    bool,
]


def softmax_with_sink(
    query: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor, sink: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend `query [T, H, d]` to `keys [T, n, d]` where `visible [T, n]`; `sink [H]` joins the sum.

    Returns the output like `query` and the mass `[T, n]` float32, as in the module text.
    """
    # a key that is not visible may hold anything, and zero times NaN is NaN
    keys = torch.where(visible.unsqueeze(-1), keys, 0).float()
    logits = torch.matmul(query.float(), keys.transpose(1, 2)) * scale
    logits = torch.where(visible.unsqueeze(1), logits, -torch.inf)
    top = logits.amax(-1, keepdim=True).clamp(min=-1e30)
    weights = torch.exp(logits - top)
    total = weights.sum(-1, keepdim=True) + torch.exp(sink.view(1, -1, 1) - top)
    output = (torch.matmul(weights, keys) / total).to(query.dtype)
    return output, (weights / total).sum(1)


def _check(
    query: torch.Tensor,
    record: torch.Tensor,
    ring: torch.Tensor,
    compressed: torch.Tensor,
    picks: torch.Tensor,
    sink: torch.Tensor,
    scale: float,
    window: int,
    positions: torch.Tensor,
    request_index: torch.Tensor,
    block_table: torch.Tensor,
    slot_ids: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    quantize: bool,
    tail: int,
) -> None:
    op = "sparse_attention"
    check_tensor(op, "query", query, (None, None, None), FLOAT_DTYPES)
    rows, heads, width = query.shape
    if not heads or not width:
        raise UsageError(f"must have heads and a width, got {list(query.shape)}", where=f"{op}: query")
    if quantize and not tail:
        check_multiple(op, "last axis of query", width, FP8_GROUP)
    if tail and not 0 < tail < width:
        raise UsageError(f"must lie in 0 .. {width - 1}, got {tail}", where=f"{op}: tail")
    stored = (torch.uint8 if quantize else torch.float32,)
    record_size = compressed_size = width
    if quantize and tail:
        record_size = compressed_size = tail_record_bytes(width, tail)
    elif quantize:
        record_size, compressed_size = width + width // FP8_GROUP, width // 2 + width // 16
    check_tensor(op, "record", record, (rows, record_size), stored)
    check_region(op, "ring", ring, (None, None, record_size), stored)
    if not 1 <= window <= ring.shape[1]:
        raise UsageError(f"must lie in 1 .. {ring.shape[1]}, got {window}", where=f"{op}: window")
    check_tensor(op, "sink", sink, (heads,), (torch.float32,))
    check_tensor(op, "picks", picks, (rows, None), _INT64)
    any_or = compressed_size if picks.shape[1] else None
    check_region(op, "compressed", compressed, (None, None, any_or), stored)
    if picks.shape[1] and not compressed.shape[1]:
        raise UsageError("must have entries", where=f"{op}: compressed")
    check_tensor(op, "positions", positions, (rows,), _INT64)
    check_tensor(op, "request_index", request_index, (rows,), _INT64)
    check_tensor(op, "block_table", block_table, (None, None), _INT64)
    lines = block_table.shape[0]
    check_tensor(op, "slot_ids", slot_ids, (lines,), _INT64)
    check_tensor(op, "num_computed_tokens", num_computed_tokens, (lines,), _INT64)


def window_records(
    record: torch.Tensor,
    ring: torch.Tensor,
    window: int,
    positions: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Records `[T, W, r]` of the positions up to a row's own, oldest first, and which are real."""
    rows = torch.arange(positions.shape[0])
    wanted = positions.unsqueeze(1) - torch.arange(window - 1, -1, -1)
    visible = (wanted >= 0) & (positions >= 0).unsqueeze(1)
    in_step = visible & (wanted >= starts.unsqueeze(1))
    row = torch.where(in_step, rows.unsqueeze(1) - (positions.unsqueeze(1) - wanted), 0)
    _demand(row >= 0, "a request's rows must follow each other from num_computed_tokens on", "positions")
    in_ring = visible & ~in_step
    slot = torch.where(in_ring, slots.unsqueeze(1), 0)
    _demand((slot >= 1) == in_ring, "must be at least 1", "slot_ids")
    _demand(slot < ring.shape[0], f"must lie below {ring.shape[0]}", "slot_ids")
    if not rows.numel():
        return record.new_empty((0, window, record.shape[1])), visible
    if not ring.shape[0]:
        return record[row], visible
    earlier = ring[slot, wanted.clamp(min=0) % ring.shape[1]]
    return torch.where(in_step.unsqueeze(-1), record[row], earlier), visible


def _picked(
    compressed: torch.Tensor, picks: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Records `[T, k, c]` of the picked entries, and which are real; `tables [T, B]`."""
    blocks, entries, _ = compressed.shape
    visible = (picks != -1) & (positions >= 0).unsqueeze(1)
    entry = torch.where(visible, picks, 0)
    last = torch.clamp(positions, max=tables.shape[1] * entries - 1).unsqueeze(1)
    _demand(~visible | ((entry >= 0) & (entry <= last)), "must be -1 or an entry of the request", "picks")
    block = torch.where(visible, tables.gather(1, entry // entries), 0)
    _demand((block >= 1) == visible, "must hold a block for every pick", "block_table")
    _demand(block < blocks, f"must lie below {blocks}", "block_table")
    return compressed[block, entry % entries], visible


def _demand(fine: torch.Tensor, message: str, argument: str) -> None:
    check_values("sparse_attention", argument, fine, message)


def _vectors(
    records: torch.Tensor, width: int, quantize: bool, tail: int, op: Op, form: tuple[str, ...]
) -> torch.Tensor:
    """The vectors `[..., width]` of records; `op` decodes those of the form without a tail."""
    if not quantize:
        return records
    if tail:
        return dequantize_tail(records, width, tail, torch.bfloat16)
    return op(records, *form, torch.bfloat16)


def sparse_attention_reference(
    query: torch.Tensor,
    record: torch.Tensor,
    ring: torch.Tensor,
    compressed: torch.Tensor,
    picks: torch.Tensor,
    sink: torch.Tensor,
    scale: float,
    window: int,
    positions: torch.Tensor,
    request_index: torch.Tensor,
    block_table: torch.Tensor,
    slot_ids: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    quantize: bool,
    with_mass: bool,
    tail: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition; see the module text."""
    arguments = (positions, request_index, block_table, slot_ids, num_computed_tokens, quantize, tail)
    _check(query, record, ring, compressed, picks, sink, scale, window, *arguments)
    valid = positions >= 0
    _demand(positions >= -1, "must be at least -1", "positions")
    line = torch.where(valid, request_index, 0)
    _demand((line >= 0) & (line < max(1, slot_ids.shape[0])), "must name a line", "request_index")
    starts = num_computed_tokens[line]
    _demand(~valid | ((starts >= 0) & (starts <= positions)), "must not exceed a row", "num_computed_tokens")
    records, visible = window_records(record, ring, window, positions, slot_ids[line], starts)
    keys = _vectors(records, query.shape[-1], quantize, tail, dequantize_fp8, ())
    if picks.shape[1]:
        records, picked = _picked(compressed, picks, positions, block_table[line])
        entries = _vectors(records, query.shape[-1], quantize, tail, dequantize_fp4, ("e4m3",))
        keys, visible = torch.cat((keys, entries), dim=1), torch.cat((visible, picked), dim=1)
    rows = query.shape[0]
    output, mass = softmax_with_sink(pad_rows(query), pad_rows(keys), pad_rows(visible), sink, scale)
    sees = visible.any(1)
    output = torch.where(sees.view(-1, 1, 1), output[:rows], 0)  # without it, a sink of -inf would give NaN
    mass = torch.where(sees.view(-1, 1), mass[:rows], 0)
    return output, mass if with_mass else mass[:, :0].clone()


def sparse_attention_fake(
    query: torch.Tensor,
    record: torch.Tensor,
    ring: torch.Tensor,
    compressed: torch.Tensor,
    picks: torch.Tensor,
    sink: torch.Tensor,
    scale: float,
    window: int,
    positions: torch.Tensor,
    request_index: torch.Tensor,
    block_table: torch.Tensor,
    slot_ids: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    quantize: bool,
    with_mass: bool,
    tail: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shape rule."""
    arguments = (positions, request_index, block_table, slot_ids, num_computed_tokens, quantize, tail)
    _check(query, record, ring, compressed, picks, sink, scale, window, *arguments)
    columns = window + picks.shape[1] if with_mass else 0
    return torch.empty_like(query), query.new_empty((query.shape[0], columns), dtype=torch.float32)


def _make_inputs(rows: int, dtype: torch.dtype, seed: int) -> Arguments:
    """One request per row, as in decode, at positions 0 to 70."""
    generator = torch.Generator().manual_seed(seed)
    heads, width, window, per_block, top_k = 3, 96, 16, 4, 12
    quantize = dtype == torch.bfloat16

    def vectors(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, width, generator=generator)

    query, sink = vectors(rows, heads).to(dtype), torch.randn(heads, generator=generator)
    record, ring = vectors(rows), vectors(rows + 1, window + 6)
    compressed = vectors(9 * rows + 1, per_block)
    if quantize:
        record, ring = quantize_fp8_reference(record), quantize_fp8_reference(ring)
        compressed = quantize_fp4_reference(compressed, "e4m3")
    positions = torch.randint(0, 71, (rows,), generator=generator)
    entries = (positions + 1).unsqueeze(1) // 2
    order = torch.rand(rows, 9 * per_block, generator=generator)
    order = order.masked_fill(torch.arange(9 * per_block) >= entries, 2.0)
    picks = order.argsort(dim=1)[:, :top_k]
    none = 9 * per_block  # sorts behind every entry
    picks = picks.masked_fill(torch.arange(top_k) >= entries, none).sort(dim=1).values
    picks = picks.masked_fill(picks == none, -1)
    blocks = (torch.randperm(9 * rows, generator=generator) + 1).reshape(rows, 9)
    slots = torch.randperm(rows, generator=generator) + 1
    lines = torch.arange(rows)
    return (
        *(query, record, ring, compressed, picks, sink, width**-0.5, window),
        *(positions, lines, blocks, slots, positions.clone(), quantize, True),
    )


sparse_attention = Op(
    name="sparse_attention",
    schema=(
        "sparse_attention(Tensor query, Tensor record, Tensor ring, Tensor compressed, Tensor picks, "
        "Tensor sink, float scale, int window, Tensor positions, Tensor request_index, Tensor block_table, "
        "Tensor slot_ids, Tensor num_computed_tokens, bool quantize, bool with_mass, int tail=0) "
        "-> (Tensor output, Tensor mass)"
    ),
    reference=sparse_attention_reference,
    fake=sparse_attention_fake,
    make_inputs=_make_inputs,
    tolerance={torch.float32: (1e-5, 2e-6), torch.bfloat16: (2.0**-7, 2e-6)},
    composite=True,
)
