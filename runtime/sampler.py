"""Draws one token per row of logits. A result depends on its row, parameters, state, seed and position alone.

Turns what requests ask for into the arrays of the operation `sample`, which owns the pipeline; what no row
asks for is not passed. What the parameters alone decide is kept from one call to the next, as the requests of
a batch mostly stay the same. Knows nothing of requests, caches or stop rules. The op library must be loaded.

The operation is called as it is and stands in no graph: a compiled graph around it takes three times as long
to call for one row, and would fix both the number of rows and which of the options are in use.
"""

import operator
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer.kernels import sample as sample_op
from deepinfer.kernels.sampling import FORCED_TOP_K, Arguments, adjusted_logits, rank_of
from deepinfer.runtime.outputs import Logprob, Logprobs
from deepinfer.runtime.sampler_interface import (
    LOWEST_LOGPROB,
    NO_TOKEN,
    NOT_A_NUMBER,
    NOTHING_ALLOWED,
    OK,
    STATUS_NAMES,
    Sampled,
    States,
)
from deepinfer.runtime.sampling_params import SamplingParams

__all__ = [
    "NOTHING_ALLOWED",
    "NOT_A_NUMBER",
    "NO_TOKEN",
    "OK",
    "STATUS_NAMES",
    "CompiledSampler",
    "Sampled",
    "sample",
]

_NO_INTEGERS = torch.zeros(0, dtype=torch.int64)
_NO_SHARES = torch.zeros(0, dtype=torch.float64)
_NO_MASKS = torch.zeros(0, 0, dtype=torch.int32)
_NO_PENALTIES = torch.zeros(0, 3)
_NO_BIAS = torch.zeros(0)
_KEPT_ROWS = 1024  # batches of at most so many rows have memory of their own

_MIN_LISTED = 8  # of the best: a token that is among them needs no pass over the row for its rank

# the operation's arguments from history_offsets to mask_index
_StateArrays = tuple[torch.Tensor, ...]
_NO_STATES: _StateArrays = (*[_NO_INTEGERS] * 5, _NO_BIAS, _NO_MASKS, _NO_INTEGERS)


class _Plan(NamedTuple):
    """What the parameters of a batch decide, whatever its tokens, seeds and positions."""

    params: tuple[SamplingParams, ...]
    temperatures: torch.Tensor
    filters: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # top_k, top_p, min_p
    penalties: torch.Tensor
    logprobs: tuple[int | None, ...]  # per row; empty if no row asks for log-probabilities
    num_logprobs: int  # as many of the best as the operation lists; -1: none
    raw: tuple[bool, ...]  # per row; empty if no row asks for log-probabilities
    looking: tuple[int, ...]  # rows whose parameters look at tokens
    looking_index: Any  # the same as an index into rows: all of them, or an array


class _Columns:
    """Seeds and positions of so many rows: memory that every call fills anew."""

    def __init__(self, rows: int) -> None:
        self.seeds, self.positions = np.zeros(rows, np.uint64), np.zeros(rows, np.int64)
        self.tensors = torch.from_numpy(self.seeds.view(np.int64)), torch.from_numpy(self.positions)
        self.given_seeds: Sequence[int] = ()

    def fill(self, seeds: Sequence[int], positions: Sequence[int]) -> None:
        """A batch's seeds are mostly those of the call before."""
        self.positions[:] = positions
        if self.given_seeds != seeds:
            self.seeds[:] = seeds
            self.given_seeds = seeds[:]


