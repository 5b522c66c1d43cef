"""KV compression: one latent per `ratio` tokens, written to the paged cache of a source layer (spec 6)."""

from torch import Tensor

from deepinfer.graphs.context import StepContext
from deepinfer.graphs.rope import COMPRESSED_TABLE


def write_compressed(ctx: StepContext, layer: int, x: Tensor) -> None:
    """Compress the rows `x [T, D]` of a source layer; keep the entries that close, and their index keys."""
    config, weights = ctx.config, ctx.layer_weights(layer)
    table, ratio, eps = ctx.weights[COMPRESSED_TABLE], config.ratio(layer), config.rms_norm_eps
    latent = ctx.caches.compress(layer, weights, x, table, ratio, eps)
    ctx.tap(layer, "latent", latent)
    ctx.caches.index_key(layer, weights, latent, table, ratio, eps)
