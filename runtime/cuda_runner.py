"""Runs steps on a device as captured graphs: one per phase and bucket, replayed on static memory.

A step is one copy of its inputs to the device and one of the rows that give tokens, a copy for every cache
unit that a fork or a load brings, one replay, one gather of those rows, and one replay of the head. Nothing
is allocated and nothing is read back: the logits that come back are on the device, and whoever reads them
waits for them, as `HostLogits` does for the engine.

The host waits only before it writes over memory that a copy has not read yet. After logits were read that is
never so; it is between two steps of which the first gave none, and where a step loads more than is staged.

Graphs are captured at their first use or all at once. Steps share one pool of memory and heads another, so
that hidden rows outlive any number of calls of the head. A capture runs on padding rows alone, which touch no
live state. Results of a call are valid until the next one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.runtime.caches import CacheArenas
from deepinfer.runtime.cuda_device import Captured, Device
from deepinfer.runtime.limits import Limits, smallest_bucket
from deepinfer.runtime.model_runner import (
    DECODE,
    LOGITS,
    MAX_LOGITS_ROWS,
    PREFILL,
    CpuModelRunner,
    Graph,
    StepBuffers,
    check_copies,
    sampled_rows,
    views_of,
)
from deepinfer.runtime.request import Batch, CacheState, Request


@dataclass(frozen=True)
class _Step:
    """One step graph and its static inputs on the device."""

    static: Tensor  # int64, as StepBuffers.flat
    captured: Captured


class CudaModelRunner:
    """Replays an artifact's graphs over its caches on a device. One step at a time; not thread-safe."""

    def __init__(
        self,
        limits: Limits,
        graphs: Mapping[str, Graph],
        arenas: CacheArenas,
        device: Device,
        *,
        identity: str = "",
        capture_all: bool = False,
        staged_bytes: int | None = None,
    ) -> None:
        """graphs by name, over the regions of `arenas`, both on the device; identity of the artifact.

        `capture_all`: no step captures. `staged_bytes`: pinned memory through which cache contents are
        loaded; by default as much as the longest request has.
        """
        self.limits, self.identity = limits, identity
        self._graphs, self._arenas, self._device = graphs, arenas, device
        self._regions = list(arenas.regions.values())
        self._host = CpuModelRunner(limits, {}, {}, device.host_memory)  # fills and checks inputs
        largest = max(*limits.prefill_buckets, *limits.decode_buckets)
        self.max_rows = max(limits.num_slots - 1, min(largest, MAX_LOGITS_ROWS))  # of one call
        self._rows_host = device.host_memory(self.max_rows)
        self._rows = device.empty((self.max_rows,), torch.int64)
        self._hidden: Tensor | None = None  # of the last step
        self._steps: dict[tuple[str, int], _Step] = {}
        self._heads: dict[int, tuple[Tensor, Captured]] = {}  # logits bucket -> its hidden rows, its graph
        self._logits = device.empty((self.max_rows, limits.vocab_size), torch.float32)  # of several heads
        if staged_bytes is None:
            staged_bytes = limits.max_blocks_per_request * arenas.block_bytes + arenas.slot_bytes
        size = max(staged_bytes, arenas.block_bytes, arenas.slot_bytes)
        self._staging = device.host_memory(-(-size // 8)).view(torch.uint8)
        self._num_staged = 0  # bytes that copies of this step may not have read yet
        if capture_all:
            for phase, buckets in ((PREFILL, limits.prefill_buckets), (DECODE, limits.decode_buckets)):
                for bucket in buckets:
                    hidden = self._step(phase, bucket).captured.outputs[0]
            for bucket in limits.logits_buckets:
                self._head(bucket, hidden)

    def run(self, batch: Batch) -> Tensor:
        """Queues a batch; returns its float32 logits [len(batch.sampled_requests), vocab] on the device."""
        step, self._hidden = self._step(batch.phase, batch.bucket), None
        self._device.wait_for_mark()
        self._num_staged = 0
        try:
            buffers = self._host.fill_step(batch)
            self._prepare_caches(batch)
            self._device.copy(step.static, buffers.flat)
            count = self._send_rows(sampled_rows(batch))
        finally:
            self._device.mark()  # also of a step that fails: the next one writes over the same host memory
        step.captured.replay()
        self._hidden = step.captured.outputs[0]
        return self._logits_of(self._hidden, count)

    def logits_of_rows(self, rows: NDArray[np.int64]) -> Tensor:
        """Queues float32 logits [len(rows), vocab] of at most `max_rows` rows of the last batch."""
        hidden = self._hidden
        assert hidden is not None, "no step is there to have rows of"
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(hidden):
            raise AssertionError(f"rows {rows.min()} .. {rows.max()} of a step of {len(hidden)}")
        self._device.wait_for_mark()
        try:
            count = self._send_rows(rows)
        finally:
            self._device.mark()
        return self._logits_of(hidden, count)

    def replay(self, phase: str, bucket: int) -> Sequence[Tensor]:
        """Queues the graph of `phase` at `bucket` on its static inputs as they are now; its results."""
        captured = self._step(phase, bucket).captured
        captured.replay()
        return captured.outputs

    def read_state(self, request: Request) -> CacheState:
        """What the caches hold of a request; waits for the device."""
        self._device.wait()
        return self._arenas.read(request.block_table, request.slot_id)

    def _prepare_caches(self, batch: Batch) -> None:
        check_copies(self.limits, batch.copies)
        for target, source in self._arenas.copies(batch.copies):
            self._device.copy(target, source)
        for request in batch.loads:
            state = request.cache_state
            assert state is not None, request.request_id
            for unit, content in self._arenas.contents(request.block_table, request.slot_id, state):
                self._load(unit, content)

    def _load(self, unit: Tensor, content: NDArray[np.uint8]) -> None:
        """Queues a copy of host bytes into a block or a slot, through the staging memory."""
        if self._num_staged + len(content) > len(self._staging):
            self._device.mark()
            self._device.wait_for_mark()
            self._num_staged = 0
        staged = self._staging[self._num_staged : self._num_staged + len(content)]
        staged.numpy()[:] = content
        self._num_staged += len(content)
        self._device.copy(unit, staged)

    def _step(self, phase: str, bucket: int) -> _Step:
        """The graph of a phase and bucket, captured on padding if it is not there yet."""
        if (phase, bucket) not in self._steps:
            buffers = self._host.buffers(phase, bucket)
            static = self._device.empty(tuple(buffers.flat.shape), torch.int64)
            self._device.copy(static, self._padding(phase, buffers))
            inputs = [*views_of(static, [tuple(tensor.shape) for tensor in buffers.tensors]), *self._regions]
            captured = self._device.capture(lambda: self._graphs[f"{phase}-{bucket}"].run(inputs), "steps")
            self._steps[phase, bucket] = _Step(static, captured)
        return self._steps[phase, bucket]

    def _padding(self, phase: str, buffers: StepBuffers) -> Tensor:
        """Inputs of a step without requests: every row is padding and no line of the table is used."""
        rows, table_size = len(buffers.token_ids), len(buffers.slot_ids)
        max_blocks = buffers.block_table.shape[1]
        padding = StepBuffers.allocate(rows, table_size, max_blocks, self._device.host_memory)
        padding.positions[:] = -1
        if phase == DECODE:
            padding.request_index[:] = np.arange(rows)
        return padding.flat

    def _send_rows(self, rows: NDArray[np.int64]) -> int:
        """Queues the copy of the rows whose logits are wanted; how many they are."""
        if len(rows) > self.max_rows:
            raise AssertionError(f"logits of {len(rows)} rows at once, more than {self.max_rows}")
        self._rows_host[: len(rows)].numpy()[:] = rows
        if len(rows):
            self._device.copy(self._rows[: len(rows)], self._rows_host[: len(rows)])
        return len(rows)

    def _logits_of(self, hidden: Tensor, count: int) -> Tensor:
        """Logits of the rows of `hidden [T, D]` that were sent, in pieces of the logits buckets."""
        largest = self.limits.logits_buckets[-1]
        if 0 < count <= largest:
            return self._piece(hidden, 0, count)
        logits = self._logits[:count]
        for first in range(0, count, largest):
            rows = min(largest, count - first)
            self._device.copy(logits[first : first + rows], self._piece(hidden, first, rows))
        return logits

    def _piece(self, hidden: Tensor, first: int, count: int) -> Tensor:
        """Logits of `count` of the selected rows, from the smallest graph that holds them."""
        static, captured = self._head(smallest_bucket(self.limits.logits_buckets, count), hidden)
        # rows beyond `count` keep what an earlier step left: their logits are cut
        self._device.select_rows(hidden, self._rows[first : first + count], static[:count])
        captured.replay()
        return captured.outputs[0][:count]

    def _head(self, bucket: int, hidden: Tensor) -> tuple[Tensor, Captured]:
        if bucket not in self._heads:
            static = self._device.empty((bucket, hidden.shape[1]), hidden.dtype)
            captured = self._device.capture(lambda: self._graphs[f"{LOGITS}-{bucket}"].run([static]), "heads")
            self._heads[bucket] = static, captured
        return self._heads[bucket]


class HostLogits:
    """The runner as the engine takes it: logits come to the host, which waits for them."""

    def __init__(self, runner: CudaModelRunner, device: Device) -> None:
        self.limits, self.identity = runner.limits, runner.identity
        self._runner, self._device = runner, device
        rows, vocab = runner.max_rows, runner.limits.vocab_size
        memory = device.host_memory(-(-rows * vocab // 2)).view(torch.float32)
        self._logits = memory[: rows * vocab].view(rows, vocab)

    def run(self, batch: Batch) -> Tensor:
        """As StepRunner."""
        return self._read(self._runner.run(batch))

    def logits_of_rows(self, rows: NDArray[np.int64]) -> Tensor:
        """As StepRunner."""
        return self._read(self._runner.logits_of_rows(rows))

    def replay(self, phase: str, bucket: int) -> Sequence[Tensor]:
        """As CudaModelRunner; waits until it has run."""
        outputs = self._runner.replay(phase, bucket)
        self._device.wait()
        return outputs

    def read_state(self, request: Request) -> CacheState:
        """As StepRunner."""
        return self._runner.read_state(request)

    def _read(self, logits: Tensor) -> Tensor:
        host = self._logits[: len(logits)]
        if len(logits):
            self._device.copy(host, logits)
            self._device.wait()
        return host
