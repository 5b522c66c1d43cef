"""Attention over the window and the picked compressed entries (spec/model.md 5).

Keys equal values: one vector per position, shared by all heads. Probabilities stay float32, so that a row's
result does not depend on how its keys fall into blocks.
"""

import torch
from torch import Tensor

from deepinfer.graphs.compressor import write_compressed
from deepinfer.graphs.context import StepContext
from deepinfer.graphs.indexer import pick_entries, visible_entries
from deepinfer.graphs.projection import project
from deepinfer.graphs.records import record_tail
from deepinfer.graphs.rope import table_for_layer
from deepinfer.kernels import linear_fp8, rms_norm, rope, window_record


def attention(ctx: StepContext, layer: int, x: Tensor) -> Tensor:
    """Return the attention sublayer's output `[T, D]` for its normed input `x [T, D]`; writes the caches."""
    config, weights, positions = ctx.config, ctx.layer_weights(layer), ctx.inputs.positions
    table = table_for_layer(ctx.weights, config, layer)
    eps, quantized = config.rms_norm_eps, ctx.precision.quantized
    latent_query = rms_norm(project(ctx, weights, "attn.wq_a", x), weights["attn.q_norm"], eps)
    query = project(ctx, weights, "attn.wq_b", latent_query)
    query = query.unflatten(-1, (config.num_attention_heads, config.head_dim))
    if config.generation.query_head_norm:
        query = rms_norm(query, torch.ones(config.head_dim), eps)
    query = ctx.tap(layer, "q", rope(query, table, positions, False))
    kv = project(ctx, weights, "attn.wkv", x)
    tail = record_tail(config, ctx.precision)
    record = window_record(
        kv, weights["attn.kv_norm"], eps, table, positions, quantized, *((tail,) if tail else ())
    )

    kv_source, picks = None, positions.new_empty(x.shape[0], 0)
    if config.ratio(layer):
        if config.is_kv_source(layer):
            write_compressed(ctx, layer, x)
        if config.is_index_source(layer):
            pick_entries(ctx, layer, x, latent_query)
        kv_source, index_source = config.kv_source(layer), config.index_source(layer)
        assert kv_source is not None, layer
        picks = visible_entries(ctx, layer) if index_source is None else ctx.picks[index_source]

    sink, scale = weights["attn.attn_sink"], config.head_dim**-0.5
    output, mass = ctx.caches.attend(
        layer, query, record, kv_source, picks, sink, scale, config.sliding_window
    )
    ctx.tap(layer, "attn_mass", mass)
    output = rope(ctx.tap(layer, "o", output), table, positions, True)
    grouped = output.flatten(1).unflatten(1, (config.o_groups, -1))
    grouped = linear_fp8(grouped, *weights.matrix("attn.wo_a"), False)
    return project(ctx, weights, "attn.wo_b", grouped.flatten(1))
