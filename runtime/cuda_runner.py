"""Runs steps on a device as captured graphs: one per phase and bucket, replayed on static memory.

A step is one copy of its inputs to the device, one replay, one gather of the rows that give tokens, and one
replay of the head. Nothing is allocated, nothing is read back, and the host never waits: the logits that come
back are on the device, and whoever reads them waits for them.

Graphs are captured at their first use or all at once, into one shared pool of memory. A capture runs on
padding rows alone, which touch no live state. Results of a graph are valid until the next step, and the next
step may start once the logits of this one were read: until then its inputs may still be on their way.

`Device` is all that this file knows of CUDA.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.runtime.limits import Limits, smallest_bucket
from deepinfer.runtime.model_runner import (
    DECODE,
    LOGITS,
    PREFILL,
    CpuModelRunner,
    Graph,
    StepBuffers,
    sampled_rows,
    views_of,
)
from deepinfer.runtime.request import Batch


class Captured(Protocol):
    """A captured graph."""

    @property
    def outputs(self) -> Sequence[Tensor]:
        """Static results, in the shared pool."""
        ...

    def replay(self) -> None:
        """Put the graph on the device's queue."""
        ...


class Device(Protocol):
    """What the runner needs of a device. Calls are queued in order; none of them waits."""

    def host_memory(self, size: int) -> Tensor:
        """int64 `[size]` on the host, from which copies need not wait (pinned)."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Static memory on the device."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy from host memory or from the device."""
        ...

    def select_rows(self, rows: Tensor, index: Tensor, target: Tensor) -> None:
        """`target[i] = rows[index[i]]`, without other memory."""
        ...

    def capture(self, call: Callable[[], Sequence[Tensor]]) -> Captured:
        """Run `call` to warm up, then capture it into the pool that all graphs share."""
        ...


class CudaDevice:
    """A CUDA device through torch: one stream, one pool of graph memory."""

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self._device = torch.device(device)
        self._pool: Any = None

    def host_memory(self, size: int) -> Tensor:
        """As Device."""
        return torch.zeros(size, dtype=torch.int64, pin_memory=True)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """As Device; zero-filled."""
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """As Device."""
        target.copy_(source, non_blocking=True)

    def select_rows(self, rows: Tensor, index: Tensor, target: Tensor) -> None:
        """As Device."""
        torch.index_select(rows, 0, index, out=target)

    def capture(self, call: Callable[[], Sequence[Tensor]]) -> Captured:
        """As Device."""
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream(self._device).wait_stream(side)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = call()
        return _CudaGraph(outputs, graph)


@dataclass(frozen=True)
class _CudaGraph:
    outputs: Sequence[Tensor]
    graph: "torch.cuda.CUDAGraph"

    def replay(self) -> None:
        self.graph.replay()


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
        regions: Mapping[str, Tensor],
        device: Device,
        *,
        capture_all: bool = False,
    ) -> None:
        """graphs and regions as for CpuModelRunner, on the device; `capture_all`: no step captures."""
        self.limits = limits
        self._graphs, self._regions, self._device = graphs, list(regions.values()), device
        self._host = CpuModelRunner(limits, {}, {}, device.host_memory)  # fills and checks inputs
        largest = max(*limits.prefill_buckets, *limits.decode_buckets)
        self._rows_host = device.host_memory(largest)
        self._rows = device.empty((largest,), torch.int64)
        self._steps: dict[tuple[str, int], _Step] = {}
        self._heads: dict[int, tuple[Tensor, Captured]] = {}  # logits bucket -> its hidden rows, its graph
        most = max(limits.prefill_table_size, limits.decode_buckets[-1])
        self._logits = device.empty((most, limits.vocab_size), torch.float32)  # of several calls of the head
        if capture_all:
            for phase, buckets in ((PREFILL, limits.prefill_buckets), (DECODE, limits.decode_buckets)):
                for bucket in buckets:
                    hidden = self._step(phase, bucket).captured.outputs[0]
            for bucket in limits.logits_buckets:
                self._head(bucket, hidden)

    def run(self, batch: Batch) -> Tensor:
        """Queues a batch; returns its float32 logits [len(batch.sampled_requests), vocab] on the device."""
        if batch.copies or batch.loads:
            raise AssertionError("this runner copies and loads no caches: no forks, no further choices")
        step = self._step(batch.phase, batch.bucket)
        buffers = self._host.fill_step(batch)
        self._device.copy(step.static, buffers.flat)
        step.captured.replay()
        return self._logits_of(step.captured.outputs[0], sampled_rows(batch))

    def _step(self, phase: str, bucket: int) -> _Step:
        """The graph of a phase and bucket, captured on padding if it is not there yet."""
        if (phase, bucket) not in self._steps:
            buffers = self._host.buffers(phase, bucket)
            static = self._device.empty(tuple(buffers.flat.shape), torch.int64)
            self._device.copy(static, self._padding(phase, buffers))
            inputs = [*views_of(static, [tuple(tensor.shape) for tensor in buffers.tensors]), *self._regions]
            captured = self._device.capture(lambda: self._graphs[f"{phase}-{bucket}"].run(inputs))
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

    def _logits_of(self, hidden: Tensor, rows: NDArray[np.int64]) -> Tensor:
        """Logits of the named rows of `hidden [T, D]`, in pieces of the logits buckets."""
        self._rows_host[: len(rows)] = torch.from_numpy(rows)
        self._device.copy(self._rows[: len(rows)], self._rows_host[: len(rows)])
        largest = self.limits.logits_buckets[-1]
        if 0 < len(rows) <= largest:
            return self._piece(hidden, 0, len(rows))
        logits = self._logits[: len(rows)]
        for first in range(0, len(rows), largest):
            count = min(largest, len(rows) - first)
            self._device.copy(logits[first : first + count], self._piece(hidden, first, count))
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
            captured = self._device.capture(lambda: self._graphs[f"{LOGITS}-{bucket}"].run([static]))
            self._heads[bucket] = static, captured
        return self._heads[bucket]
