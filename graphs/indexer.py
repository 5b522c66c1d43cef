"""The indexer: which compressed entries a row attends to (spec/model.md 7).

Scores are float32 throughout. Ties go to the lower entry index, everywhere.
"""

import torch
from torch import Tensor

from deepinfer.graphs.context import StepContext, ordered_sum
from deepinfer.graphs.rope import COMPRESSED_TABLE, apply_rope
from deepinfer.kernels import linear, linear_fp8, rms_norm


def write_index_keys(ctx: StepContext, layer: int, latent: Tensor, entries: Tensor, emitted: Tensor) -> None:
    """Derive index keys from the un-rotated `latent [T, head_dim]` and write those of closed groups (7.2)."""
    config, weights = ctx.config, ctx.layer_weights(layer)
    key = linear(latent, weights["attn.indexer.wk"], latent.dtype)
    key = rms_norm(key, weights["attn.indexer.k_norm"], config.rms_norm_eps)
    key = apply_rope(key, ctx.weights[COMPRESSED_TABLE][entries * config.ratio(layer)])
    record = ctx.precision.index_key_record(key)
    ctx.caches.write_entries(layer, "index_key", entries, emitted, record)


def pick_entries(ctx: StepContext, layer: int, x: Tensor, latent_query: Tensor) -> None:
    """Score the visible entries of an index source and publish each row's best `index_topk` (7.3-7.5)."""
    config, rows = ctx.config, ctx.rows
    scores = _scores(ctx, layer, x, latent_query)
    num_visible = (rows.positions + 1) // config.ratio(layer)
    visible = (torch.arange(scores.shape[1]) < num_visible.unsqueeze(1)) & rows.valid.unsqueeze(1)
    scores = torch.where(visible, scores, -torch.inf)
    if layer == config.candidate_source_layer_id:
        ctx.candidates = candidate_entries(
            scores, num_visible, config.candidate_block_size, config.candidate_topk_blocks
        )
        ctx.tap(layer, "candidates", ctx.candidates)
    elif ctx.candidates is not None:
        scores = torch.where(ctx.candidates, scores, -torch.inf)
    scores = ctx.tap(layer, "index_score", scores)
    ctx.picks[layer] = ctx.tap(layer, "topk", top_entries(scores, config.index_topk))


def _scores(ctx: StepContext, layer: int, x: Tensor, latent_query: Tensor) -> Tensor:
    """Return float32 scores `[T, entries]` of every entry of the rows' block tables, visible or not (7.3)."""
    config, rows, weights = ctx.config, ctx.rows, ctx.layer_weights(layer)
    heads, dim = config.index_n_heads, config.index_head_dim
    query = linear_fp8(
        latent_query.unsqueeze(1),
        weights["attn.indexer.wq_b.weight"],
        weights["attn.indexer.wq_b.scale"],
        ctx.precision.quantized,
    )
    query = apply_rope(
        query.unflatten(-1, (heads, dim)).squeeze(1), ctx.weights[COMPRESSED_TABLE][rows.positions]
    )
    # two roundings in native precision (21.2 item 1): of the projection, then of the scaled weight
    head_weights = linear(x, weights["attn.indexer.weights_proj"], x.dtype)
    head_weights = (head_weights.float() * (dim**-0.5 * heads**-0.5)).to(x.dtype).float()

    kv_source = config.kv_source(layer)
    assert kv_source is not None, layer
    query = ctx.precision.index_query(query)
    dots = ctx.caches.dot_entries(kv_source, "index_key", query, ctx.precision.index_key_vector)
    return ordered_sum(dots.relu() * head_weights.unsqueeze(-1), 1)


def top_entries(scores: Tensor, count: int) -> Tensor:
    """Return the best `count` entries of `scores [T, n]` in ascending order, padded with -1 (7.4).

    Entries at -inf are never picked; equal scores go to the lower index.
    """
    count = min(count, scores.shape[1])
    best, order = torch.sort(scores, dim=1, descending=True, stable=True)
    beyond = scores.shape[1]
    picks = torch.where(best[:, :count] > -torch.inf, order[:, :count], beyond)
    picks = torch.sort(picks, dim=1).values
    return torch.where(picks < beyond, picks, -1)


def candidate_entries(scores: Tensor, num_visible: Tensor, block_size: int, num_blocks: int) -> Tensor:
    """Return which entries `[T, n]` lie in a row's best blocks of `block_size` entries (7.5).

    A block is as good as its best entry of `scores [T, n]`; the block of the newest of the `num_visible [T]`
    entries is always kept; blocks without a visible entry never are.
    """
    num_rows, num_entries = scores.shape
    total = -(-num_entries // block_size)
    padded = torch.nn.functional.pad(scores, (0, total * block_size - num_entries), value=-torch.inf)
    block_scores = padded.unflatten(1, (total, block_size)).amax(-1)
    newest = (num_visible - 1).div(block_size, rounding_mode="floor").unsqueeze(1)
    block_scores = torch.where(torch.arange(total) == newest, torch.inf, block_scores)
    best, order = torch.sort(block_scores, dim=1, descending=True, stable=True)
    rank = torch.zeros_like(order).scatter(1, order, torch.arange(total).expand(num_rows, total).contiguous())
    kept = (rank < num_blocks) & (block_scores > -torch.inf)
    return kept.unsqueeze(-1).expand(num_rows, total, block_size).flatten(1)[:, :num_entries]