class CompiledSampler:
    """The `Sampler` that runs the compiled operation. Not thread-safe: one for each engine."""

    name = "compiled"

    def __init__(self, forced_top_k: int = FORCED_TOP_K) -> None:
        """forced_top_k: the most columns that are looked at; 0 is all."""
        self._forced_top_k = forced_top_k
        self._plan = _make_plan(())
        self._columns: dict[int, _Columns] = {}  # by rows
        self._arrays = _StateArraysCache()
        self._by_mode: tuple[CompiledSampler, CompiledSampler] | None = None  # processed, raw

    def sample(
        self,
        logits: torch.Tensor,
        params: Sequence[SamplingParams],
        positions: Sequence[int],
        seeds: Sequence[int],
        states: States = (),
    ) -> Sampled:
        """See `Sampler.sample`."""
        rows = logits.shape[0]
        assert logits.ndim == 2 and logits.dtype == torch.float32, (logits.shape, logits.dtype)
        assert len(params) == len(positions) == len(seeds) == rows, "one entry per row"
        plan = self._plan
        if plan.params != (own := tuple(params)):  # quick for the same objects, and right for equal ones
            plan = self._plan = _make_plan(own)
        if plan.raw and any(plan.raw) and not all(plan.raw):  # the mode is one of a whole call
            return self._merged(plan.raw, logits, params, positions, seeds, states)
        columns = self._columns.get(rows)
        if columns is None:
            columns = _Columns(rows)
            if rows <= _KEPT_ROWS:
                self._columns[rows] = columns
        columns.fill(seeds, positions)
        arguments: tuple[Any, ...] = (
            logits,
            *columns.tensors,
            plan.temperatures,
            *plan.filters,
            plan.penalties,
            *(self._arrays.of(plan, states) if plan.looking else _NO_STATES),
            self._forced_top_k,
            plan.num_logprobs,
            bool(plan.raw) and plan.raw[0],
        )
        token_ids, status, *listed = sample_op.native(*arguments)
        result = Sampled(token_ids.tolist(), status.tolist())
        if not plan.logprobs:
            return result
        return result._replace(logprobs=_listed(Arguments(*arguments), plan, result, *listed))

    def _merged(
        self,
        raw: Sequence[bool],
        logits: torch.Tensor,
        params: Sequence[SamplingParams],
        positions: Sequence[int],
        seeds: Sequence[int],
        states: States,
    ) -> Sampled:
        """The rows of each mode by themselves, put together again."""
        if self._by_mode is None:
            self._by_mode = CompiledSampler(self._forced_top_k), CompiledSampler(self._forced_top_k)
        rows = len(raw)
        token_ids, status = [NO_TOKEN] * rows, [OK] * rows
        logprobs: list[Logprobs | None] = [None] * rows
        for mode, sampler in zip((False, True), self._by_mode, strict=True):
            places = [row for row in range(rows) if raw[row] is mode]
            part = sampler.sample(
                logits[places],
                [params[row] for row in places],
                [positions[row] for row in places],
                [seeds[row] for row in places],
                [states[row] for row in places] if states else (),
            )
            for place, row in enumerate(places):
                token_ids[row], status[row] = part.token_ids[place], part.status[place]
                logprobs[row] = part.logprobs[place] if part.logprobs else None
        return Sampled(token_ids, status, logprobs)


_of_thread = threading.local()


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    seeds: Sequence[int],
    states: States = (),
) -> Sampled:
    """`CompiledSampler.sample`, by a sampler that belongs to the calling thread."""
    sampler = getattr(_of_thread, "sampler", None)
    if sampler is None:
        sampler = _of_thread.sampler = CompiledSampler()
    found: Sampled = sampler.sample(logits, params, positions, seeds, states)
    return found


def _make_plan(params: tuple[SamplingParams, ...]) -> _Plan:
    rows = len(params)
    top_k, top_p, min_p, penalties = _NO_INTEGERS, _NO_SHARES, _NO_SHARES, _NO_PENALTIES
    logprobs: tuple[int | None, ...] = ()
    num_logprobs = -1
    raw: tuple[bool, ...] = ()
    if not all(own.plain for own in params):
        if any(own.top_k for own in params):
            top_k = torch.from_numpy(np.fromiter((own.top_k for own in params), np.int64, rows))
        if any(own.top_p != 1.0 for own in params):
            top_p = torch.from_numpy(np.fromiter((own.top_p for own in params), np.float64, rows))
        if any(own.min_p for own in params):
            min_p = torch.from_numpy(np.fromiter((own.min_p for own in params), np.float64, rows))
        if any(own.logprobs is not None for own in params):
            logprobs = tuple(own.logprobs for own in params)
            num_logprobs = max(_MIN_LISTED, *(count or 0 for count in logprobs))
            raw = tuple(own.logprobs is not None and own.logprobs_mode == "raw" for own in params)
        if any(own.penalises for own in params):
            factors = [
                (own.repetition_penalty, own.frequency_penalty, own.presence_penalty) for own in params
            ]
            penalties = torch.tensor(factors, dtype=torch.float32)
    temperatures = torch.from_numpy(np.fromiter((own.temperature for own in params), np.float64, rows))
    looking = tuple(row for row, own in enumerate(params) if own.looks_at_tokens)
    index = slice(None) if len(looking) == rows else np.array(looking)
    return _Plan(
        params, temperatures, (top_k, top_p, min_p), penalties, logprobs, num_logprobs, raw, looking, index
    )


