"""KV compression: one latent per `ratio` tokens, written to the paged cache of a source layer (spec 6)."""

from torch import Tensor

from deepinfer.graphs.context import StepContext
from deepinfer.graphs.rope import COMPRESSED_TABLE


def write_compressed(ctx: StepContext, layer: int, x: Tensor) -> None:
    """Compress the rows `x [T, D]` of a source layer; keep the entries that close, and their index keys."""
    config, weights = ctx.config, ctx.layer_weights(layer)
    table, ratio, eps = ctx.weights[COMPRESSED_TABLE], config.ratio(layer), config.rms_norm_eps
    if config.generation.biased_compression:
        write_biased(ctx, layer, x)
        return
    latent = ctx.caches.compress(layer, weights, x, table, ratio, eps)
    ctx.tap(layer, "latent", latent)
    ctx.caches.index_key(layer, weights, latent, table, ratio, eps)


def write_biased(ctx: StepContext, layer: int, x: Tensor) -> None:
    """The same where keys of the index have a compression of their own (16.2)."""
    parts = ("compressed_kv", "index_key") if ctx.config.is_index_source(layer) else ("compressed_kv",)
    for part in parts:
        latent = ctx.caches.compress_biased(
            layer,
            part,
            ctx.layer_weights(layer),
            x,
            ctx.weights[COMPRESSED_TABLE],
            ctx.config.ratio(layer),
            ctx.config.overlaps(layer),
            ctx.config.rms_norm_eps,
        )
        ctx.tap(layer, "latent" if part == "compressed_kv" else "index_latent", latent)
