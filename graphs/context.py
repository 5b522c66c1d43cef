"""What the layers of one step share: configuration, weights, rows, caches, and the picks of index sources."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from deepinfer.graphs.config import ModelConfig
from deepinfer.graphs.records import Precision
from deepinfer.graphs.rows import StepInputs

if TYPE_CHECKING:
    from deepinfer.graphs.caches import StepCaches

# sees a named value of a layer and returns the value to go on with (see `forward_step`)
Tap = Callable[[int, str, Tensor], Tensor]


def unchanged(layer: int, name: str, value: Tensor) -> Tensor:
    """The tap that only lets values pass."""
    return value


class Scope:
    """A mapping of tensors seen from one layer: `scope["attn.wq_a"]` is `tensors["layers.3.attn.wq_a"]`."""

    def __init__(self, tensors: Mapping[str, Tensor], layer: int) -> None:
        self._tensors, self._prefix = tensors, f"layers.{layer}."

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._prefix + name]


@dataclass
class StepContext:
    """State of one forward pass."""

    config: ModelConfig
    precision: Precision
    weights: Mapping[str, Tensor]
    caches: "StepCaches"
    inputs: StepInputs
    tap: Tap = unchanged
    with_scores: bool = False
    # picks of each index source: entry indices [T, k] in ascending order, -1 padded
    picks: dict[int, Tensor] = field(default_factory=dict)
    # blocks of entries that layers after the candidate source may pick from [T, blocks], -1 padded
    candidates: Tensor | None = None
    # table rows of every Engram layer [T, columns]
    engram_ids: dict[int, Tensor] = field(default_factory=dict)

    def layer_weights(self, layer: int) -> Scope:
        """The weights of one layer under their short names."""
        return Scope(self.weights, layer)
