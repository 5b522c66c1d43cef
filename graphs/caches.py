"""What a step does to the state of its requests: one interface, two ways to hold it.

`RegionCaches` is the serving form: records in their byte formats, in regions addressed by block and slot. The
dense form of training (`dense.py`) holds whole sequences and lets gradients through. Layers know neither.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from deepinfer.graphs.context import Scope
from deepinfer.graphs.rows import StepInputs
from deepinfer.kernels import (
    compress,
    compress_biased,
    engram_ids,
    index_key,
    index_topk,
    ring_write,
    sparse_attention,
)


class StepCaches(Protocol):
    """State of the step's requests; a method that is given values of the rows keeps them for later steps."""

    def hash_ids(self, layer: int, tables: Scope, token_map: Tensor, pad_token_id: int) -> Tensor:
        """Return the memory-table rows `[T, columns]` of the rows' n-grams (spec/model.md 9.4)."""
        ...

    def keep_tokens(self) -> None:
        """Keep the rows' token ids for the n-grams of later steps."""
        ...

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
        """Attend `query [T, H, d]` to the last `window` positions and to `picks [T, k]` of `kv_source`.

        Keeps the window `record [T, r]` of the rows. Returns the output `[T, H, d]` and the probability mass
        of every key `[T, W + k]` (or `[T, 0]`, where nobody asks for it).
        """
        ...

    def compress(
        self, layer: int, weights: Scope, x: Tensor, table: Tensor, ratio: int, eps: float
    ) -> Tensor:
        """Compress the rows `x [T, D]`, keep the entries that close; returns the latent `[T, d]`."""
        ...

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
        """As `compress` with biased gates (16.2), for the entries of `compressed_kv` or of `index_key`."""
        ...

    def index_key(
        self, layer: int, weights: Scope, latent: Tensor, table: Tensor, ratio: int, eps: float
    ) -> None:
        """Keep the index keys of the entries that close, made from the `latent [T, head_dim]` (7.2)."""
        ...

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
        """Pick the best entries of `kv_source` (7.3-7.5): picks `[T, top_k]`, candidate blocks `[T, n]`.

        `see_scores` is shown the float32 scores `[T, entries]` and may replace them in the dense form.
        """
        ...


class RegionCaches:
    """Records in the declared regions `[blocks or slots, entries, *record]`, mutated in place.

    `tail` is that of `records.record_tail`.
    """

    def __init__(
        self, inputs: StepInputs, regions: Mapping[str, Tensor], quantize: bool, tail: int = 0
    ) -> None:
        self._inputs, self._regions, self._quantize = inputs, regions, quantize
        self._tail = (tail,) if tail else ()  # graphs of models without one do not name it

    def _region(self, layer: int, kind: str) -> Tensor:
        return self._regions[f"layers.{layer}.{kind}"]

    def hash_ids(self, layer: int, tables: Scope, token_map: Tensor, pad_token_id: int) -> Tensor:
        """As StepCaches; earlier tokens come from the step's rows or the ring."""
        inputs = self._inputs
        ids: Tensor = engram_ids(
            inputs.token_ids,
            self._regions["token_history"],
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
        """As StepCaches."""
        self._keep(self._regions["token_history"], self._inputs.token_ids.unsqueeze(1))

    def _keep(self, ring: Tensor, values: Tensor) -> None:
        inputs = self._inputs
        ring_write(
            ring,
            values,
            inputs.positions,
            inputs.request_index,
            inputs.slot_ids,
            inputs.num_computed_tokens,
            inputs.row_counts,
        )

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
        """As StepCaches. A chunk may overwrite ring entries that its own rows need: written last."""
        inputs, ring = self._inputs, self._region(layer, "window")
        compressed = ring if kv_source is None else self._region(kv_source, "compressed_kv")
        output, mass = sparse_attention(
            query,
            record,
            ring,
            compressed,
            picks,
            sink,
            scale,
            window,
            inputs.positions,
            inputs.request_index,
            inputs.block_table,
            inputs.slot_ids,
            inputs.num_computed_tokens,
            self._quantize,
            False,
            *self._tail,
        )
        self._keep(ring, record)
        return output, mass

    def compress(
        self, layer: int, weights: Scope, x: Tensor, table: Tensor, ratio: int, eps: float
    ) -> Tensor:
        """As StepCaches."""
        inputs = self._inputs
        wkv = weights["attn.compressor.wkv"]
        region = self._region(layer, "compressed_kv")
        pooled = ratio > 1
        latent: Tensor = compress(
            x,
            wkv,
            weights["attn.compressor.wgate"] if pooled else x.new_empty(0, x.shape[1]),
            weights["attn.compressor.norm"],
            eps,
            self._region(layer, "open_group") if pooled else x.new_empty(0, 0, 0, dtype=torch.float32),
            table,
            region,
            inputs.positions,
            inputs.request_index,
            inputs.block_table,
            inputs.slot_ids,
            inputs.num_computed_tokens,
            inputs.row_counts,
            ratio,
            self._quantize,
        )
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
        """As StepCaches."""
        inputs, index = self._inputs, part == "index_key"
        stem = "attn.indexer.compressor" if index else "attn.compressor"
        latent: Tensor = compress_biased(
            x,
            weights[f"{stem}.wkv"],
            weights[f"{stem}.wgate"],
            weights[f"{stem}.ape"],
            weights[f"{stem}.norm"],
            eps,
            self._region(layer, "open_index_group" if index else "open_group"),
            table,
            self._region(layer, part),
            inputs.positions,
            inputs.request_index,
            inputs.block_table,
            inputs.slot_ids,
            inputs.num_computed_tokens,
            inputs.row_counts,
            ratio,
            overlap,
            self._quantize,
            index and self._quantize,  # only then does it matter
        )
        return latent

    def index_key(
        self, layer: int, weights: Scope, latent: Tensor, table: Tensor, ratio: int, eps: float
    ) -> None:
        """As StepCaches."""
        inputs = self._inputs
        index_key(
            latent,
            weights["attn.indexer.wk"],
            weights["attn.indexer.k_norm"],
            eps,
            table,
            self._region(layer, "index_key"),
            inputs.positions,
            inputs.request_index,
            inputs.block_table,
            ratio,
            self._quantize,
        )

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
        """As StepCaches; scores are only shown."""
        inputs = self._inputs
        picks, blocks, scores = index_topk(
            query,
            head_weights,
            self._region(kv_source, "index_key"),
            candidates,
            inputs.positions,
            inputs.request_index,
            inputs.block_table,
            ratio,
            top_k,
            candidate_block_size,
            candidate_topk_blocks,
            self._quantize,
            see_scores is not None,
        )
        if see_scores is not None:
            see_scores(scores)
        return picks, blocks
