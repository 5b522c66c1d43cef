"""Runs one step: fills static input tensors, replays the compiled graphs, returns logits.

Owns the step contract between scheduler and graphs: which tensors, in which order, with which padding.
Decides nothing: the batch says what to compute. Inputs live in tensors allocated once per graph and filled
through NumPy views, so a step allocates no inputs and a replay always reads the same addresses.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.runtime.caches import CacheArenas
from deepinfer.runtime.limits import Limits, smallest_bucket
from deepinfer.runtime.request import Batch, CacheState, Request, StateCopy

PREFILL, DECODE, LOGITS = "prefill", "decode", "logits"
MAX_LOGITS_ROWS = 256  # that `logits_of_rows` is asked for at once, which bounds the memory of their logits
_NO_BLOCKS: tuple[int, ...] = ()


class Graph(Protocol):
    """One compiled graph with its weights bound."""

    def run(self, inputs: list[Tensor]) -> Sequence[Tensor]:
        """Calls the graph; cache regions among the inputs are mutated in place."""
        ...


class StepRunner(Protocol):
    """What the engine needs: the sizes, and logits for a batch."""

    limits: Limits
    identity: str  # of all that can change what the caches hold

    def run(self, batch: Batch) -> Tensor:
        """float32 logits [len(batch.sampled_requests), vocab], valid until the next call.

        Before the step, fills what `batch.copies` and then `batch.loads` say.
        """
        ...

    def logits_of_rows(self, rows: NDArray[np.int64]) -> Tensor:
        """float32 logits [len(rows), vocab] of at most MAX_LOGITS_ROWS rows of the last batch.

        Valid until the next call.
        """
        ...

    def read_state(self, request: Request) -> CacheState:
        """What the caches hold of a request."""
        ...


@dataclass(frozen=True)
class StepBuffers:
    """Static inputs of one prefill or decode graph (T rows, R table lines), as tensors and NumPy views."""

    flat: Tensor  # int64, the memory of all inputs: one copy takes a step to a device
    tensors: list[Tensor]  # int64 views of it, in the order in which the graph takes them
    token_ids: NDArray[np.int64]  # [T], 0 for padding rows
    positions: NDArray[np.int64]  # [T], -1 for padding rows
    request_index: NDArray[np.int64]  # [T] row -> table line; padding rows 0 (decode: always 0 .. T - 1)
    block_table: NDArray[np.int64]  # [R, max_blocks_per_request], 0 = none
    slot_ids: NDArray[np.int64]  # [R], 0 = none
    num_computed_tokens: NDArray[np.int64]  # [R] position of the request's first row of this step
    row_starts: NDArray[np.int64]  # [R] index of that row
    row_counts: NDArray[np.int64]  # [R] its rows in this step, 0 = unused line
    lines: list[tuple[int, ...]]  # [R] the tuple each table line was written from
    slots: list[int]  # the slots that `slot_ids` was written from

    @classmethod
    def allocate(
        cls, rows: int, table_size: int, max_blocks: int, memory: Callable[[int], Tensor] | None = None
    ) -> "StepBuffers":
        """Buffers that hold zeros, in `memory(size)`, int64 on the host; by default anywhere."""
        shapes = [(rows,)] * 3 + [(table_size, max_blocks)] + [(table_size,)] * 4
        size = flat_size(shapes)
        flat = torch.zeros(size, dtype=torch.int64) if memory is None else memory(size).zero_()
        tensors = views_of(flat, shapes)
        token_ids, positions, request_index, block_table, *lines = (tensor.numpy() for tensor in tensors)
        slot_ids, num_computed_tokens, row_starts, row_counts = lines
        return cls(
            flat,
            tensors,
            token_ids,
            positions,
            request_index,
            block_table,
            slot_ids,
            num_computed_tokens,
            row_starts,
            row_counts,
            lines=[_NO_BLOCKS] * table_size,
            slots=[],
        )


_ALIGNMENT = 8  # of an input within the flat memory, in elements: 64 bytes


def flat_size(shapes: Sequence[tuple[int, ...]]) -> int:
    """Elements of the memory that `views_of` cuts."""
    return sum(-(-math.prod(shape) // _ALIGNMENT) * _ALIGNMENT for shape in shapes)


def views_of(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Contiguous views of `flat [n]`, one after the other, aligned."""
    views, start = [], 0
    for shape in shapes:
        size = math.prod(shape)
        views.append(flat[start : start + size].view(shape))
        start += -(-size // _ALIGNMENT) * _ALIGNMENT
    return views


class CpuModelRunner:
    """Replays an artifact's CPU graphs over its caches. One step at a time; not thread-safe."""

    def __init__(
        self,
        limits: Limits,
        graphs: Mapping[str, Graph],
        regions: Mapping[str, Tensor],
        memory: Callable[[int], Tensor] | None = None,
        arenas: CacheArenas | None = None,
        identity: str = "",
    ) -> None:
        """graphs: by name, `decode-4`; regions: cache views in layout order, mutated by every step.

        arenas: where the regions lie; without them no request can be forked or handed on. The inputs of
        every graph lie in `memory(size)`, int64 on the host; by default anywhere. identity: of the artifact.
        """
        self.limits, self.identity = limits, identity
        self._graphs = graphs
        self._regions = list(regions.values())
        self._arenas = arenas
        self._last_hidden = torch.empty((0, 0))
        self._buffers: dict[tuple[str, int], StepBuffers] = {}
        for phase, buckets in ((PREFILL, limits.prefill_buckets), (DECODE, limits.decode_buckets)):
            for bucket in buckets:
                table_size = bucket if phase == DECODE else limits.prefill_table_size
                self._buffers[phase, bucket] = StepBuffers.allocate(
                    bucket, table_size, limits.max_blocks_per_request, memory
                )
                if phase == DECODE:
                    self._buffers[phase, bucket].request_index[:] = np.arange(bucket)
        self._hidden: dict[int, Tensor] = {}  # logits bucket -> its static input [bucket, hidden]
        self._logits = torch.empty((0, limits.vocab_size))

    def run(self, batch: Batch) -> Tensor:
        """Computes a batch; returns float32 logits [len(batch.sampled_requests), vocab], in row order."""
        self.fill_step(batch)
        self._prepare_caches(batch)
        self._last_hidden = self.replay(batch.phase, batch.bucket)[0]
        return self.logits_of_batch(batch)

    def logits_of_batch(self, batch: Batch) -> Tensor:
        """float32 logits [len(batch.sampled_requests), vocab] of the batch that ran last."""
        if batch.phase == DECODE and len(batch.rows) == batch.bucket in self.limits.logits_buckets:
            logits: Tensor = self._graphs[f"{LOGITS}-{batch.bucket}"].run([self._last_hidden])[0]
            return logits  # every row, read where the step left it
        return self._logits_of(self._last_hidden, sampled_rows(batch))

    def logits_of_rows(self, rows: NDArray[np.int64]) -> Tensor:
        """float32 logits [len(rows), vocab] of rows of the last batch; valid until the next call."""
        return self._logits_of(self._last_hidden, rows)

    def read_state(self, request: Request) -> CacheState:
        """What the caches hold of a request."""
        return self._state().read(request.block_table, request.slot_id)

    def _prepare_caches(self, batch: Batch) -> None:
        if batch.copies:
            check_copies(self.limits, batch.copies)
            self._state().copy(batch.copies)
        for request in batch.loads:
            assert request.cache_state is not None, request.request_id
            self._state().write(request.block_table, request.slot_id, request.cache_state)

    def _state(self) -> CacheArenas:
        assert self._arenas is not None, "the runner was made without its arenas"
        return self._arenas

    def replay(self, phase: str, bucket: int) -> Sequence[Tensor]:
        """Runs the graph of `phase` at `bucket` on its static buffers as they are filled now."""
        return self._graphs[f"{phase}-{bucket}"].run(self.inputs(phase, bucket))

    def inputs(self, phase: str, bucket: int) -> list[Tensor]:
        """The static inputs of one step graph, then the cache regions: what every replay passes."""
        return [*self._buffers[phase, bucket].tensors, *self._regions]

    def buffers(self, phase: str, bucket: int) -> StepBuffers:
        """The static inputs of one step graph."""
        return self._buffers[phase, bucket]

    def fill_step(self, batch: Batch) -> StepBuffers:
        """Writes a batch into the static buffers of its graph, after checking every index in it."""
        buffers = self._buffers[batch.phase, batch.bucket]
        if batch.phase == DECODE:
            if self._fill_same_requests(batch, buffers):
                return buffers
            self._fill_decode_rows(batch, buffers)
        else:
            self._fill_prefill_rows(batch, buffers)
        self._fill_table(batch, buffers)
        return buffers

    def _fill_same_requests(self, batch: Batch, buffers: StepBuffers) -> bool:
        """The next rows of the requests, slots and tables that the buffers hold; False if others come."""
        rows, used = batch.rows, len(batch.rows)
        requests = [scheduled.request for scheduled in rows]
        tables = [request.block_table for request in requests]
        if buffers.slots != [request.slot_id for request in requests] or tables != buffers.lines[:used]:
            return False
        starts = [scheduled.start for scheduled in rows]
        token_ids = [request.token_at(start) for request, start in zip(requests, starts, strict=True)]
        size, vocab = self.limits.block_tokens, self.limits.vocab_size
        if not (
            min(starts) >= 0
            and max(starts) < self.limits.max_model_len
            and all([start < len(table) * size for start, table in zip(starts, tables, strict=True)])
            and min(token_ids) >= 0
            and max(token_ids) < vocab
            and all([scheduled.count == 1 for scheduled in rows])
        ):
            return False  # the whole check says what is wrong
        buffers.token_ids[:used] = token_ids
        buffers.positions[:used] = buffers.num_computed_tokens[:used] = starts
        return True

    def _fill_decode_rows(self, batch: Batch, buffers: StepBuffers) -> None:
        used = len(batch.rows)
        buffers.slots.clear()  # what a check refuses below must not count as filled
        buffers.token_ids[:used] = [rows.request.token_at(rows.start) for rows in batch.rows]
        buffers.token_ids[used:] = 0
        buffers.positions[:used] = [rows.start for rows in batch.rows]
        buffers.positions[used:] = -1
        buffers.row_starts[:used] = np.arange(used)

    def _fill_prefill_rows(self, batch: Batch, buffers: StepBuffers) -> None:
        row = 0
        for line, rows in enumerate(batch.rows):
            end = row + rows.count
            buffers.token_ids[row:end] = rows.request.tokens(rows.start, rows.count)
            buffers.positions[row:end] = np.arange(rows.start, rows.start + rows.count)
            buffers.request_index[row:end] = line
            buffers.row_starts[line] = row
            row = end
        buffers.token_ids[row:] = 0
        buffers.positions[row:] = -1
        buffers.request_index[row:] = 0

    def _fill_table(self, batch: Batch, buffers: StepBuffers) -> None:
        used = len(batch.rows)
        starts = np.array([rows.start for rows in batch.rows])
        counts = np.array([rows.count for rows in batch.rows])
        slots = np.array([rows.request.slot_id for rows in batch.rows])
        tables = [rows.request.block_table for rows in batch.rows]
        self._check(batch, buffers, starts + counts, slots, tables)
        for array, values in (
            (buffers.slot_ids, slots),
            (buffers.num_computed_tokens, starts),
            (buffers.row_counts, counts),
        ):
            array[:used] = values
            array[used:] = 0
        buffers.row_starts[used:] = 0
        buffers.slots[:] = slots.tolist()
        tables += [_NO_BLOCKS] * (len(buffers.lines) - used)
        for line, table in enumerate(tables):
            if buffers.lines[line] is not table:  # a long table is written when it changes, not every step
                buffers.block_table[line, : len(table)] = table
                buffers.block_table[line, len(table) :] = 0
                buffers.lines[line] = table

    def _check(
        self,
        batch: Batch,
        buffers: StepBuffers,
        ends: NDArray[np.int64],
        slots: NDArray[np.int64],
        tables: Sequence[tuple[int, ...]],
    ) -> None:
        """Raises AssertionError unless every index is in range and nobody's memory is shared.

        Kernels do not check: an index out of range would write over foreign memory. The scheduler never makes
        one, so these are not `assert`s, which an optimised interpreter drops.
        """
        limits = self.limits
        faults = {
            "rows": batch.num_rows > batch.bucket or len(batch.rows) > len(buffers.lines),
            "decode rows": batch.phase == DECODE and batch.num_rows != len(batch.rows),
            "positions": ends.max() > limits.max_model_len or any(rows.start < 0 for rows in batch.rows),
            "counts": any(rows.count < 1 for rows in batch.rows),
            "slots": slots.min() < 1 or slots.max() >= limits.num_slots or len(set(slots)) != len(slots),
            "table length": any(
                len(table) * limits.block_tokens < end or len(table) > limits.max_blocks_per_request
                for table, end in zip(tables, ends, strict=True)
            ),
            "token ids": buffers.token_ids.min() < 0 or buffers.token_ids.max() >= limits.vocab_size,
        }
        if any(table is not old for table, old in zip(tables, buffers.lines, strict=False)):
            blocks = np.concatenate([np.array(table, dtype=np.int64) for table in tables])
            faults["block ids"] = blocks.min() < 1 or blocks.max() >= limits.num_blocks
            faults["shared blocks"] = len(np.unique(blocks)) != len(blocks) and _writes_shared(
                batch, limits.block_tokens
            )
        if any(faults.values()):
            wrong = ", ".join(name for name, fault in faults.items() if fault)
            raise AssertionError(f"a {batch.phase} step of {len(batch.rows)} requests has wrong {wrong}")

    def _logits_of(self, hidden: Tensor, rows: NDArray[np.int64]) -> Tensor:
        """Logits of the named rows of `hidden` [T, D], computed in pieces of the logits buckets."""
        buckets = self.limits.logits_buckets
        if len(rows) <= buckets[-1]:
            return self._logits_piece(hidden, rows) if len(rows) else self._gathered(0)
        gathered = self._gathered(len(rows))
        for first in range(0, len(rows), buckets[-1]):
            piece = rows[first : first + buckets[-1]]
            gathered[first : first + len(piece)] = self._logits_piece(hidden, piece)
        return gathered

    def _logits_piece(self, hidden: Tensor, rows: NDArray[np.int64]) -> Tensor:
        """One call of the smallest logits graph that holds the rows; its padding rows are cut."""
        bucket = smallest_bucket(self.limits.logits_buckets, len(rows))
        if bucket not in self._hidden:
            self._hidden[bucket] = hidden.new_zeros((bucket, hidden.shape[1]))
        static = self._hidden[bucket]
        torch.index_select(hidden, 0, torch.from_numpy(rows), out=static[: len(rows)])
        static[len(rows) :] = 0
        return self._graphs[f"{LOGITS}-{bucket}"].run([static])[0][: len(rows)]

    def _gathered(self, rows: int) -> Tensor:
        """The first rows of the buffer that holds the logits of several pieces."""
        if rows > len(self._logits):
            size = max(rows, self.limits.decode_buckets[-1])
            self._logits = torch.empty((size, self.limits.vocab_size))
        return self._logits[:rows]


def sampled_rows(batch: Batch) -> NDArray[np.int64]:
    """Indices of the rows that give a token: the newest of each request that is reached, again per fork."""
    if batch.phase == DECODE:
        return np.arange(len(batch.rows))
    ends = np.cumsum([rows.count for rows in batch.rows]) - 1
    times = [1 + len(rows.forks) if rows.makes_token else 0 for rows in batch.rows]
    return np.repeat(ends, times)


def check_copies(limits: Limits, copies: Sequence[StateCopy]) -> None:
    """Raises AssertionError for an id out of range, which would copy foreign memory."""
    for each in copies:
        slots, blocks = (each.source_slot, each.slot), (each.source_block, each.block)
        if not all(0 < slot < limits.num_slots for slot in slots) or not (
            blocks == (0, 0) or all(0 < block < limits.num_blocks for block in blocks)
        ):
            raise AssertionError(f"a copy between caches that do not exist: {each}")


def _writes_shared(batch: Batch, block_tokens: int) -> bool:
    """Whether a block that a row writes to is in more than one table: forks share only what is full."""
    users = Counter(block for rows in batch.rows for block in rows.request.block_table)
    return any(
        users[block] > 1
        for rows in batch.rows
        for block in rows.request.block_table[
            rows.start // block_tokens : (rows.start + rows.count - 1) // block_tokens + 1
        ]
    )
