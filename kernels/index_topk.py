"""The indexer: which compressed entries a row attends to (spec 7.3 to 7.5).

    score[t, j] = sum_h head_weights[t, h] * relu(query[t, h] . key[j])        j < (position + 1) div ratio
    picks[t]    = the top_k best entries, ascending

Shapes    query [T, H, d] bf16 | fp32 (rotated), head_weights [T, H] bf16 | fp32 (scaled), candidates [T, C]
          int64 block numbers that limit the picks, ascending, -1 padded ([T, 0]: no limit), positions [T],
          request_index [T], block_table [R, B] int64; region [blocks, entries, record]: FP4 records with E8M0
          scales (`quantize`) or float32 keys, any outer strides
          -> picks [T, top_k] int64 ascending, -1 padded; blocks [T, candidate_topk_blocks] likewise;
          scores [T, B * entries] fp32, -inf where an entry is not visible or no candidate
          ([T, 0] without `with_scores`)
Numerics  float32 throughout; with `quantize` the query first goes through the key format. Sums over heads
          first to last. Ties go to the lower entry, or block. A block of `candidate_block_size` entries is as
          good as its best entry, but that of the newest visible entry counts as infinitely good. A score of
          NaN counts as -inf: neither is ever picked, nor a block that has nothing else. Padding rows
          (position -1) see nothing.
Native    reads the visible entries (with candidates, those of candidate blocks) and nothing else of the
          region or the block table. FP4 products are exact within a group of 32, groups are added in
          ascending order; float32 products are added in ascending order by fused multiply-add.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from deepinfer.errors import UsageError
from deepinfer.kernels.checks import FLOAT_DTYPES, check_multiple, check_tensor
from deepinfer.kernels.formats import FP4_GROUP, ordered_sum
from deepinfer.kernels.quantize_fp4 import dequantize_fp4, quantize_fp4, quantize_fp4_reference
from deepinfer.kernels.registry import Op

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
NEVER = -torch.inf


def check_records(op: str, name: str, region: torch.Tensor, width: int, dtype: torch.dtype) -> None:
    """A region `[blocks or slots, entries, width]` of `dtype`: dense records, outer axes of any stride."""
    if region.dtype != dtype:
        wanted, got = (str(each).removeprefix("torch.") for each in (dtype, region.dtype))
        raise UsageError(f"must be {wanted}, got {got}", where=f"{op}: {name}")
    if region.dim() != 3 or region.shape[2] != width or region.shape[1] == 0:
        raise UsageError(
            f"must have shape [any, at least 1, {width}], got {list(region.shape)}", where=f"{op}: {name}"
        )
    if region.stride(2) != 1 and width > 1:
        raise UsageError(f"must have dense records, got strides {region.stride()}", where=f"{op}: {name}")


def check_paged_rows(
    op: str,
    rows: int,
    positions: torch.Tensor,
    request_index: torch.Tensor,
    block_table: torch.Tensor,
    ratio: int,
) -> None:
    """The arguments that lead from a row to its entries."""
    check_tensor(op, "positions", positions, (rows,), (torch.int64,))
    check_tensor(op, "request_index", request_index, (rows,), (torch.int64,))
    check_tensor(op, "block_table", block_table, (None, None), (torch.int64,))
    if ratio < 1:
        raise UsageError(f"must be at least 1, got {ratio}", where=f"{op}: ratio")


def index_record_width(dim: int, quantize: bool) -> int:
    """Items of an index key of `dim` values in its region."""
    return dim // 2 + dim // FP4_GROUP["e8m0"] if quantize else dim


def _check(
    query: torch.Tensor,
    head_weights: torch.Tensor,
    region: torch.Tensor,
    candidates: torch.Tensor,
    positions: torch.Tensor,
    request_index: torch.Tensor,
    block_table: torch.Tensor,
    ratio: int,
    counts: tuple[int, int, int],
    quantize: bool,
) -> None:
    op = "index_topk"
    check_tensor(op, "query", query, (None, None, None), FLOAT_DTYPES)
    rows, heads, dim = query.shape
    check_tensor(op, "head_weights", head_weights, (rows, heads), FLOAT_DTYPES)
    if heads == 0 or dim == 0:
        raise UsageError(
            f"must have heads of at least one element, got {list(query.shape)}", where=f"{op}: query"
        )
    if quantize:
        check_multiple(op, "last axis of query", dim, FP4_GROUP["e8m0"])
    record_dtype = torch.uint8 if quantize else torch.float32
    check_records(op, "region", region, index_record_width(dim, quantize), record_dtype)
    check_tensor(op, "candidates", candidates, (rows, None), (torch.int64,))
    check_paged_rows(op, rows, positions, request_index, block_table, ratio)
    top_k, block_size, topk_blocks = counts
    if top_k < 0 or topk_blocks < 0:
        raise UsageError("top_k and candidate_topk_blocks must not be negative", where=op)
    if block_size < 1:
        raise UsageError(f"must be at least 1, got {block_size}", where=f"{op}: candidate_block_size")
    if topk_blocks and candidates.shape[1]:
        raise UsageError("cannot limit the layer that chooses them", where=f"{op}: candidates")


def best(values: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` best of `values [T, n]`: `[T, count]`, ascending, -1 padded.

    Ties go to the lower index; -inf and NaN are never among them.
    """
    rows, size = values.shape
    values = torch.where(values.isnan(), NEVER, values)
    ranked, order = torch.sort(values, dim=1, descending=True, stable=True)
    found = torch.where(ranked[:, :count] > NEVER, order[:, :count], size)
    found = torch.sort(found, dim=1).values
    found = torch.where(found < size, found, -1)
    return torch.cat((found, found.new_full((rows, max(0, count - size)), -1)), dim=1)


