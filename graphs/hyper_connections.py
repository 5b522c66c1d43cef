"""Hyper-connections: four residual streams, mixed before and after every sublayer (spec/model.md 3.3-3.5).

With delayed collapse a sublayer uses the `pre` weights that the previous one computed, the first one stream
0; without it, it uses its own, and the head has a mix of its own as well (16.2).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from deepinfer.graphs.config import ModelConfig
from deepinfer.graphs.context import Scope
from deepinfer.kernels import mhc_mix


def mix(
    residual: Tensor, weights: Scope, sublayer: str, config: ModelConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `pre [T, n]`, `post [T, n]`, `comb [T, n, n]` (source, target) float32 of a sublayer (3.3)."""
    pre, post, comb = mhc_mix(
        residual,
        weights[f"hc_{sublayer}_fn"],
        weights[f"hc_{sublayer}_base"],
        weights[f"hc_{sublayer}_scale"],
        config.hc_sinkhorn_iters,
        config.rms_norm_eps,
        config.hc_eps,
    )
    return pre, post, comb


def mix_of_head(residual: Tensor, weights: Mapping[str, Tensor], config: ModelConfig) -> Tensor:
    """Return the collapse weights `[T, n]` before the head: the `pre` part of a mix that has no other."""
    pre, _, _ = mhc_mix(
        residual,
        weights["hc_head_fn"],
        weights["hc_head_base"],
        weights["hc_head_scale"],
        1,
        config.rms_norm_eps,
        config.hc_eps,
    )
    return pre


def first_stream(num_rows: int, num_streams: int) -> Tensor:
    """Return the collapse weights of the very first sublayer: stream 0 alone, `[T, n]` float32."""
    return (torch.arange(num_streams) == 0).float().expand(num_rows, num_streams).contiguous()
