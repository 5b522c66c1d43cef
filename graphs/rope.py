"""Rotary position embedding: tables and rotation (spec/model.md 4).

Only the last `qk_rope_head_dim` values of a vector rotate, in interleaved pairs (2i, 2i+1). Layers without
compression use `rope_theta`; layers with it use `compress_rope_theta` and YaRN for everything they rotate.
The tables are computed once per build, so that every graph and the eager model share the same bits.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from deepinfer.graphs.config import ModelConfig, RopeScaling

WINDOW_TABLE = "rope.window"
COMPRESSED_TABLE = "rope.compressed"


def inverse_frequencies(rope_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Return the rotation per position of each pair, `[rope_dim / 2]` float32; YaRN with `scaling`."""
    exponents = torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim
    frequencies = 1.0 / theta**exponents
    if scaling is None or scaling.original_max_position_embeddings <= 0:
        return frequencies

    def correction(rotations: float) -> float:
        length = scaling.original_max_position_embeddings
        return rope_dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(correction(scaling.beta_fast)), 0)
    high = min(math.ceil(correction(scaling.beta_slow)), rope_dim - 1)
    ramp = (torch.arange(rope_dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)
    smooth = 1 - ramp.clamp(0, 1)
    return frequencies / scaling.factor * (1 - smooth) + frequencies * smooth


def rope_table(rope_dim: int, theta: float, scaling: RopeScaling | None, num_positions: int) -> Tensor:
    """Return `[num_positions, rope_dim]` float32: the cosines of a position's pairs, then their sines."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope_dim, theta, scaling))
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def rope_tables(config: ModelConfig, num_positions: int) -> dict[str, Tensor]:
    """Return the two tables of a model under the names by which the step functions look them up."""
    dim = config.qk_rope_head_dim
    return {
        WINDOW_TABLE: rope_table(dim, config.rope_theta, None, num_positions),
        COMPRESSED_TABLE: rope_table(dim, config.compress_rope_theta, config.rope_scaling, num_positions),
    }


def table_for_layer(weights: Mapping[str, Tensor], config: ModelConfig, layer: int) -> Tensor:
    """Return the table that everything in `layer` rotates by."""
    return weights[COMPRESSED_TABLE if config.ratio(layer) else WINDOW_TABLE]