def best_blocks(scores: torch.Tensor, num_visible: torch.Tensor, size: int, count: int) -> torch.Tensor:
    """The `count` best blocks of `size` entries; `num_visible [T]` of the `scores [T, n]` count (7.5)."""
    scores = torch.where(scores.isnan(), NEVER, scores)
    blocks = F.pad(scores, (0, -scores.shape[1] % size), value=NEVER).unflatten(1, (-1, size)).amax(-1)
    newest = (num_visible - 1).div(size, rounding_mode="floor").unsqueeze(1)
    blocks = torch.where(torch.arange(blocks.shape[1]) == newest, torch.inf, blocks)
    return best(blocks, count)


def entries_of_blocks(blocks: torch.Tensor, size: int, num_entries: int) -> torch.Tensor:
    """Which of `num_entries` entries lie in the `blocks [T, C]` (-1: none): `[T, num_entries]` bool."""
    total = -(-num_entries // size)
    outside = (blocks < 0) | (blocks >= total)
    kept = torch.zeros(blocks.shape[0], total + 1, dtype=torch.bool)
    kept = kept.scatter(1, torch.where(outside, total, blocks), True)[:, :total]
    return kept.repeat_interleave(size, dim=1)[:, :num_entries]


def _scores(query: torch.Tensor, head_weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    terms = torch.matmul(query, keys.transpose(1, 2)).relu() * head_weights.float().unsqueeze(-1)
    return ordered_sum(terms, 1)


def index_topk_reference(
    query: torch.Tensor,
    head_weights: torch.Tensor,
    region: torch.Tensor,
    candidates: torch.Tensor,
    positions: torch.Tensor,
    request_index: torch.Tensor,
    block_table: torch.Tensor,
    ratio: int,
    top_k: int,
    candidate_block_size: int,
    candidate_topk_blocks: int,
    quantize: bool,
    with_scores: bool,
) -> Tensors:
    """The definition; see the module text."""
    counts = (top_k, candidate_block_size, candidate_topk_blocks)
    rows_of_entries = (positions, request_index, block_table, ratio)
    _check(query, head_weights, region, candidates, *rows_of_entries, counts, quantize)
    valid = positions >= 0
    blocks = torch.where(valid.unsqueeze(1), block_table[torch.where(valid, request_index, 0)], 0)
    keys = region[blocks].flatten(1, 2)
    if quantize:
        keys = dequantize_fp4(keys, "e8m0", torch.float32)
        query = dequantize_fp4(quantize_fp4(query, "e8m0"), "e8m0", torch.float32)
    num_visible = torch.where(valid, (positions + 1) // ratio, 0)
    seen = torch.arange(keys.shape[1]) < num_visible.unsqueeze(1)
    if candidates.shape[1]:
        seen = seen & entries_of_blocks(candidates, candidate_block_size, keys.shape[1])
    scores = torch.where(seen, _scores(query.float(), head_weights, keys), NEVER)
    chosen = best_blocks(scores, num_visible, candidate_block_size, candidate_topk_blocks)
    return best(scores, top_k), chosen, scores if with_scores else scores.new_empty(query.shape[0], 0)


def index_topk_fake(
    query: torch.Tensor,
    head_weights: torch.Tensor,
    region: torch.Tensor,
    candidates: torch.Tensor,
    positions: torch.Tensor,
    request_index: torch.Tensor,
    block_table: torch.Tensor,
    ratio: int,
    top_k: int,
    candidate_block_size: int,
    candidate_topk_blocks: int,
    quantize: bool,
    with_scores: bool,
) -> Tensors:
    """Shape rule."""
    counts = (top_k, candidate_block_size, candidate_topk_blocks)
    rows_of_entries = (positions, request_index, block_table, ratio)
    _check(query, head_weights, region, candidates, *rows_of_entries, counts, quantize)
    rows, entries = query.shape[0], block_table.shape[1] * region.shape[1] if with_scores else 0
    return (
        positions.new_empty((rows, top_k)),
        positions.new_empty((rows, candidate_topk_blocks)),
        query.new_empty((rows, entries), dtype=torch.float32),
    )


def _make_inputs(rows: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor | int | bool, ...]:
    generator = torch.Generator().manual_seed(seed)
    quantize, entries, requests, columns = dtype == torch.bfloat16, 8, 3, 6
    region = torch.randn(1 + requests * columns, entries, 64, generator=generator)
    if quantize:
        region = quantize_fp4_reference(region, "e8m0")
    block_table = 1 + torch.randperm(requests * columns, generator=generator).reshape(requests, columns)
    positions = torch.randint(-1, 2 * entries * columns, (rows,), generator=generator)
    request_index = torch.randint(requests, (rows,), generator=generator)
    query = torch.randn(rows, 4, 64, generator=generator).to(dtype)
    candidates = torch.randperm(12, generator=generator)[:6].sort().values.repeat(rows, int(seed % 3 == 2))
    head_weights = torch.randn(rows, 4, generator=generator)
    settings = (2, 7, 4, 5 * (seed % 3 == 1), quantize, seed % 2 == 1)
    return (query, head_weights, region, candidates, positions, request_index, block_table, *settings)


index_topk = Op(
    name="index_topk",
    schema=(
        "index_topk(Tensor query, Tensor head_weights, Tensor region, Tensor candidates, Tensor positions, "
        "Tensor request_index, Tensor block_table, int ratio, int top_k, int candidate_block_size, "
        "int candidate_topk_blocks, bool quantize, bool with_scores) -> (Tensor, Tensor, Tensor)"
    ),
    reference=index_topk_reference,
    fake=index_topk_fake,
    make_inputs=_make_inputs,
    tolerance={torch.float32: (1e-5, 1e-5), torch.bfloat16: (1e-5, 1e-5)},
    composite=True,
)
