"""A step runner without a model: the next token's scores come from a seeded table, through a real cache.

Scheduler, sampler and engine run on it by the hundred thousand steps. Each step writes its token ids into
blocks and slots, as a model writes its records, and then scores from what it reads back through the block
table and the slot: blocks that are wrong, shared or overwritten, positions that were skipped and rows of
somebody else give other scores than `scores`, which uses no cache. Fresh memory holds junk.
"""

import hashlib
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.runtime.limits import Limits
from deepinfer.runtime.model_runner import sampled_rows
from deepinfer.runtime.request import Batch, CacheState, Request, ScheduledRows

WINDOW: Final = 4  # newest positions that a slot remembers
_TABLE_ROWS = 1021
_STEPS = 64  # scores are multiples of 1/8, so that equal ones are common and sums are exact
_SPREAD = np.float32(8.0)
_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd: a polynomial hash modulo 2^64
_MIX = np.uint64(0xBF58476D1CE4E5B9)

_Ids = NDArray[np.int64]


class TableRunner:
    """Scores `[rows, vocab]` as a function of the token ids so far. One step at a time; not thread-safe."""

    def __init__(
        self, limits: Limits, seed: int = 0, order: int | None = None, poison_token_id: int | None = None
    ) -> None:
        """order: how many of the newest tokens decide; None is all of them. After the poison token, scores
        are NaN."""
        assert order is None or order >= 1, order
        self.limits = limits
        self.seed, self.order, self.poison_token_id = seed, order, poison_token_id
        self.table = _make_table(seed, limits.vocab_size)
        self.identity = "table " + " ".join(map(str, self.manifest().values()))
        with np.errstate(over="ignore"):
            powers = np.full(limits.max_model_len + WINDOW, _BASE)
            powers[0] = 1
            self._powers = np.multiply.accumulate(powers)
        self._blocks = _junk(limits.num_blocks, limits.block_tokens)
        self._slots = _junk(limits.num_slots, WINDOW)

    def run(self, batch: Batch) -> Tensor:
        """float32 scores for `sampled_rows(batch)`, in row order."""
        self._check(batch)
        self._prepare_caches(batch)
        self._last_batch = batch
        for rows in batch.rows:
            positions = np.arange(rows.start, rows.start + rows.count)
            tokens = np.asarray(rows.request.tokens(rows.start, rows.count), np.int64)
            table = np.asarray(rows.request.block_table, np.int64)
            size = self.limits.block_tokens
            self._blocks[table[positions // size], positions % size] = tokens
            newest = positions[-WINDOW:]
            self._slots[rows.request.slot_id, newest % WINDOW] = tokens[-WINDOW:]
        return self.logits_of_rows(sampled_rows(batch))

    def logits_of_rows(self, rows: _Ids) -> Tensor:
        """float32 scores [len(rows), vocab] of these rows of the last batch."""
        wanted = rows.tolist()
        found: dict[int, NDArray[np.float32]] = {}
        first = 0
        for scheduled in self._last_batch.rows:
            own = [row for row in range(scheduled.count) if first + row in wanted]
            contexts = self._contexts(scheduled, [scheduled.start + row for row in own])
            found |= {first + row: self._score(ids) for row, ids in zip(own, contexts, strict=True)}
            first += scheduled.count
        scores = np.array([found[row] for row in wanted], np.float32)
        return torch.from_numpy(scores.reshape(-1, self.limits.vocab_size))

    def read_state(self, request: Request) -> CacheState:
        """What the caches hold of a request."""
        blocks = self._blocks[np.asarray(request.block_table, np.int64)]
        return CacheState(blocks.tobytes(), self._slots[request.slot_id].tobytes())

    def scores(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """The same scores without a cache: float32 `[len(token_ids), vocab]`, row i for the token after i."""
        ids = np.asarray(token_ids, np.int64)
        rows = [self._score(ids[: place + 1]) for place in range(len(ids))]
        return np.array(rows, np.float32).reshape(-1, self.limits.vocab_size)

    def manifest(self) -> dict[str, str | int | None]:
        """What this backend is: everything that can change a score."""
        return {
            "backend": "table",
            "seed": self.seed,
            "order": self.order,
            "poison_token_id": self.poison_token_id,
            "vocab_size": self.limits.vocab_size,
            "dtype": "float32",
            "parameters_sha256": hashlib.sha256(self.table.tobytes()).hexdigest(),
        }

    def _prepare_caches(self, batch: Batch) -> None:
        for copy in batch.copies:
            self._slots[copy.slot] = self._slots[copy.source_slot]
            if copy.block:
                self._blocks[copy.block] = self._blocks[copy.source_block]
        for request in batch.loads:
            state = request.cache_state
            assert state is not None, request.request_id
            blocks = np.frombuffer(state.blocks, np.int64).reshape(-1, self.limits.block_tokens)
            # the newest token, which nothing was computed for, may need one block more
            self._blocks[np.asarray(request.block_table[: len(blocks)], np.int64)] = blocks
            self._slots[request.slot_id] = np.frombuffer(state.slot, np.int64)

    def _contexts(self, rows: ScheduledRows, places: Sequence[int]) -> list[_Ids]:
        """Token ids up to each of these positions of a request, as its cache holds them now."""
        end = rows.start + rows.count
        cached = self._blocks[np.asarray(rows.request.block_table, np.int64)].reshape(-1)[:end]
        newest = self._slots[rows.request.slot_id, np.arange(max(end - WINDOW, 0), end) % WINDOW]
        contexts = [cached[: place + 1] for place in places]
        # The slot holds what comes before the end of the step, so it vouches for the last row alone.
        if places and places[-1] + 1 == end and not np.array_equal(newest, cached[-len(newest) :]):
            contexts[-1] = np.concatenate((cached, newest))
        return contexts

    def _score(self, ids: _Ids) -> NDArray[np.float32]:
        """Scores after these tokens."""
        if self.poison_token_id is not None and ids[-1] == self.poison_token_id:
            return np.full(self.limits.vocab_size, np.nan, np.float32)
        context = ids if self.order is None else ids[-self.order :]
        with np.errstate(over="ignore"):
            terms = (context.astype(np.uint64) + np.uint64(1)) * self._powers[: len(context)][::-1]
            state = int((terms.sum(dtype=np.uint64) + np.uint64(len(context))) * _MIX)
        high, low = divmod(state >> 24, _TABLE_ROWS)
        scores: NDArray[np.float32] = self.table[low] + self.table[high % _TABLE_ROWS]
        return scores

    def _check(self, batch: Batch) -> None:
        """Raises AssertionError for an index out of range, as a model would write over foreign memory."""
        limits = self.limits
        assert batch.num_rows <= batch.bucket, (batch.num_rows, batch.bucket)
        for rows in batch.rows:
            request, end = rows.request, rows.start + rows.count
            assert rows.start >= 0 and rows.count >= 1 and end <= limits.max_model_len, rows
            table = request.block_table
            assert len(table) * limits.block_tokens >= end, f"no block for position {end - 1}"
            assert all(0 < block < limits.num_blocks for block in table), table
            assert 0 < request.slot_id < limits.num_slots, request.slot_id
            tokens = request.tokens(rows.start, rows.count)
            assert len(tokens) == rows.count, f"position {end - 1} has no token yet"
            assert all(0 <= token < limits.vocab_size for token in tokens), tokens


def _make_table(seed: int, vocab: int) -> NDArray[np.float32]:
    """float32 [_TABLE_ROWS, vocab] from SHA-256, the same on every machine."""
    digest = hashlib.shake_256(seed.to_bytes(8, "little")).digest(_TABLE_ROWS * vocab)
    levels = np.frombuffer(digest, np.uint8).reshape(_TABLE_ROWS, vocab) % _STEPS
    return levels.astype(np.float32) / _SPREAD


def _junk(units: int, size: int) -> _Ids:
    """Memory whose every entry is another number that is no token."""
    return -1 - np.arange(units * size, dtype=np.int64).reshape(units, size)
