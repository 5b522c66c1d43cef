"""A device that exists in name only: it queues, captures and replays on CPU tensors, and watches for faults.

Work is done when somebody waits, as on a device; a host buffer that is written too early shows. While a
step is watched, every call that makes new memory or reads a value on the host is a fault. So is a replay
with a tensor at another address than its capture saw. A replay spoils the results of all other graphs of its
pool, as they may share memory.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from deepinfer.runtime.model_runner import Graph


class DeviceFault(AssertionError):
    """Something that a captured step may not do."""


@dataclass
class RecordingDevice:
    """See the module text. `log` holds what was queued; `fail_next` lets the next replay fail.

    `waits` counts how often the host found the work before its mark unfinished.
    """

    log: list[str] = field(default_factory=list)
    fail_next: bool = False
    waits: int = 0
    _queue: list[Callable[[], object]] = field(default_factory=list)
    _marked: int = 0  # of the queue, from its front
    _pools: dict[str, list["Captured"]] = field(default_factory=dict)
    _watch: "_Watch | None" = None

    def host_memory(self, size: int) -> Tensor:
        self._refuse("allocates host memory")
        return torch.zeros(size, dtype=torch.int64)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self._refuse("allocates device memory")
        return torch.full(shape, 77, dtype=dtype)

    def copy(self, target: Tensor, source: Tensor) -> None:
        assert target.shape == source.shape and target.dtype == source.dtype
        self._put("copy", lambda: target.copy_(source))

    def select_rows(self, rows: Tensor, index: Tensor, target: Tensor) -> None:
        self._put("select", lambda: torch.index_select(rows, 0, index, out=target))

    def capture(self, call: Callable[[], Sequence[Tensor]], pool: str) -> "Captured":
        self._refuse("captures a graph")
        self.wait()
        call()  # warm-up
        members = self._pools.setdefault(pool, [])
        members.append(Captured(self, call, [output.clone() for output in call()], members))
        return members[-1]

    def mark(self) -> None:
        self._marked = len(self._queue)

    def wait_for_mark(self) -> None:
        if self._marked:
            self.waits += 1
            self._work(self._marked)

    def wait(self) -> None:
        """Do what is queued, as a host that reads a result lets the device do."""
        self._work(len(self._queue))

    def _work(self, count: int) -> None:
        with self._outside_of_watch():
            for _ in range(count):
                self._marked = max(0, self._marked - 1)
                self._queue.pop(0)()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Within the block, new memory and reads by the host are faults."""
        self._watch = _Watch()
        try:
            with self._watch:
                yield
        finally:
            self._watch = None

    def _put(self, what: str, work: Callable[[], object]) -> None:
        self.log.append(what)
        self._queue.append(work)

    def _refuse(self, what: str) -> None:
        if self._watch is not None:
            raise DeviceFault(f"a step {what}")

    @contextlib.contextmanager
    def _outside_of_watch(self) -> Iterator[None]:
        if self._watch is None:
            yield
        else:
            self._watch.paused += 1
            try:
                yield
            finally:
                self._watch.paused -= 1


@dataclass
class Captured:
    """A graph that was captured: replayed, it runs its call again into the outputs of the capture."""

    device: RecordingDevice
    call: Callable[[], Sequence[Tensor]]
    outputs: Sequence[Tensor]
    pool: list["Captured"]

    def replay(self) -> None:
        if self.device.fail_next:
            self.device.fail_next = False
            raise RuntimeError("the launch failed")
        self.device._put("replay", self._run)

    def _run(self) -> None:
        values = self.call()
        for other in self.pool:
            for static in other.outputs:
                static.fill_(77)
        for static, value in zip(self.outputs, values, strict=True):
            static.copy_(value)


@dataclass
class Watched:
    """A graph that refuses inputs at other addresses than it was first called with."""

    graph: Graph
    addresses: list[int] = field(default_factory=list)

    def run(self, inputs: list[Tensor]) -> Sequence[Tensor]:
        found = [tensor.data_ptr() for tensor in inputs]
        if self.addresses and found != self.addresses:
            raise DeviceFault("an address changed between capture and replay")
        self.addresses = found
        return self.graph.run(inputs)


class _Watch(TorchDispatchMode):
    """Faults: a call whose result is new memory, or that reads a value."""

    def __init__(self) -> None:
        super().__init__()
        self.paused = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.paused:
            return result
        if func is torch.ops.aten._local_scalar_dense.default:
            raise DeviceFault("a step reads a value on the host")
        given = {_memory(value) for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
        made = [value for value in pytree.tree_leaves(result) if isinstance(value, Tensor)]
        if any(_memory(value) not in given for value in made):
            raise DeviceFault(f"a step allocates: {func}")
        return result


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
