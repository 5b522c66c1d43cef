"""The indexer: scores by row and tile of entries, then selection; see `kernels/index_topk.py`."""

import torch
import triton
import triton.language as tl

from deepinfer.kernels.formats import FP4_GROUP
from deepinfer.kernels.index_topk import Tensors, index_topk_fake
from deepinfer.kernels.triton.dequantize_fp4 import decode_fp4
from deepinfer.kernels.triton.launch import blocks, launch, power_of_two
from deepinfer.kernels.triton.numbers import (
    e2m1_decode,
    e8m0_decode,
    fp4_codes,
    multiply_add,
    round_to,
    to_float32,
)
from deepinfer.kernels.triton.select import select_best

_ENTRIES = 64
_BLOCKS = 64


@triton.jit
def _through_fp4_kernel(x, y, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """What the index key format leaves of each vector, exact in bf16."""
    row = tl.program_id(0).to(tl.int64) * SIZE
    column = tl.arange(0, BLOCK)
    values = to_float32(tl.load(x + row + column, mask=column < SIZE, other=0.0))
    codes, scale = fp4_codes(tl.reshape(values, (BLOCK // 32, 32)), True)
    values = tl.reshape(e2m1_decode(codes) * e8m0_decode(scale)[:, None], (BLOCK,))
    tl.store(y + row + column, round_to(values, y.dtype.element_ty), mask=column < SIZE)


@triton.jit
def _mark_candidates_kernel(
    candidates, marked, COUNT: tl.constexpr, TOTAL: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    block = tl.load(candidates + row * COUNT + column, mask=column < COUNT, other=-1)
    known = (block >= 0) & (block < TOTAL)
    tl.store(marked + row * TOTAL + block, tl.full((BLOCK,), 1, tl.uint8), mask=known)


@triton.jit
def _index_scores_kernel(
    query,
    head_weights,
    region,
    marked,
    positions,
    request_index,
    block_table,
    scores,
    RATIO: tl.constexpr,
    LIMITED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOTAL: tl.constexpr,
    TABLE: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    ENTRY_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    QUANTIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    position = tl.load(positions + row)
    valid = position >= 0
    seen = (entry < (position + 1) // RATIO) & (entry < TABLE * ENTRIES) & valid
    if LIMITED:
        seen = seen & (tl.load(marked + row * TOTAL + entry // BLOCK_SIZE, mask=seen, other=0) != 0)
    result = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    if tl.max(seen.to(tl.int32), axis=0) > 0:
        line = tl.load(request_index + row, mask=valid, other=0)
        block = tl.load(block_table + line * TABLE + entry // ENTRIES, mask=seen, other=0)
        start = (region + block * BLOCK_STRIDE + (entry % ENTRIES) * ENTRY_STRIDE)[:, None]
        column = tl.arange(0, BLOCK)
        if QUANTIZE:
            byte = tl.arange(0, BLOCK // 2)
            group = tl.arange(0, BLOCK // 32)
            packed = tl.load(start + byte[None, :], mask=seen[:, None] & (byte < SIZE // 2)[None, :], other=0)
            inside = seen[:, None] & (group < SIZE // 32)[None, :]
            scale = tl.load(start + SIZE // 2 + group[None, :], mask=inside, other=0)
            keys = round_to(decode_fp4(packed, scale, True), tl.bfloat16)
        else:
            keys = tl.load(start + column[None, :], mask=seen[:, None] & (column < SIZE)[None, :], other=0.0)
        head = tl.arange(0, BLOCK_H)
        place = (row * HEADS + head[:, None]) * SIZE + column[None, :]
        asked = tl.load(query + place, mask=(head < HEADS)[:, None] & (column < SIZE)[None, :], other=0.0)
        weights = to_float32(tl.load(head_weights + row * HEADS + head, mask=head < HEADS, other=0.0))
        products = multiply_add(asked, tl.trans(keys), tl.zeros((BLOCK_H, BLOCK_N), tl.float32))
        # not maximum(): a NaN must stay
        terms = tl.where(products < 0.0, 0.0, products) * weights[:, None]
        result = tl.where(seen, tl.sum(tl.where((head < HEADS)[:, None], terms, 0.0), axis=0), result)
    tl.store(scores + row * (TABLE * ENTRIES) + entry, result, mask=entry < TABLE * ENTRIES)


@triton.jit
def _block_scores_kernel(
    scores,
    positions,
    best,
    RATIO: tl.constexpr,
    ENTRIES: tl.constexpr,
    SIZE: tl.constexpr,
    TOTAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of every block of SIZE entries the best score; +inf for the block of the newest entry."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    within = tl.arange(0, BLOCK)
    entry = block[:, None] * SIZE + within[None, :]
    inside = (within < SIZE)[None, :] & (entry < ENTRIES)
    values = tl.load(scores + row * ENTRIES + entry, mask=inside, other=float("-inf"))
    values = tl.max(tl.where(values != values, float("-inf"), values), axis=1)
    visible = (tl.load(positions + row) + 1) // RATIO
    newest = (visible > 0) & (block == (visible - 1) // SIZE)
    tl.store(best + row * TOTAL + block, tl.where(newest, float("inf"), values), mask=block < TOTAL)


def through_fp4(query: torch.Tensor) -> torch.Tensor:
    """`query [T, H, d]` through the FP4 format of index keys, bf16."""
    y = torch.empty_like(query, dtype=torch.bfloat16)
    rows, heads, size = query.shape
    block = power_of_two(size, FP4_GROUP["e8m0"])
    launch(_through_fp4_kernel, (rows * heads,), *(query, y), warps=1, SIZE=size, BLOCK=block)
    return y


def index_topk(
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
    """query [T, H, d] and the region as in the definition -> picks [T, top_k], blocks, scores."""
    paged = (positions, request_index, block_table)
    counts = (top_k, candidate_block_size, candidate_topk_blocks)
    outputs = index_topk_fake(
        query, head_weights, region, candidates, *paged, ratio, *counts, quantize, with_scores
    )
    picks, chosen, scores = outputs
    rows, heads, size = query.shape
    entries = block_table.shape[1] * region.shape[1]
    if not with_scores:
        scores = scores.new_empty((rows, entries))
    total = blocks(entries, candidate_block_size)
    marked = candidates.new_zeros((rows, total), dtype=torch.uint8)
    if candidates.shape[1]:
        launch(
            _mark_candidates_kernel,
            (rows,),
            *(candidates, marked),
            COUNT=candidates.shape[1],
            TOTAL=total,
            BLOCK=power_of_two(candidates.shape[1]),
        )
    launch(
        _index_scores_kernel,
        (rows, blocks(entries, _ENTRIES)),
        *(through_fp4(query) if quantize else query.float(), head_weights, region, marked, *paged, scores),
        RATIO=ratio,
        LIMITED=candidates.shape[1] > 0,
        BLOCK_SIZE=candidate_block_size,
        TOTAL=total,
        TABLE=block_table.shape[1],
        ENTRIES=region.shape[1],
        BLOCK_STRIDE=region.stride(0),
        ENTRY_STRIDE=region.stride(1),
        HEADS=heads,
        SIZE=size,
        QUANTIZE=quantize,
        BLOCK_H=power_of_two(heads, 16),
        BLOCK_N=_ENTRIES,
        BLOCK=power_of_two(size, 32),
    )
    select_best(scores, picks)
    if candidate_topk_blocks:
        best = scores.new_empty((rows, total))
        launch(
            _block_scores_kernel,
            (rows, blocks(total, _BLOCKS)),
            *(scores, positions, best),
            RATIO=ratio,
            ENTRIES=entries,
            SIZE=candidate_block_size,
            TOTAL=total,
            BLOCK_N=_BLOCKS,
            BLOCK=power_of_two(candidate_block_size),
        )
        select_best(best, chosen)
    return outputs
