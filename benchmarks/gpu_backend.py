"""Where the checks of `gpu.py` run: a card, or the CPU under Triton's interpreter, to try the script.

Both offer the same calls, so what is tried without a card is what a card runs.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Call = Callable[[], Any]


class Backend(Protocol):
    """A place to run kernels."""

    name: str
    device: torch.device
    measures: bool  # whether its times say anything

    def captured(self, call: Call) -> "tuple[Any, Callable[[], None]]":
        """Results of a captured call, in static memory, and what replays it."""
        ...

    def seconds(self, call: Call, rounds: int) -> list[float]:
        """Seconds of the device for one call, round by round, without the host's share."""
        ...

    def wait(self) -> None:
        """Until everything that was started has ended."""
        ...


class Card:
    """The CUDA device of this process."""

    measures = True

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.name = torch.cuda.get_device_name(self.device)

    def captured(self, call: Call) -> tuple[Any, Callable[[], None]]:
        """As Backend."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = call()
        return results, graph.replay

    def seconds(self, call: Call, rounds: int) -> list[float]:
        """As Backend: a replayed graph of ten calls between two events, per call."""
        _, replay = self.captured(lambda: [call() for _ in range(10)])
        taken = []
        for number in range(rounds + 2):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            replay()
            end.record()
            end.synchronize()
            if number >= 2:
                taken.append(start.elapsed_time(end) / 1e3 / 10)
        return taken

    def wait(self) -> None:
        """As Backend."""
        torch.cuda.synchronize(self.device)


class Interpreter:
    """The CPU, where nothing is fast and nothing is proven about a card."""

    name = "interpreter (no card)"
    device = torch.device("cpu")
    measures = False

    def captured(self, call: Call) -> tuple[Any, Callable[[], None]]:
        """As Backend: a replay runs the call again into the results of the first."""
        results = call()

        def replay() -> None:
            for static, value in zip(tensors(results), tensors(call()), strict=True):
                static.copy_(value)

        return results, replay

    def seconds(self, call: Call, rounds: int) -> list[float]:
        """As Backend, of one call."""
        started = time.perf_counter()
        call()
        return [time.perf_counter() - started]

    def wait(self) -> None:
        """As Backend: nothing is ever under way."""


def tensors(results: Any) -> list[Tensor]:
    """Results of an operation as a list: one tensor, several, or none."""
    if results is None:
        return []
    return [results] if isinstance(results, Tensor) else list(results)


def copies(arguments: Sequence[Any], device: torch.device) -> tuple[Any, ...]:
    """The same arguments, tensors with their strides in memory of their own on `device`."""
    return tuple(_copy(each, device) if isinstance(each, Tensor) else each for each in arguments)


def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    copy = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=device)
    return copy.copy_(tensor)


def difference(got: Tensor, want: Tensor) -> str | None:
    """Where two tensors first differ by their bytes, in words; None where they do not."""
    got, want = got.detach().cpu().contiguous(), want.detach().cpu().contiguous()
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        return f"{got.dtype} {list(got.shape)} is not {want.dtype} {list(want.shape)}"
    size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    differs = got.view(size) != want.view(size)
    if not differs.any():
        return None
    place = tuple(differs.nonzero()[0].tolist())
    return (
        f"{int(differs.sum())} of {got.numel()} values, first at {list(place)}: {got[place]}, {want[place]}"
    )


def median(values: list[float]) -> float:
    """Of at least one value."""
    return statistics.median(values)
