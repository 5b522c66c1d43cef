"""The dense, differentiable form of a step: whole sequences at once, gradients through everything.

The same step functions run over it as over the serving caches. All rows of a sequence are in the step, so
what they need of each other is found among the rows; records stay vectors, rounded straight through (the
forward value is the rounded one, the gradient passes as if it were not).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.errors import UnsupportedModelError
from deepinfer.graphs.config import ModelConfig
from deepinfer.graphs.context import Scope, Tap, unchanged
from deepinfer.graphs.records import Precision
from deepinfer.graphs.rows import StepInputs
from deepinfer.graphs.step import forward_rows
from deepinfer.kernels import engram_ids, linear, rms_norm
from deepinfer.kernels.differentiable import differentiable_ops, round_fp4
from deepinfer.kernels.index_topk import best, best_blocks, entries_of_blocks
from deepinfer.kernels.rope import rotate
from deepinfer.kernels.sequences import attend_sequences, index_scores, pool_groups


@dataclass(frozen=True)
class StraightThrough(Precision):
    """Float32 activations; the quantisers of the named precision act as straight-through rounding."""

    @property
    def dtype(self) -> torch.dtype:
        """Master precision of training."""
        return torch.float32


class DenseCaches:
    """StepCaches of sequences of one length that are in the step from their first token to their last.

    Nothing is kept between steps; entries stay vectors `[sequences, entries, d]` that gradients reach.
    """

    def __init__(self, config: ModelConfig, inputs: StepInputs, sequences: int, quantize: bool) -> None:
        self._config, self._inputs, self._sequences, self._quantize = config, inputs, sequences, quantize
        self._length = inputs.positions.shape[0] // sequences
        self._entries: dict[tuple[int, str], Tensor] = {}

    def hash_ids(self, layer: int, tables: Scope, token_map: Tensor, pad_token_id: int) -> Tensor:
        """As StepCaches: no row looks before its sequence."""
        inputs = self._inputs
        never_read = inputs.token_ids.new_zeros(1, tables["engram.multipliers"].shape[0], 1)
        ids: Tensor = engram_ids.reference(
            inputs.token_ids,
            never_read,
            token_map,
            tables["engram.multipliers"],
            tables["engram.primes"],
            tables["engram.offsets"],
            pad_token_id,
            inputs.positions,
            inputs.request_index,
            inputs.slot_ids,
            inputs.num_computed_tokens,
        )
        return ids

    def keep_tokens(self) -> None:
        """As StepCaches: there is no later step."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        record: Tensor,
        kv_source: int | None,
        picks: Tensor,
        sink: Tensor,
        scale: float,
        window: int,
    ) -> tuple[Tensor, Tensor]:
        """As StepCaches; the mass is always given."""
        if kv_source is None:
            entries = record.new_zeros(self._sequences, 1, record.shape[1])
        else:
            entries = self._entries[kv_source, "compressed_kv"]
        return attend_sequences(query, record, entries, picks, sink, scale, window, self._length)

    def compress(
        self, layer: int, weights: Scope, x: Tensor, table: Tensor, ratio: int, eps: float
    ) -> Tensor:
        """As StepCaches: every `ratio`-th row of a sequence closes an entry."""
        pooled = linear(x, weights["attn.compressor.wkv"], torch.float32)
        if ratio > 1:
            gate = linear(x, weights["attn.compressor.wgate"], torch.float32)
            pooled = pool_groups(pooled, gate, ratio, self._length)
        latent: Tensor = rms_norm(pooled, weights["attn.compressor.norm"], eps)
        rotated = rotate(latent, table[self._inputs.positions // ratio * ratio], False)
        record = round_fp4(rotated, "e4m3") if self._quantize else rotated
        self._entries[layer, "compressed_kv"] = self._closing(record, ratio)
        return latent

    def compress_biased(
        self,
        layer: int,
        part: str,
        weights: Scope,
        x: Tensor,
        table: Tensor,
        ratio: int,
        overlap: bool,
        eps: float,
    ) -> Tensor:
        """Not in the dense form yet."""
        raise UnsupportedModelError(
            "the dense form has no biased compression",
            where=f"layer {layer}",
            action="train a model of another generation",
        )

    def _closing(self, values: Tensor, ratio: int) -> Tensor:
        return values.unflatten(0, (self._sequences, -1))[:, ratio - 1 :: ratio].contiguous()

    def index_key(
        self, layer: int, weights: Scope, latent: Tensor, table: Tensor, ratio: int, eps: float
    ) -> None:
        """As StepCaches."""
        key = rms_norm(
            linear(latent, weights["attn.indexer.wk"], latent.dtype), weights["attn.indexer.k_norm"], eps
        )
        key = rotate(key, table[self._inputs.positions // ratio * ratio], False)
        key = round_fp4(key, "e8m0") if self._quantize else key
        self._entries[layer, "index_key"] = self._closing(key, ratio)

    def index_topk(
        self,
        kv_source: int,
        query: Tensor,
        head_weights: Tensor,
        candidates: Tensor,
        ratio: int,
        top_k: int,
        candidate_block_size: int,
        candidate_topk_blocks: int,
        see_scores: Callable[[Tensor], Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        """As StepCaches; `see_scores` may replace the scores that are picked by."""
        keys = self._entries[kv_source, "index_key"]
        query = round_fp4(query, "e8m0") if self._quantize else query
        scores = index_scores(query, head_weights, keys, ratio, self._length)
        num_visible = (self._inputs.positions + 1) // ratio
        visible = torch.arange(keys.shape[1]) < num_visible.unsqueeze(1)
        scores = torch.where(visible, scores, -torch.inf)
        blocks = candidates.new_empty(scores.shape[0], 0)
        if candidate_topk_blocks:
            blocks = best_blocks(scores.detach(), num_visible, candidate_block_size, candidate_topk_blocks)
        elif candidates.shape[1]:
            kept = entries_of_blocks(candidates, candidate_block_size, keys.shape[1])
            scores = torch.where(kept, scores, -torch.inf)
        if see_scores is not None:
            scores = see_scores(scores)
        return best(scores.detach(), top_k), blocks


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
    inputs = dense_inputs(token_ids)
    caches = DenseCaches(config, inputs, token_ids.shape[0], precision.quantized)
    with differentiable_ops():
        hidden = forward_rows(
            config, precision, weights, inputs, caches, tap, with_scores=tap is not unchanged
        )
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
