"""What the runner of captured graphs needs of a device, and a CUDA device that gives it.

Knows streams, pinned memory and captures; nothing of models, caches or requests.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Captured(Protocol):
    """A captured graph."""

    @property
    def outputs(self) -> Sequence[Tensor]:
        """Static results. A replay of another graph of the same pool may write over them."""
        ...

    def replay(self) -> None:
        """Put the graph on the device's queue."""
        ...


class Device(Protocol):
    """What the runner needs of a device. Calls are queued in order; only those named `wait` wait."""

    def host_memory(self, size: int) -> Tensor:
        """int64 `[size]` on the host, from which copies need not wait (pinned)."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Static memory on the device."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy between memory of `host_memory` and the device, either way, or within the device."""
        ...

    def select_rows(self, rows: Tensor, index: Tensor, target: Tensor) -> None:
        """`target[i] = rows[index[i]]`, without other memory."""
        ...

    def capture(self, call: Callable[[], Sequence[Tensor]], pool: str) -> Captured:
        """Run `call` to warm up, then capture it into the memory that the graphs of `pool` share."""
        ...

    def mark(self) -> None:
        """Remember what is queued by now."""
        ...

    def wait_for_mark(self) -> None:
        """Let the host wait until what the last `mark` remembers is done; mostly it is."""
        ...

    def wait(self) -> None:
        """Let the host wait until all that is queued is done."""
        ...


class CudaDevice:
    """A CUDA device through torch: one stream, and memory for graphs by pool."""

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self._device = torch.device(device)
        self._pools: dict[str, Any] = {}
        self._event = torch.cuda.Event()

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

    def capture(self, call: Callable[[], Sequence[Tensor]], pool: str) -> Captured:
        """As Device."""
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream(self._device).wait_stream(side)
        if pool not in self._pools:
            self._pools[pool] = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pools[pool]):
            outputs = call()
        return _CudaGraph(outputs, graph)

    def mark(self) -> None:
        """As Device."""
        self._event.record(torch.cuda.current_stream(self._device))

    def wait_for_mark(self) -> None:
        """As Device."""
        self._event.synchronize()

    def wait(self) -> None:
        """As Device."""
        torch.cuda.current_stream(self._device).synchronize()


@dataclass(frozen=True)
class _CudaGraph:
    outputs: Sequence[Tensor]
    graph: "torch.cuda.CUDAGraph"

    def replay(self) -> None:
        self.graph.replay()
