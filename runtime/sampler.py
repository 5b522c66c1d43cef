"""Draws one token per row of logits. A result depends on its row, parameters, state, seed and position alone.

Turns what requests ask for into the arrays of the operation `sample`, which owns the pipeline; what no row
asks for is not passed. Knows nothing of requests, caches or stop rules. The op library must be loaded.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer.kernels import sample as sample_op
from deepinfer.kernels.sampling import (
    NO_TOKEN,
    NOT_A_NUMBER,
    NOTHING_ALLOWED,
    OK,
    Arguments,
    adjusted_logits,
)
from deepinfer.runtime.outputs import Logprob, Logprobs
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.sampling_state import SamplingState

__all__ = ["NOTHING_ALLOWED", "NOT_A_NUMBER", "NO_TOKEN", "OK", "STATUS_NAMES", "Sampled", "sample"]

STATUS_NAMES: Final = {OK: "ok", NOT_A_NUMBER: "numerical_error", NOTHING_ALLOWED: "no_allowed_token"}

_LOWEST = float(np.finfo(np.float32).min)
_NO_INTEGERS = torch.zeros(0, dtype=torch.int64)
_NO_SHARES = torch.zeros(0, dtype=torch.float64)
_NO_MASKS = torch.zeros(0, 0, dtype=torch.int32)
_NO_PENALTIES = torch.zeros(0, 3)
_NO_BIAS = torch.zeros(0)

_States = Sequence[SamplingState | None]


class Sampled(NamedTuple):
    """Result of `sample`, one entry per row."""

    token_ids: NDArray[np.int64]  # [rows]; NO_TOKEN where status is not OK
    status: NDArray[np.int8]  # [rows]; OK, NOT_A_NUMBER or NOTHING_ALLOWED
    logprobs: Sequence[Logprobs | None] = ()  # None for a row that asks for none; empty if none does


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    seeds: Sequence[int],
    states: _States = (),
) -> Sampled:
    """Draws a token for every row (spec engine B.2 to B.5, B.8).

    logits: [rows, vocab] float32 on the CPU, not modified. params, positions, seeds: one per row; a position
    is the index, within prompt plus output, of the token being made. states: one per row, up to date, where
    parameters look at tokens; may be empty if none do. A row that holds a NaN or +inf, or only -inf, gets no
    token but a status; other rows are not affected.
    """
    rows = len(logits)
    assert logits.ndim == 2 and logits.dtype == torch.float32, (logits.shape, logits.dtype)
    assert len(params) == len(positions) == len(seeds) == rows, "one entry per row"
    plain = all(own.plain for own in params)
    raw = [] if plain else [own.logprobs is not None and own.logprobs_mode == "raw" for own in params]
    if any(raw) and not all(raw):  # the mode is one of a whole call
        return _merged(raw, logits, params, positions, seeds, states)
    arguments = Arguments(
        logits=logits,
        seeds=torch.from_numpy(np.fromiter(seeds, np.uint64, rows).view(np.int64)),
        positions=torch.from_numpy(np.fromiter(positions, np.int64, rows)),
        temperatures=torch.from_numpy(np.fromiter((p.temperature for p in params), np.float64, rows)),
        top_k=_NO_INTEGERS,
        top_p=_NO_SHARES,
        min_p=_NO_SHARES,
        penalties=_NO_PENALTIES,
        history_offsets=_NO_INTEGERS,
        history_ids=_NO_INTEGERS,
        history_counts=_NO_INTEGERS,
        bias_offsets=_NO_INTEGERS,
        bias_ids=_NO_INTEGERS,
        bias=_NO_BIAS,
        masks=_NO_MASKS,
        mask_index=_NO_INTEGERS,
        raw_logprobs=any(raw),
    )
    if not plain:
        arguments = arguments._replace(**_filters(params), **_of_states(params, states))
    token_ids, status, logprob_ids, logprobs = sample_op.native(*arguments)
    result = Sampled(token_ids.numpy(), status.numpy())
    if arguments.num_logprobs < 0:
        return result
    listed = zip(params, status.tolist(), logprob_ids.tolist(), logprobs.tolist(), strict=True)
    return result._replace(
        logprobs=[
            None
            if own.logprobs is None or code != OK
            else _logprobs(arguments, row, own.logprobs, ids, values)
            for row, (own, code, ids, values) in enumerate(listed)
        ]
    )


def _filters(params: Sequence[SamplingParams]) -> dict[str, Any]:
    """The arguments top_k, top_p, min_p and num_logprobs, as far as a row uses them."""
    rows = len(params)
    found: dict[str, Any] = {}
    if any(own.top_k for own in params):
        found["top_k"] = torch.from_numpy(np.fromiter((own.top_k for own in params), np.int64, rows))
    if any(own.top_p != 1.0 for own in params):
        found["top_p"] = torch.from_numpy(np.fromiter((own.top_p for own in params), np.float64, rows))
    if any(own.min_p for own in params):
        found["min_p"] = torch.from_numpy(np.fromiter((own.min_p for own in params), np.float64, rows))
    found["num_logprobs"] = max(-1 if own.logprobs is None else own.logprobs for own in params)
    return found


def _of_states(params: Sequence[SamplingParams], states: _States) -> dict[str, Any]:
    """The arguments for penalties, bias and masks, as far as a row uses them."""
    needed = [own.looks_at_tokens for own in params]
    if not any(needed):
        return {}
    assert len(states) == len(params), "one state per row"
    used = [state if need else None for state, need in zip(states, needed, strict=True)]
    assert all((state is not None) == need for state, need in zip(used, needed, strict=True)), (
        "a state per row"
    )
    found: dict[str, Any] = {}
    if any(own.penalises for own in params):
        factors = [(own.repetition_penalty, own.frequency_penalty, own.presence_penalty) for own in params]
        found["penalties"] = torch.tensor(factors, dtype=torch.float32)
        found["history_offsets"] = _offsets(0 if state is None else len(state.history_ids) for state in used)
        found["history_ids"] = _joined([state.history_ids for state in used if state], np.int64)
        found["history_counts"] = _joined([state.history_counts for state in used if state], np.int64)
    if any(state is not None and len(state.bias_ids) for state in used):
        found["bias_offsets"] = _offsets(0 if state is None else len(state.bias_ids) for state in used)
        found["bias_ids"] = _joined([state.bias_ids for state in used if state], np.int64)
        found["bias"] = _joined([state.bias for state in used if state], np.float32)
    masks = [None if state is None else state.mask for state in used]
    if words := [mask for mask in masks if mask is not None]:
        has_mask = np.array([mask is not None for mask in masks])
        found["masks"] = torch.from_numpy(np.stack(words))
        found["mask_index"] = torch.from_numpy(np.where(has_mask, has_mask.cumsum() - 1, -1))
    return found


def _offsets(counts: Iterable[int]) -> torch.Tensor:
    return torch.from_numpy(np.cumsum([0, *counts], dtype=np.int64))


def _joined(arrays: Sequence[NDArray[Any]], dtype: Any) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.empty(0, dtype), *arrays]))


def _logprobs(
    arguments: Arguments, row: int, count: int, ids: Sequence[int], values: Sequence[float]
) -> Logprobs:
    """One row's mapping: the token, then the `count` best; what has no finite value is left out."""
    token = ids[0]
    best = ids[1 : 1 + count]
    rank = best.index(token) + 1 if token in best else _rank(arguments, row, token)
    # Its value can only overflow to -inf in raw mode, where the draw saw other logits.
    entries = {token: Logprob(max(values[0], _LOWEST), rank)}
    for place, (other, value) in enumerate(zip(best, values[1:], strict=False), start=1):
        if other != NO_TOKEN and other != token and math.isfinite(value):
            entries[other] = Logprob(value, place)
    return entries


def _rank(arguments: Arguments, row: int, token: int) -> int:
    """Place of a token that is not among the listed ones, by falling logit and rising id."""
    raw = arguments.raw_logprobs
    logits = arguments.logits[row].numpy() if raw else adjusted_logits(arguments, row)
    own = logits[token]
    return 1 + int((logits > own).sum()) + int((logits[:token] == own).sum())


def _merged(
    raw: Sequence[bool],
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    seeds: Sequence[int],
    states: _States,
) -> Sampled:
    """The rows of each mode by themselves, put together again."""
    rows = len(raw)
    token_ids, status = np.empty(rows, np.int64), np.empty(rows, np.int8)
    logprobs: list[Logprobs | None] = [None] * rows
    for mode in (False, True):
        places = [row for row in range(rows) if raw[row] is mode]
        part = sample(
            logits[places],
            [params[row] for row in places],
            [positions[row] for row in places],
            [seeds[row] for row in places],
            [states[row] for row in places] if states else (),
        )
        token_ids[places], status[places] = part.token_ids, part.status
        for row, found in zip(places, part.logprobs, strict=bool(part.logprobs)):
            logprobs[row] = found
    return Sampled(token_ids, status, logprobs)
