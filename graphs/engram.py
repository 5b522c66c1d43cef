"""Engram: n-gram hashed memory added to the residual streams of a few layers (spec/model.md 9)."""

import torch
from torch import Tensor

from deepinfer.graphs.attention import project
from deepinfer.graphs.context import Scope, StepContext
from deepinfer.kernels import dequantize_fp8


def hash_ids(context: Tensor, alive: Tensor, pad: Tensor | int, tables: Scope) -> Tensor:
    """Return the table rows `[T, columns]` of each row's n-grams (9.4).

    `context [T, n]` holds compressed token ids, the row's own first, then older ones; `alive [T, n]` is False
    where there is no such token or it lies inside an image. From the first dead one on, all count as `pad`.
    `tables` gives `engram.multipliers [n]`, `engram.primes` and `engram.offsets` `[columns]`, n-gram major.
    """
    alive = alive.long().cumprod(1).bool()
    products = torch.where(alive, context, pad) * tables["engram.multipliers"]
    first, *older = products.unbind(1)
    heads = tables["engram.primes"].shape[0] // len(older)
    hashes = []
    for product in older:
        first = first ^ product
        hashes.append(first)
    repeated = torch.stack(hashes, dim=1).unsqueeze(-1).expand(-1, -1, heads).flatten(1)
    return repeated % tables["engram.primes"] + tables["engram.offsets"]


def write_history_and_hash(ctx: StepContext) -> None:
    """Compute the table rows of every Engram layer and keep the step's last tokens for the next one."""
    config = ctx.config
    token_map = ctx.weights["engram.token_map"]
    positions = ctx.rows.positions.unsqueeze(1) - torch.arange(config.engram_max_ngram_size)
    alive = positions >= 0
    tokens = ctx.caches.tokens(positions.clamp(min=0))
    # a ring entry that was never written is never used, but it must not index past the map
    context = token_map[torch.where(alive, tokens, 0).clamp(0, token_map.shape[0] - 1)]
    pad = token_map[config.engram_pad_token_id]
    for layer in config.engram_layer_ids:
        ids = hash_ids(context, alive, pad, ctx.layer_weights(layer))
        ctx.engram_ids[layer] = ctx.tap(layer, "engram_hash_ids", ids)


def engram(ctx: StepContext, layer: int, residual: Tensor) -> Tensor:
    """Return `residual [T, n, D]` with the gated memory of its n-grams added (9.5, 9.6)."""
    weights = ctx.layer_weights(layer)
    records = weights["engram.embed"][ctx.engram_ids[layer]]
    memory = dequantize_fp8(records, ctx.precision.dtype).flatten(1)
    key_and_value = project(ctx, weights, "engram.wkv", memory)
    hidden = residual.shape[-1]
    key = key_and_value[:, :-hidden].unflatten(1, residual.shape[1:])
    value = key_and_value[:, -hidden:]
    gate = memory_gate(residual, key, weights["engram.qk_weight"], ctx.config.rms_norm_eps)
    return (residual.float() + gate.unsqueeze(-1) * value.float().unsqueeze(1)).to(residual.dtype)


def memory_gate(residual: Tensor, key: Tensor, qk_weight: Tensor, eps: float) -> Tensor:
    """Return the gate `[T, n]` float32 of each stream: its normed product with the memory's key (9.6)."""
    residual, key = residual.float(), key.float()
    hidden = residual.shape[-1]
    dot = (residual * qk_weight * key).sum(-1)
    dot = dot * torch.rsqrt(residual.pow(2).mean(-1) + eps) * torch.rsqrt(key.pow(2).mean(-1) + eps)
    dot = dot * hidden**-0.5
    return torch.sigmoid(torch.copysign(dot.abs().clamp(min=1e-6).sqrt(), dot))
