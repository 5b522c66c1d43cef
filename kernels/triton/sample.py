"""Sampling: adjust, find the forced best, filter, draw, list log-probabilities; see `kernels/sample.py`."""

from typing import Any

import triton
import triton.language as tl

from deepinfer.kernels import philox
from deepinfer.kernels.sample import Outputs, sample_fake
from deepinfer.kernels.sampling import Arguments
from deepinfer.kernels.triton.adjusted_logits import Adjusted, adjust
from deepinfer.kernels.triton.draws import list_logprobs, pick, random_word, row_distribution
from deepinfer.kernels.triton.launch import launch, power_of_two


@triton.jit
def _draw_kernel(
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
    token_ids,
    listed,
    values,
    CASE: tl.constexpr,
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
    row = tl.program_id(0).to(tl.int64)
    drawable = tl.load(status + row) == 0
    ids, value, kept, mass, top, factor, log_sum, drawn = row_distribution(
        row, adjusted, forced, temperatures, top_k, top_p, min_p, largest, drawable,
        HAS_TOP_K, HAS_TOP_P, HAS_MIN_P, FORCED, VOCABULARY, BLOCK,
    )  # fmt: skip
    token = pick(ids, kept, mass, random_word(tl.load(seeds + row), tl.load(positions + row), 0, CASE))
    token = tl.where(drawn, token, tl.load(greedy + row))
    token = tl.where(drawable, token, -1)
    tl.store(token_ids + row, token)
    if COUNT >= 0:
        list_logprobs(
            row, token, drawable, logits, adjusted, raw_best, raw_largest, raw_log_sum, ids, value, kept, top,
            factor, log_sum, listed, values, RAW, COUNT, VOCABULARY, BLOCK_RAW,
        )  # fmt: skip


def draw_constants(a: Arguments, adjusted: Adjusted) -> dict[str, int | bool]:
    """Compile-time parameters that kernels which draw have in common."""
    forced_top_k = adjusted.forced.shape[1]
    return {
        "HAS_TOP_K": a.top_k.numel() > 0,
        "HAS_TOP_P": a.top_p.numel() > 0,
        "HAS_MIN_P": a.min_p.numel() > 0,
        "RAW": a.raw_logprobs,
        "COUNT": a.num_logprobs,
        "FORCED": forced_top_k,
        "VOCABULARY": a.logits.shape[1],
        "BLOCK": power_of_two(forced_top_k),
        "BLOCK_RAW": power_of_two(max(1, a.num_logprobs)),
    }


def sample(*arguments: Any) -> Outputs:
    """`sampling.Arguments` in order -> token_ids, status [N], logprob_ids, logprobs [N, 1 + num_logprobs].

    Raises UsageError where a row may keep more than 4,096 columns.
    """
    a = Arguments(*arguments)
    token_ids, _, listed, values = sample_fake(*arguments)
    adjusted = adjust("sample", a)
    launch(
        _draw_kernel,
        (a.logits.shape[0],),
        *(a.logits, *adjusted, a.seeds, a.positions, a.temperatures, a.top_k, a.top_p, a.min_p),
        *(token_ids, listed, values),
        warps=8,
        CASE=philox.FRESH,
        **draw_constants(a, adjusted),
    )
    return token_ids, adjusted.status, listed, values
