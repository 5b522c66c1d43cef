"""Draws one token per row of logits. A row's result depends on that row, its parameters, seed and position.

Owns the pipeline of spec engine B.2 as far as it is supported: greedy, or the 4,096 largest logits,
temperature, integer probability mass and the inverse of its running sum over ascending token ids (B.4),
with the random word of Philox stream case 0 (B.5). Knows nothing of requests, caches or stop rules.

Numerics: everything after the logits is float32 with a fixed order of operations. The exponentials are taken
on rows padded to a power of two of at least 64 columns, so a column sits at the same place of a vector
register whatever the batch; the sum is a tree of pairwise additions whose shape depends on the column alone.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer.runtime import philox
from deepinfer.runtime.sampling_params import SamplingParams

OK: Final = 0
NOT_A_NUMBER: Final = 1  # a NaN or +inf among the row's logits
NOTHING_ALLOWED: Final = 2  # every logit is -inf
STATUS_NAMES: Final = {OK: "ok", NOT_A_NUMBER: "numerical_error", NOTHING_ALLOWED: "no_allowed_token"}

FORCED_TOP_K: Final = 4096
NO_TOKEN: Final = -1
_MASS = np.float32(2.0**31)
_MIN_COLUMNS = 64  # a multiple of every vector width


class Sampled(NamedTuple):
    """Result of `sample`, one entry per row."""

    token_ids: NDArray[np.int64]  # [rows]; -1 where status is not OK
    status: NDArray[np.int8]  # [rows]; OK, NOT_A_NUMBER or NOTHING_ALLOWED


class Candidates(NamedTuple):
    """Columns that survive the forced top-k, as rows of equal width in ascending token id."""

    token_ids: NDArray[np.int64]  # [rows, width]
    logits: NDArray[np.float32]  # [rows, width]


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    seeds: Sequence[int],
) -> Sampled:
    """Draws a token for every row (spec engine B.2 to B.5, B.8).

    logits: [rows, vocab] float32 on the CPU, not modified. params, positions, seeds: one per row; a position
    is the index, within prompt plus output, of the token being made. A row that holds a NaN or +inf, or only
    -inf, gets no token but a status; other rows are not affected.
    """
    values = logits.numpy()
    assert values.ndim == 2 and values.dtype == np.float32, (values.shape, values.dtype)
    assert len(params) == len(positions) == len(seeds) == len(values), "one entry per row"
    token_ids = np.full(len(values), NO_TOKEN, dtype=np.int64)
    maxima = values.max(axis=1) if len(values) else np.empty(0, np.float32)
    status = np.zeros(len(values), dtype=np.int8)
    status[np.isnan(maxima) | (maxima == np.inf)] = NOT_A_NUMBER
    status[maxima == -np.inf] = NOTHING_ALLOWED

    greedy = np.fromiter((p.greedy for p in params), dtype=bool, count=len(params))
    rows = np.flatnonzero(greedy & (status == OK))
    if len(rows):
        token_ids[rows] = _take(values, rows).argmax(axis=1)  # the first, so the lowest id, among equals
    rows = np.flatnonzero(~greedy & (status == OK))
    if len(rows):
        temperatures = np.array([p.temperature for p in params])[rows]
        streams = philox.stream(np.asarray(positions)[rows], philox.FRESH)
        words = philox.random_word(np.asarray(seeds, dtype=np.uint64)[rows], streams)
        kept = keep_largest(_take(values, rows), FORCED_TOP_K)
        masses = integer_masses(kept.logits, temperatures)
        token_ids[rows] = np.take_along_axis(kept.token_ids, draw(masses, words)[:, None], axis=1)[:, 0]
    return Sampled(token_ids, status)


def keep_largest(logits: NDArray[np.float32], count: int) -> Candidates:
    """The `count` largest logits of every row, equal ones at the edge by lower id; all if there are fewer."""
    rows, vocab = logits.shape
    if vocab <= count:
        return Candidates(np.broadcast_to(np.arange(vocab), (rows, vocab)), logits)
    edges = np.partition(logits, vocab - count, axis=1)[:, vocab - count]
    token_ids = np.empty((rows, count), dtype=np.int64)
    for row, edge in enumerate(edges):
        columns = np.flatnonzero(logits[row] >= edge)
        if surplus := len(columns) - count:
            at_edge = np.flatnonzero(logits[row, columns] == edge)
            columns = np.delete(columns, at_edge[-surplus:])
        token_ids[row] = columns
    return Candidates(token_ids, np.take_along_axis(logits, token_ids, axis=1))


def integer_masses(logits: NDArray[np.float32], temperatures: NDArray[np.float64]) -> NDArray[np.uint64]:
    """P_c = floor(p_c * 2**31) of the softmax of logits / temperature (spec engine B.4).

    logits: [rows, columns] float32, at least one finite and none above that per row. temperatures: [rows],
    above 0. Returns [rows, columns]; -inf gives 0.
    """
    rows, columns = logits.shape
    width = max(_MIN_COLUMNS, 1 << (columns - 1).bit_length())
    scaled = np.full((rows, width), -np.inf, dtype=np.float32)
    # A very high temperature must not make the factor 0: -inf times 0 is no number.
    factors = np.maximum((1.0 / temperatures).astype(np.float32), np.finfo(np.float32).tiny)
    with np.errstate(over="ignore", under="ignore"):
        np.subtract(logits, logits.max(axis=1, keepdims=True), out=scaled[:, :columns])
        scaled[:, :columns] *= factors[:, None]
        exponentials = np.exp(scaled, out=scaled)
        shares = exponentials[:, :columns] / tree_sum(exponentials)[:, None]
    return (shares * _MASS).astype(np.uint64)  # the product is exact, the conversion truncates


def tree_sum(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Sum over the last axis, a power of two, by repeatedly adding neighbours: 0+1, 2+3, ...

    Trailing zeros do not change the result, so padding to a larger power of two does not either.
    """
    while values.shape[-1] > 1:
        values = values[..., 0::2] + values[..., 1::2]
    return values[..., 0]


def draw(masses: NDArray[np.uint64], words: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Column that a random word picks per row: the first whose running sum exceeds word * total / 2**32."""
    running = masses.cumsum(axis=1)
    target = philox.integer_draw(words, running[:, -1])
    return (running > target[:, None]).argmax(axis=1)


def _take(values: NDArray[np.float32], rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """The named rows, without a copy where they are all of them."""
    return values if len(rows) == len(values) else values[rows]
