"""The indexer: which compressed entries a row attends to (spec/model.md 7).

Scores are float32 throughout. Ties go to the lower entry index, everywhere.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from deepinfer.graphs.cache_layout import BLOCK_TOKENS
from deepinfer.graphs.context import StepContext
from deepinfer.graphs.projection import project
from deepinfer.graphs.rope import COMPRESSED_TABLE
from deepinfer.kernels import hadamard, linear, rope


def pick_entries(ctx: StepContext, layer: int, x: Tensor, latent_query: Tensor) -> None:
    """Score the visible entries of an index source and publish each row's best `index_topk` (7.3-7.5)."""
    config, weights, positions = ctx.config, ctx.layer_weights(layer), ctx.inputs.positions
    heads, dim = config.index_n_heads, config.index_head_dim
    query = project(ctx, weights, "attn.indexer.wq_b", latent_query).unflatten(-1, (heads, dim))
    query = rope(query, ctx.weights[COMPRESSED_TABLE], positions, False)
    if config.generation.biased_compression and ctx.precision.quantized:
        query = hadamard(query)  # as the keys: without rounding it would change nothing
    # two roundings in native precision (21.2 item 1): of the projection, then of the scaled weight
    head_weights = linear(x, weights["attn.indexer.weights_proj"], x.dtype)
    head_weights = (head_weights.float() * (dim**-0.5 * heads**-0.5)).to(x.dtype)

    kv_source = config.kv_source(layer)
    assert kv_source is not None, layer
    is_source = layer == config.candidate_source_layer_id
    candidates = ctx.candidates
    if is_source or candidates is None:
        candidates = positions.new_empty(x.shape[0], 0)
    see_scores: Callable[[Tensor], Tensor] | None = None
    if ctx.with_scores:

        def see_scores(scores: Tensor) -> Tensor:
            return ctx.tap(layer, "index_score", scores)

    picks, blocks = ctx.caches.index_topk(
        kv_source,
        query,
        head_weights,
        candidates,
        config.ratio(layer),
        config.index_topk,
        max(1, config.candidate_block_size),  # 0 in a model without candidates
        config.candidate_topk_blocks if is_source else 0,
        see_scores,
    )
    if is_source:
        ctx.candidates = ctx.tap(layer, "candidates", blocks)
    ctx.picks[layer] = ctx.tap(layer, "topk", picks)


def visible_entries(ctx: StepContext, layer: int) -> Tensor:
    """Return every entry that a row sees, as picks `[T, entries]`: what layers without an index attend to."""
    positions, table = ctx.inputs.positions, ctx.inputs.block_table
    ratio = ctx.config.ratio(layer)
    entries = torch.arange(table.shape[1] * (BLOCK_TOKENS // ratio))
    return torch.where(entries < ((positions + 1) // ratio).unsqueeze(1), entries, -1)