class _StateArraysCache:
    """The arguments for history, bias and masks; bias and masks are joined anew only when one changes."""

    def __init__(self) -> None:
        self._plan: _Plan | None = None
        self._bias_of: list[NDArray[np.int64]] = []
        self._bias: _StateArrays = (_NO_INTEGERS, _NO_INTEGERS, _NO_BIAS)
        self._masks_of: list[NDArray[np.int32] | None] = []
        self._masks: _StateArrays = (_NO_MASKS, _NO_INTEGERS)

    def of(self, plan: _Plan, states: States) -> _StateArrays:
        """The arrays for a batch, as far as a row uses them."""
        rows = len(plan.params)
        assert len(states) == rows, "one state per row"
        own = [state for row in plan.looking if (state := states[row]) is not None]
        assert len(own) == len(plan.looking), "a state per row that looks at tokens"
        same_rows = self._plan is plan
        history: _StateArrays = (_NO_INTEGERS,) * 3
        if len(plan.penalties):
            ids = [state.history_ids for state in own]
            counts = [state.history_counts for state in own]
            history = _offsets(plan, ids), _joined(ids), _joined(counts)
        bias_of = [state.bias_ids for state in own]  # replaced together with the values
        if not (same_rows and _identical(bias_of, self._bias_of)):
            self._bias_of, self._bias = bias_of, (_NO_INTEGERS, _NO_INTEGERS, _NO_BIAS)
            if any(map(len, bias_of)):
                biases = [state.bias for state in own]
                self._bias = _offsets(plan, bias_of), _joined(bias_of), _joined(biases)
        masks_of = [state.mask for state in own]
        if not (same_rows and _identical(masks_of, self._masks_of)):
            self._masks_of, self._masks = masks_of, (_NO_MASKS, _NO_INTEGERS)
            if words := [mask for mask in masks_of if mask is not None]:
                index = np.full(rows, -1)
                has_mask = [row for row, mask in zip(plan.looking, masks_of, strict=True) if mask is not None]
                index[has_mask] = np.arange(len(words))
                self._masks = torch.from_numpy(np.stack(words)), torch.from_numpy(index)
        self._plan = plan
        return *history, *self._bias, *self._masks


def _identical(some: Sequence[object], others: Sequence[object]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _offsets(plan: _Plan, arrays: Sequence[NDArray[Any]]) -> torch.Tensor:
    """Bounds [rows + 1] of the entries of every row; rows that look at no tokens have none."""
    ends = np.zeros(len(plan.params) + 1, np.int64)
    ends[1:][plan.looking_index] = list(map(len, arrays))
    return torch.from_numpy(np.add.accumulate(ends))


def _joined(arrays: Sequence[NDArray[Any]]) -> torch.Tensor:
    return torch.from_numpy(arrays[0] if len(arrays) == 1 else np.concatenate(arrays))


def _listed(
    arguments: Arguments, plan: _Plan, result: Sampled, ids: torch.Tensor, values: torch.Tensor
) -> list[Logprobs | None]:
    """Every row's mapping, None for one that asks for none or has no token."""
    columns = zip(plan.logprobs, result.status, ids.tolist(), values.tolist(), strict=True)
    found: list[Logprobs | None] = []
    for row, (count, code, own_ids, own_values) in enumerate(columns):
        if count is None or code != OK:
            found.append(None)
            continue
        try:
            rank = own_ids.index(own_ids[0], 1)
        except ValueError:
            rank = _rank(arguments, row, own_ids[0])
        found.append(_logprobs(count, own_ids, own_values, rank))
    return found


def _rank(arguments: Arguments, row: int, token: int) -> int:
    """Place of a token that is not among the listed ones, by falling logit and rising id."""
    if arguments.raw_logprobs or not _adjusts(arguments, row):
        logits: NDArray[np.float32] = arguments.logits.numpy()[row]
    else:
        logits = adjusted_logits(arguments, row)
    return rank_of(logits, token)


def _adjusts(arguments: Arguments, row: int) -> bool:
    """Whether the row has penalties, bias or a mask."""
    for offsets in (arguments.history_offsets, arguments.bias_offsets):
        if offsets is not _NO_INTEGERS and offsets[row] < offsets[row + 1]:
            return True
    masks = arguments.mask_index
    return masks is not _NO_INTEGERS and bool(masks[row] >= 0)


def _logprobs(count: int, ids: Sequence[int], values: Sequence[float], rank: int) -> Logprobs:
    """One row's mapping: the token, then the `count` best; what has no finite value is left out."""
    token = ids[0]
    # Its value can only overflow to -inf in raw mode, where the draw saw other logits.
    entries = {token: Logprob(values[0] if values[0] >= LOWEST_LOGPROB else LOWEST_LOGPROB, rank)}
    for place in range(1, count + 1):
        if values[place] < LOWEST_LOGPROB:  # the best fall: nothing finite follows
            break
        if place != rank:
            entries[ids[place]] = Logprob(values[place], place)
    return entries
