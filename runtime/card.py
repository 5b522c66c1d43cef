"""The graphics card of this process, and graphs on it called from the host.

Knows how a card is named and how memory gets there and back; nothing of models or requests.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor


class Graph(Protocol):
    """Anything that runs like a compiled graph: takes tensors, may write some of them in place."""

    def run(self, inputs: list[Tensor]) -> Sequence[Tensor]: ...


def card_architecture() -> str | None:
    """Architecture of the card that this process uses, as targets name it (`sm_90`); None without a card."""
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


class HostGraph:
    """A graph on a device that takes and returns host tensors: for comparisons, not for speed.

    In every call all inputs go to the device and the written ones come back.
    """

    def __init__(self, graph: Graph, device: torch.device, written: Iterable[int]) -> None:
        """`written` are the positions of inputs that the graph may write."""
        self._graph, self._device, self._written = graph, device, tuple(written)

    def run(self, inputs: list[Tensor]) -> Sequence[Tensor]:
        """Call the graph; inputs keep their strides on the device. Raises what the graph raises."""
        there = [_copied(tensor, self._device) for tensor in inputs]
        outputs = [output.cpu() for output in self._graph.run(list(there))]
        for position in self._written:
            inputs[position].copy_(there[position])
        return outputs


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device with the same strides, in memory of its own."""
    copy = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=device)
    return copy.copy_(tensor)
