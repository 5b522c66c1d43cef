"""KV compression: one latent per `ratio` tokens, written to the paged cache of a source layer (spec 6)."""

import torch
from torch import Tensor

from deepinfer.graphs.context import StepContext, ordered_sum
from deepinfer.graphs.rope import COMPRESSED_TABLE, apply_rope
from deepinfer.kernels import linear, rms_norm


def write_compressed(ctx: StepContext, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compress the rows `x [T, D]` of a source layer and write the entries that close in this step.

    Returns the un-rotated latent `[T, head_dim]` of each row's group, the entry index `[T]`, and whether the
    row closes its group `[T]` bool. Rows that do not close one carry a meaningless latent.
    """
    config, rows, weights = ctx.config, ctx.rows, ctx.layer_weights(layer)
    ratio = config.ratio(layer)
    if ratio == 1:
        pooled = linear(x, weights["attn.compressor.wkv"], x.dtype)
    else:
        pooled = _pool_groups(ctx, layer, x).to(x.dtype)
    latent = rms_norm(pooled, weights["attn.compressor.norm"], config.rms_norm_eps)
    ctx.tap(layer, "latent", latent)
    entries = rows.positions // ratio
    emitted = rows.valid & ((rows.positions + 1) % ratio == 0)
    rotated = apply_rope(latent, ctx.weights[COMPRESSED_TABLE][entries * ratio])
    record = ctx.precision.compressed_record(rotated)
    ctx.caches.write_entries(layer, "compressed_kv", entries, emitted, record)
    return latent, entries, emitted


def _pool_groups(ctx: StepContext, layer: int, x: Tensor) -> Tensor:
    """Softmax-pool each row with its `ratio - 1` predecessors: `[T, head_dim]` float32 (6.2).

    Predecessors come from this step's rows or, before its first row, from the ring of open groups.
    """
    rows, weights = ctx.rows, ctx.layer_weights(layer)
    value = linear(x, weights["attn.compressor.wkv"], torch.float32)
    gate = linear(x, weights["attn.compressor.wgate"], torch.float32)
    parked = torch.cat((value, gate), dim=-1)
    offsets = torch.arange(ctx.config.ratio(layer) - 1, 0, -1)
    earlier = (rows.positions.unsqueeze(1) - offsets).clamp(min=0)
    earlier_parked = ctx.caches.open_group(layer, parked, earlier)
    values, gates = torch.cat((earlier_parked, parked.unsqueeze(1)), dim=1).chunk(2, dim=-1)
    shares = torch.exp(gates - gates.amax(1, keepdim=True))
    shares = shares / ordered_sum(shares, 1).unsqueeze(1)
    return ordered_sum(values * shares, 1)
