"""Verification of drafts: every row alone, then one program per request; see `kernels/verify_drafts.py`.

Rows behind a request's first failure are worked out like the others and forgotten afterwards.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from deepinfer.kernels import philox
from deepinfer.kernels.sampling import Arguments
from deepinfer.kernels.triton.adjusted_logits import adjust
from deepinfer.kernels.triton.draws import list_logprobs, pick, random_word, row_distribution
from deepinfer.kernels.triton.launch import launch, power_of_two
from deepinfer.kernels.triton.sample import draw_constants
from deepinfer.kernels.verify_drafts import DRAFT_SHARE, Outputs, verify_drafts_fake

_FRESH, _RESAMPLE, _COIN = (tl.constexpr(case) for case in (philox.FRESH, philox.RESAMPLE, philox.COIN))
_DRAFT_SHARE = tl.constexpr(DRAFT_SHARE)


@triton.jit
def _verify_kernel(
    logits,
    adjusted,
    forced,
    raw_best,
    status,
    largest,
    greedy,
    raw_largest,
    raw_log_sum,
    seeds,
    positions,
    temperatures,
    top_k,
    top_p,
    min_p,
    row_offsets,
    request_of_row,
    draft_ids,
    draft_log_probs,
    draft_index,
    token_ids,
    listed,
    values,
    accepted,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    RAW: tl.constexpr,
    COUNT: tl.constexpr,
    FORCED: tl.constexpr,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_RAW: tl.constexpr,
):
    """The token that a row emits should it be reached, and whether the next one is reached."""
    row = tl.program_id(0).to(tl.int64)
    drawable = tl.load(status + row) == 0
    request = tl.load(request_of_row + row)
    step_row = row - tl.load(row_offsets + request)
    verifies = row + 1 < tl.load(row_offsets + request + 1)
    ids, value, kept, mass, top, factor, log_sum, drawn = row_distribution(
        row, adjusted, forced, temperatures, top_k, top_p, min_p, largest, drawable,
        HAS_TOP_K, HAS_TOP_P, HAS_MIN_P, FORCED, VOCABULARY, BLOCK,
    )  # fmt: skip
    seed = tl.load(seeds + row)
    position = tl.load(positions + row)
    draft = tl.load(draft_ids + row, mask=verifies, other=-1)
    proposal = draft_log_probs + tl.load(draft_index + row, mask=verifies, other=0) * VOCABULARY
    whole = tl.sum(mass, axis=0).to(tl.float64)
    coin = (random_word(seed, position, step_row, _COIN) >> 8).to(tl.float64) * 5.960464477539063e-08  # 2^-24
    share = tl.exp(tl.load(proposal + draft, mask=verifies, other=0.0)).to(tl.float64)
    own = tl.sum(tl.where(kept & (ids == draft), mass, 0), axis=0).to(tl.float64)
    listed_draft = tl.max((kept & (ids == draft)).to(tl.int32), axis=0) > 0
    passes = listed_draft & (coin * share < own / whole)
    # what the target has above the draft; a NaN in it compares false
    theirs = tl.exp(tl.load(proposal + ids, mask=kept & verifies, other=0.0)).to(tl.float64)
    rest = mass.to(tl.float64) / whole - theirs * _DRAFT_SHARE
    rest = tl.where(kept & (rest > 0), rest * 2147483648.0, 0.0).to(tl.int64)
    rest = tl.where(tl.sum(rest, axis=0) > 0, rest, mass)
    fresh = pick(ids, kept, mass, random_word(seed, position, step_row, _FRESH))
    redrawn = pick(ids, kept, rest, random_word(seed, position, step_row, _RESAMPLE))
    best = tl.load(greedy + row)
    passes = verifies & tl.where(drawn, passes.to(tl.int32), (draft == best).to(tl.int32)) > 0
    token = tl.where(verifies, tl.where(passes, draft, redrawn), fresh)
    token = tl.where(drawable, tl.where(drawn, token, best), -1)
    tl.store(token_ids + row, token)
    tl.store(accepted + row, (passes & drawable).to(tl.int8))
    if COUNT >= 0:
        list_logprobs(
            row, token, drawable, logits, adjusted, raw_best, raw_largest, raw_log_sum, ids, value, kept, top,
            factor, log_sum, listed, values, RAW, COUNT, VOCABULARY, BLOCK_RAW,
        )  # fmt: skip


@triton.jit
def _settle_kernel(
    row_offsets, row_status, accepted, token_ids, listed, values, counts, status, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Count what a request emits, and forget the rows that were not reached."""
    request = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    reached = tl.full((), 1, tl.int32)
    count = tl.zeros((), tl.int32)
    code = tl.zeros((), tl.int32)
    for row in range(tl.load(row_offsets + request), tl.load(row_offsets + request + 1)):
        found = tl.load(row_status + row).to(tl.int32)
        emitted = (reached > 0) & (found == 0)
        code = tl.where(reached > 0, found, code)
        count += emitted.to(tl.int32)
        forgotten = emitted == 0
        tl.store(token_ids + row, tl.full((), -1, tl.int64), mask=forgotten)
        cells = forgotten & (column < COLUMNS)
        tl.store(listed + row * COLUMNS + column, tl.full((BLOCK,), -1, tl.int64), mask=cells)
        tl.store(values + row * COLUMNS + column, tl.full((BLOCK,), float("-inf"), tl.float32), mask=cells)
        reached = (emitted & (tl.load(accepted + row) > 0)).to(tl.int32)
    tl.store(counts + request, count.to(tl.int64))
    tl.store(status + request, code.to(tl.int8))


def verify_drafts(
    logits: torch.Tensor,
    row_offsets: torch.Tensor,
    draft_ids: torch.Tensor,
    draft_log_probs: torch.Tensor,
    draft_index: torch.Tensor,
    *arguments: Any,
) -> Outputs:
    """Rows [N], requests [R] -> token_ids [N], counts, status [R], logprob_ids, logprobs [N, 1 + L].

    Raises UsageError where a row may keep more than 4,096 columns.
    """
    a = Arguments(logits, *arguments)
    drafts = (draft_ids, draft_log_probs, draft_index)
    token_ids, counts, status, listed, values = verify_drafts_fake(logits, row_offsets, *drafts, *arguments)
    adjusted = adjust("verify_drafts", a)
    rows = logits.shape[0]
    every = torch.arange(rows, device=logits.device)
    request_of_row = torch.searchsorted(row_offsets, every, right=True) - 1
    accepted = logits.new_empty(rows, dtype=torch.int8)
    launch(
        _verify_kernel,
        (rows,),
        *(logits, *adjusted, a.seeds, a.positions, a.temperatures, a.top_k, a.top_p, a.min_p),
        *(row_offsets, request_of_row, *drafts, token_ids, listed, values, accepted),
        warps=8,
        **draw_constants(a, adjusted),
    )
    launch(
        _settle_kernel,
        (counts.shape[0],),
        *(row_offsets, adjusted.status, accepted, token_ids, listed, values, counts, status),
        warps=1,
        COLUMNS=listed.shape[1],
        BLOCK=power_of_two(max(1, listed.shape[1])),
    )
    return token_ids, counts, status, listed, values
