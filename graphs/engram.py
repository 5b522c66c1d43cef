"""Engram: n-gram hashed memory added to the residual streams of a few layers (spec/model.md 9)."""

from torch import Tensor

from deepinfer.graphs.context import StepContext
from deepinfer.graphs.projection import project
from deepinfer.kernels import engram_gate, engram_gather


def hash_tokens(ctx: StepContext) -> None:
    """Compute the table rows of every Engram layer and keep the step's last tokens for the next one."""
    config, token_map = ctx.config, ctx.weights["engram.token_map"]
    for layer in config.engram_layer_ids:
        tables = ctx.layer_weights(layer)
        ids = ctx.caches.hash_ids(layer, tables, token_map, config.engram_pad_token_id)
        ctx.engram_ids[layer] = ctx.tap(layer, "engram_hash_ids", ids)
    ctx.caches.keep_tokens()


def engram(ctx: StepContext, layer: int, residual: Tensor) -> Tensor:
    """Return `residual [T, n, D]` with the gated memory of its n-grams added (9.5, 9.6)."""
    weights = ctx.layer_weights(layer)
    memory = engram_gather(weights["engram.embed"], ctx.engram_ids[layer], ctx.precision.dtype)
    key_and_value = project(ctx, weights, "engram.wkv", memory)
    out: Tensor = engram_gate(residual, key_and_value, weights["engram.qk_weight"], ctx.config.rms_norm_eps)
    return out
