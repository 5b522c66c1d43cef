"""Attention over the window and the picked compressed entries (spec/model.md 5).

Keys equal values: one vector per position, shared by all heads. Probabilities stay float32, so that a row's
result does not depend on how its keys fall into blocks.
"""

import torch
from torch import Tensor

from deepinfer.graphs.compressor import write_compressed
from deepinfer.graphs.context import Scope, StepContext
from deepinfer.graphs.indexer import pick_entries, write_index_keys
from deepinfer.graphs.rope import apply_rope, table_for_layer
from deepinfer.kernels import linear_fp8, rms_norm


def attention(ctx: StepContext, layer: int, x: Tensor) -> Tensor:
    """Return the attention sublayer's output `[T, D]` for its normed input `x [T, D]`; writes the caches."""
    config, weights = ctx.config, ctx.layer_weights(layer)
    cos_sin = table_for_layer(ctx.weights, config, layer)
    rotation = cos_sin[ctx.rows.positions]
    latent_query = rms_norm(
        project(ctx, weights, "attn.wq_a", x), weights["attn.q_norm"], config.rms_norm_eps
    )
    query = project(ctx, weights, "attn.wq_b", latent_query)
    query = apply_rope(query.unflatten(-1, (config.num_attention_heads, config.head_dim)), rotation)

    keys, visible = _window(ctx, layer, weights, x, rotation)
    if config.ratio(layer):
        if config.is_kv_source(layer):
            latent, entries, emitted = write_compressed(ctx, layer, x)
            write_index_keys(ctx, layer, latent, entries, emitted)
        if config.is_index_source(layer):
            pick_entries(ctx, layer, x, latent_query)
        picked_keys, picked_visible = _picked(ctx, layer)
        keys = torch.cat((keys, picked_keys), dim=1)
        visible = torch.cat((visible, picked_visible), dim=1)

    ctx.tap(layer, "q", query)
    output, mass = softmax_with_sink(query, keys, visible, weights["attn.attn_sink"], config.head_dim**-0.5)
    ctx.tap(layer, "attn_mass", mass)
    output = ctx.tap(layer, "o", output)
    output = apply_rope(output, rotation, inverse=True)
    grouped = output.flatten(1).unflatten(1, (config.o_groups, -1))
    grouped = linear_fp8(grouped, weights["attn.wo_a.weight"], weights["attn.wo_a.scale"], False)
    return project(ctx, weights, "attn.wo_b", grouped.flatten(1))


def project(ctx: StepContext, weights: Scope, name: str, x: Tensor) -> Tensor:
    """Apply the FP8 linear `name` to `x [T, K]` (12.4); activations are quantised in `native` precision."""
    quantized = ctx.precision.quantized
    out = linear_fp8(x.unsqueeze(1), weights[name + ".weight"], weights[name + ".scale"], quantized)
    return out.squeeze(1)


def softmax_with_sink(
    query: Tensor, keys: Tensor, visible: Tensor, sink: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend `query [T, H, d]` to `keys [T, n, d]` where `visible [T, n]`; `sink [H]` joins the sum (5.3).

    Returns the output `[T, H, d]` in the dtype of `query` and the probability mass of every key, summed over
    heads, `[T, n]` float32. Float32 inside. A row that sees nothing gives zeros.
    """
    # a key that is not visible may hold anything, and zero times NaN is NaN
    keys = torch.where(visible.unsqueeze(-1), keys, 0).float()
    logits = torch.matmul(query.float(), keys.transpose(1, 2)) * scale
    logits = torch.where(visible.unsqueeze(1), logits, -torch.inf)
    top = logits.amax(-1, keepdim=True).clamp(min=-1e30)
    weights = torch.exp(logits - top)
    total = weights.sum(-1, keepdim=True) + torch.exp(sink.view(1, -1, 1) - top)
    output = (torch.matmul(weights, keys) / total).to(query.dtype)
    return output, (weights / total).sum(1)


def _window(
    ctx: StepContext, layer: int, weights: Scope, x: Tensor, rotation: Tensor
) -> tuple[Tensor, Tensor]:
    """Write the rows' window records; return keys `[T, W, d]`, oldest first, and which are real `[T, W]`."""
    config, rows = ctx.config, ctx.rows
    kv = rms_norm(project(ctx, weights, "attn.wkv", x), weights["attn.kv_norm"], config.rms_norm_eps)
    record = ctx.precision.window_record(apply_rope(kv, rotation))
    offsets = torch.arange(config.sliding_window - 1, -1, -1)
    positions = rows.positions.unsqueeze(1) - offsets
    visible = (positions >= 0) & rows.valid.unsqueeze(1)
    records = ctx.caches.window(layer, record, positions.clamp(min=0))
    return ctx.precision.window_vector(records), visible


def _picked(ctx: StepContext, layer: int) -> tuple[Tensor, Tensor]:
    """Return the compressed keys `[T, k, d]` that this layer attends to, and which of them are real."""
    index_source, kv_source = ctx.config.index_source(layer), ctx.config.kv_source(layer)
    assert index_source is not None and kv_source is not None, layer
    picks = ctx.picks[index_source]
    records = ctx.caches.entries_at(kv_source, "compressed_kv", picks.clamp(min=0))
    return ctx.precision.compressed_vector(records), picks >= 0
