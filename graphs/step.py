"""The step functions: one forward pass over a batch of rows (spec/model.md 2). They are the model.

Run as they are, they are the eager model; traced, they become the graphs. Caches are mutated in place.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from deepinfer.graphs.attention import attention
from deepinfer.graphs.caches import RegionCaches, StepCaches
from deepinfer.graphs.config import ModelConfig
from deepinfer.graphs.context import StepContext, Tap, unchanged
from deepinfer.graphs.engram import engram, hash_tokens
from deepinfer.graphs.hyper_connections import first_stream, mix, mix_of_head
from deepinfer.graphs.moe import moe
from deepinfer.graphs.records import Precision, record_tail
from deepinfer.graphs.rows import StepInputs
from deepinfer.kernels import linear, mhc_collapse, mhc_expand


def forward_step(
    config: ModelConfig,
    precision: Precision,
    weights: Mapping[str, Tensor],
    inputs: StepInputs,
    regions: Mapping[str, Tensor],
    tap: Tap = unchanged,
    *,
    with_scores: bool = False,
) -> Tensor:
    """Run a step over the cache `regions` and return the final normed hidden rows `[T, D]`.

    `regions` maps the names of the cache layout to `[blocks or slots, entries, *record]`; they are mutated.
    """
    caches = RegionCaches(inputs, regions, precision.quantized, record_tail(config, precision))
    return forward_rows(config, precision, weights, inputs, caches, tap, with_scores=with_scores)


def forward_rows(
    config: ModelConfig,
    precision: Precision,
    weights: Mapping[str, Tensor],
    inputs: StepInputs,
    caches: StepCaches,
    tap: Tap = unchanged,
    *,
    with_scores: bool = False,
) -> Tensor:
    """Run all layers over the rows of `inputs` and return the final normed hidden rows `[T, D]`.

    `tap` sees named values of every layer and may replace them: graphs export intermediate results this way,
    and comparisons feed one implementation with those of another. `engram`, `attn` and `ffn` are the streams
    `[T, n, D]` after that part of the layer; other names are sublayer inputs and outputs and decisions. The
    index scores of all entries are made and shown to `tap` only `with_scores`.
    """
    ctx = StepContext(config, precision, weights, caches, inputs, tap, with_scores)
    if config.engram_layer_ids:
        hash_tokens(ctx)
    token_ids = torch.where(inputs.positions >= 0, inputs.token_ids, 0)
    hidden = weights["embed"][token_ids].to(precision.dtype)
    residual = hidden.unsqueeze(1).expand(-1, config.hc_mult, -1).contiguous()
    pre = first_stream(token_ids.shape[0], config.hc_mult)
    for layer in range(config.num_hidden_layers):
        residual, pre = run_layer(ctx, layer, residual, pre)
    if not config.generation.delayed_collapse:
        pre = mix_of_head(residual, weights, config)
    out: Tensor = mhc_collapse(residual, pre, weights["norm"], config.rms_norm_eps)
    return out


def run_layer(ctx: StepContext, layer: int, residual: Tensor, pre: Tensor) -> tuple[Tensor, Tensor]:
    """Run one layer on the streams `residual [T, n, D]`, with delayed collapse first by `pre [T, n]` (3.5).

    Returns the new streams and the collapse weights for the next layer.
    """
    weights, eps = ctx.layer_weights(layer), ctx.config.rms_norm_eps
    delayed = ctx.config.generation.delayed_collapse
    if layer in ctx.config.engram_layer_ids:
        residual = ctx.tap(layer, "engram", engram(ctx, layer, residual))
    attn_pre, post, comb = mix(residual, weights, "attn", ctx.config)
    x = mhc_collapse(residual, pre if delayed else attn_pre, weights["attn_norm"], eps)
    y = ctx.tap(layer, "attn_y", attention(ctx, layer, x))
    residual = ctx.tap(layer, "attn", mhc_expand(y, residual, post, comb))
    ffn_pre, post, comb = mix(residual, weights, "ffn", ctx.config)
    x = mhc_collapse(residual, attn_pre if delayed else ffn_pre, weights["ffn_norm"], eps)
    y = ctx.tap(layer, "ffn_y", moe(ctx, layer, x))
    residual = ctx.tap(layer, "ffn", mhc_expand(y, residual, post, comb))
    return residual, ffn_pre


def logits_step(weights: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
    """Return float32 logits `[N, vocab]` of final hidden rows `[N, D]` (spec 11)."""
    return linear(hidden, weights["head"], torch.float32)
