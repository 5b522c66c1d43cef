"""The dense, differentiable form of a step: whole sequences at once, gradients through everything.

The same step functions run over it as over the serving caches. All rows of a sequence are in the step, so
what they need of each other is found among the rows; records stay vectors, rounded straight through (the
forward value is the rounded one, the gradient passes as if it were not).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.graphs.config import ModelConfig
from deepinfer.graphs.context import Tap, unchanged
from deepinfer.graphs.records import Precision
from deepinfer.graphs.rows import Rows, StepInputs
from deepinfer.graphs.step import forward_rows
from deepinfer.kernels import linear
from deepinfer.kernels.differentiable import differentiable_ops, round_fp4, round_fp8


@dataclass(frozen=True)
class StraightThrough(Precision):
    """Float32 activations; the quantisers of the named precision act as straight-through rounding."""

    @property
    def dtype(self) -> torch.dtype:
        """Master precision of training."""
        return torch.float32

    def window_record(self, kv: Tensor) -> Tensor:
        """As Precision, kept as a vector."""
        return round_fp8(kv) if self.quantized else kv

    def window_vector(self, record: Tensor) -> Tensor:
        """Records are vectors already."""
        return record

    def compressed_record(self, latent: Tensor) -> Tensor:
        """As Precision, kept as a vector."""
        return round_fp4(latent, "e4m3") if self.quantized else latent

    def compressed_vector(self, record: Tensor) -> Tensor:
        """Records are vectors already."""
        return record

    def index_key_record(self, key: Tensor) -> Tensor:
        """As Precision, kept as a vector."""
        return round_fp4(key, "e8m0") if self.quantized else key

    def index_key_vector(self, record: Tensor) -> Tensor:
        """Records are vectors already."""
        return record


class DenseCaches:
    """StepCaches of sequences of one length that are in the step from their first token to their last."""

    def __init__(self, rows: Rows, sequences: int, ratios: Mapping[int, int]) -> None:
        """`ratios` gives the tokens per entry of every kv source layer."""
        self._rows, self._sequences, self._ratios = rows, sequences, ratios
        self._entries: dict[tuple[int, str], Tensor] = {}  # [sequences, entries, record]
        self._length = rows.positions.shape[0] // sequences

    def window(self, layer: int, record: Tensor, positions: Tensor) -> Tensor:
        """As StepCaches: every position is a row."""
        return take_rows(record, self._rows.row_at(positions))

    def open_group(self, layer: int, parked: Tensor, positions: Tensor) -> Tensor:
        """As StepCaches: every position is a row."""
        return take_rows(parked, self._rows.row_at(positions))

    def tokens(self, positions: Tensor) -> Tensor:
        """As StepCaches: every position is a row."""
        return self._rows.token_ids[self._rows.row_at(positions)]

    def write_entries(self, layer: int, kind: str, entries: Tensor, emitted: Tensor, record: Tensor) -> None:
        """As StepCaches: every `ratio`-th row of a sequence emits."""
        ratio = self._ratios[layer]
        self._entries[layer, kind] = record.unflatten(0, (self._sequences, -1))[:, ratio - 1 :: ratio]

    def entries_at(self, layer: int, kind: str, entries: Tensor) -> Tensor:
        """As StepCaches, gathered from the row's own sequence."""
        stored = self._entries[layer, kind]
        if stored.shape[1] == 0:
            return stored.new_zeros(*entries.shape, stored.shape[2])
        offset = self._rows.request_index.unsqueeze(1) * stored.shape[1]
        return take_rows(stored.flatten(0, 1), entries + offset)

    def dot_entries(self, layer: int, kind: str, query: Tensor, decode: Callable[[Tensor], Tensor]) -> Tensor:
        """As StepCaches, one product per sequence."""
        keys = decode(self._entries[layer, kind])
        heads = query.shape[1]
        queries = query.unflatten(0, (self._sequences, -1)).flatten(1, 2)
        return torch.bmm(queries, keys.transpose(1, 2)).unflatten(1, (-1, heads)).flatten(0, 1)


def take_rows(values: Tensor, index: Tensor) -> Tensor:
    """Return `values [n, d]` at `index [...]`: `[..., d]`; the gradient adds up without atomic updates."""
    return F.embedding(index, values)


def forward_dense(
    config: ModelConfig,
    precision: Precision,
    weights: Mapping[str, Tensor],
    token_ids: Tensor,
    tap: Tap = unchanged,
) -> Tensor:
    """Return logits `[sequences, length, vocab]` float32 of whole sequences `token_ids [sequences, length]`.

    `weights` has the names of the weight store, but matrices are float32 of their unpacked shape, in values
    that their format can hold.
    """
    rows = Rows.from_inputs(dense_inputs(token_ids))
    ratios = {layer: config.ratio(layer) for layer in config.kv_source_layer_ids}
    caches = DenseCaches(rows, token_ids.shape[0], ratios)
    with differentiable_ops():
        hidden = forward_rows(config, precision, weights, rows, caches, tap)
        logits = linear(hidden, weights["head"], torch.float32)
    return logits.unflatten(0, token_ids.shape)


def dense_inputs(token_ids: Tensor) -> StepInputs:
    """Return the inputs of a step with all of `token_ids [sequences, length]`, and no blocks or slots."""
    sequences, length = token_ids.shape
    lines = torch.arange(sequences)
    return StepInputs(
        token_ids=token_ids.flatten(),
        positions=torch.arange(length).repeat(sequences),
        request_index=lines.repeat_interleave(length),
        block_table=torch.zeros(sequences, 1, dtype=torch.int64),
        slot_ids=torch.zeros(sequences, dtype=torch.int64),
        num_computed_tokens=torch.zeros(sequences, dtype=torch.int64),
        row_starts=lines * length,
        row_counts=torch.full((sequences,), length),
    )
