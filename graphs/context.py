"""What the layers of one step share: configuration, weights, rows, caches, and the picks of index sources."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepinfer.graphs.config import ModelConfig
from deepinfer.graphs.config_schema import QUANT_TILE
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

    def matrix(self, name: str) -> tuple[Tensor, Tensor]:
        """A matrix and its scales, which are empty where it is stored unquantised."""
        weight, scale = self[f"{name}.weight"], self._tensors.get(f"{self._prefix}{name}.scale")
        return weight, weight.new_empty(0, 0, 0, dtype=torch.uint8) if scale is None else scale


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

    @property
    def quantizes_inputs(self) -> bool:
        """Whether what enters a quantised matrix is rounded to FP8; unquantised ones take it as it is."""
        return self.precision.quantized and self.config.quantized_weights

    @property
    def input_groups(self) -> tuple[int, ...]:
        """The argument of ops with quantised matrices that says how many inputs share a scale, if not 32."""
        tile = self.config.generation.tile
        return (tile,) if self.quantizes_inputs and tile != QUANT_TILE else ()

    def layer_weights(self, layer: int) -> Scope:
        """The weights of one layer under their short names."""
        return Scope(self.weights, layer)
