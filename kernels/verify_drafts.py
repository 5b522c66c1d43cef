"""Drafted tokens against the target: which are accepted, and the token that follows (spec engine B.6).

Maths     a request has rows j = 0 .. v. Row j < v verifies draft d_j, row v is drawn as `sample` draws. With
          P, K = masses of row j and their sum (`sampling.py`), q = exp(stored log q), place P0 + 10000019 j:
              accepted   u q[d] < P[d] / K           u: 24 bits of stream 3 place + 2, exact in float64
              else       draw from floor(max(P / K - exp(-5e-5) q, 0) 2^31) over the kept columns, stream
                         3 place + 1; from P itself should all of them be 0
          The request emits the accepted drafts before the first failure, and the token drawn there. At
          temperature 0 a draft is accepted if it is the greedy token, which is what is emitted otherwise.
Shapes    logits [N, V], rows of a request together; row_offsets [R + 1] i64 bounds of each request's rows;
          draft_ids [N], draft_index [N] i64: the draft of the row and the row of draft_log_probs [S, V] fp32
          that it was drawn from (both unused in a request's last row); then `sampling.Arguments`, where
          positions holds P0, the index of the token that the request's first row makes, in all its rows
          -> token_ids [N] (-1 behind the emitted), counts [R] i64 emitted tokens, status [R] i8, logprob_ids
          and logprobs [N, 1 + L], of the target, also for an accepted or redrawn token
Numerics  P / K, u q and the leftover are float64, exp(log q) is float32. Rows behind the first failure are
          not looked at. A bad row that is reached ends the request with its status; what was accepted stays.
          A NaN in log q fails the draft and leaves nothing of its column.
Native    as `sample.py`.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer.errors import UsageError
from deepinfer.kernels import philox
from deepinfer.kernels.checks import check_tensor
from deepinfer.kernels.registry import Op
from deepinfer.kernels.sample import make_arguments
from deepinfer.kernels.sampling import (
    NO_TOKEN,
    OK,
    SCHEMA,
    Arguments,
    Distribution,
    Results,
    check_arguments,
    check_values,
    distribution,
    draw,
    draw_token,
    random_word,
)

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
DRAFT_SHARE: Final = 0.99995000124997917  # exp(-5e-5): keeps the leftover of a rejection above 0


def _check(
    a: Arguments,
    row_offsets: torch.Tensor,
    draft_ids: torch.Tensor,
    draft_log_probs: torch.Tensor,
    draft_index: torch.Tensor,
) -> None:
    check_arguments("verify_drafts", a)
    rows, vocab = a.logits.shape
    check_tensor("verify_drafts", "row_offsets", row_offsets, (None,), (torch.int64,))
    check_tensor("verify_drafts", "draft_ids", draft_ids, (rows,), (torch.int64,))
    check_tensor("verify_drafts", "draft_log_probs", draft_log_probs, (None, vocab), (torch.float32,))
    check_tensor("verify_drafts", "draft_index", draft_index, (rows,), (torch.int64,))


def _check_drafts(
    a: Arguments, offsets: NDArray[np.int64], ids: NDArray[np.int64], index: NDArray[np.int64], proposals: int
) -> None:
    rows, vocab = a.logits.shape
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != rows or (np.diff(offsets) < 1).any():
        raise UsageError(f"must rise from 0 to {rows}", where="verify_drafts: row_offsets")
    verified = np.ones(rows, bool)
    verified[offsets[1:] - 1] = False
    for name, values, bound in (("draft_ids", ids, vocab), ("draft_index", index, proposals)):
        if ((values[verified] < 0) | (values[verified] >= bound)).any():
            raise UsageError(f"must lie in 0 .. {bound - 1}", where=f"verify_drafts: {name}")
    if (a.positions.numpy() >= philox.ROW_STRIDE).any():
        raise UsageError(f"must be below {philox.ROW_STRIDE}", where="verify_drafts: positions")


def verify_drafts_reference(
    logits: torch.Tensor,
    row_offsets: torch.Tensor,
    draft_ids: torch.Tensor,
    draft_log_probs: torch.Tensor,
    draft_index: torch.Tensor,
    *arguments: Any,
) -> Outputs:
    """The definition; see the module text."""
    a = Arguments(logits, *arguments)
    _check(a, row_offsets, draft_ids, draft_log_probs, draft_index)
    check_values("verify_drafts", a)
    offsets, ids, index = row_offsets.numpy(), draft_ids.numpy(), draft_index.numpy()
    _check_drafts(a, offsets, ids, index, draft_log_probs.shape[0])
    results = Results(a)
    counts, status = (torch.zeros(len(offsets) - 1, dtype=dtype) for dtype in (torch.int64, torch.int8))
    for request, (first, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        for row in range(first, end):
            found, step_row = distribution(a, row), row - first
            status[request] = found.status
            if found.status != OK:
                break
            counts[request] += 1
            if row == end - 1:
                results.emit(row, found, draw_token(a, row, found, philox.FRESH, step_row))
                break
            log_q, draft = draft_log_probs[index[row]].numpy(), int(ids[row])
            if not accepts(a, row, found, step_row, draft, log_q):
                results.emit(row, found, draw_leftover(a, row, found, step_row, log_q))
                break
            results.emit(row, found, draft)
    return results.token_ids, counts, status, results.logprob_ids, results.logprobs


def accepts(
    a: Arguments, row: int, found: Distribution, step_row: int, draft: int, log_q: NDArray[np.float32]
) -> bool:
    """Whether the draft passes."""
    if found.greedy != NO_TOKEN:
        return draft == found.greedy
    masses = found.masses[found.ids == draft]
    if not len(masses):
        return False
    coin = (random_word(a, row, philox.COIN, step_row) >> 8) * 2.0**-24
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(coin * float(np.exp(log_q[draft])) < float(masses[0]) / float(found.masses.sum()))


def leftover_masses(found: Distribution, log_q: NDArray[np.float32]) -> NDArray[np.uint64]:
    """What the target has above the draft, over the kept columns, out of 2^31."""
    with np.errstate(over="ignore"):
        q = np.exp(log_q[found.ids]).astype(np.float64)
    rest = found.masses / float(found.masses.sum()) - DRAFT_SHARE * q
    return (np.where(rest > 0, rest, 0.0) * 2.0**31).astype(np.uint64)


def draw_leftover(
    a: Arguments, row: int, found: Distribution, step_row: int, log_q: NDArray[np.float32]
) -> int:
    """The token that replaces a rejected draft."""
    if found.greedy != NO_TOKEN:
        return found.greedy
    masses = leftover_masses(found, log_q)
    if not masses.any():
        return draw_token(a, row, found, philox.RESAMPLE, step_row)
    return int(found.ids[draw(masses, random_word(a, row, philox.RESAMPLE, step_row))])


def verify_drafts_fake(
    logits: torch.Tensor,
    row_offsets: torch.Tensor,
    draft_ids: torch.Tensor,
    draft_log_probs: torch.Tensor,
    draft_index: torch.Tensor,
    *arguments: Any,
) -> Outputs:
    """Shape rule."""
    a = Arguments(logits, *arguments)
    _check(a, row_offsets, draft_ids, draft_log_probs, draft_index)
    rows, columns, requests = a.logits.shape[0], 1 + a.num_logprobs, row_offsets.shape[0] - 1
    return (
        logits.new_empty((rows,), dtype=torch.int64),
        logits.new_empty((requests,), dtype=torch.int64),
        logits.new_empty((requests,), dtype=torch.int8),
        logits.new_empty((rows, columns), dtype=torch.int64),
        logits.new_empty((rows, columns)),
    )


def _make_inputs(rows: int, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
    """Requests of 1 to 4 rows, drafts drawn from distributions near the target's."""
    rng = np.random.default_rng(seed)
    a = make_arguments(rows, 300, seed)
    bounds = np.unique(np.append(np.cumsum(rng.integers(1, 5, rows + 1)), 0))
    offsets = np.append(bounds[bounds < rows], rows) if rows else np.zeros(1, np.int64)
    near = a.logits + torch.from_numpy(rng.normal(size=(rows, 300)).astype(np.float32))
    log_q = near.log_softmax(-1)
    drafts = log_q.argmax(-1) if rows else torch.zeros(0, dtype=torch.int64)
    first = np.repeat(offsets[:-1], np.diff(offsets))
    arguments = a._replace(positions=a.positions[first])[1:]
    return (a.logits, torch.from_numpy(offsets), drafts, log_q, torch.arange(rows), *arguments)


verify_drafts = Op(
    name="verify_drafts",
    schema=(
        "verify_drafts(Tensor logits, Tensor row_offsets, Tensor draft_ids, Tensor draft_log_probs, "
        f"Tensor draft_index, {SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    reference=verify_drafts_reference,
    fake=verify_drafts_fake,
    make_inputs=_make_inputs,
    tolerance={torch.float32: (2e-6, 2e-6), torch.bfloat16: (2e-6, 2e-6)},
)
