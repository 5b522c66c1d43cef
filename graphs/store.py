"""The weight store of a build: a checkpoint's weights in final form, and constants derived from a length."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from deepinfer.graphs.checkpoint import Checkpoint
from deepinfer.graphs.config import ModelConfig
from deepinfer.graphs.rope import COMPRESSED_TABLE, WINDOW_TABLE, rope_tables
from deepinfer.graphs.weights import weight_loaders, weight_specs


def store_specs(config: ModelConfig, max_model_len: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of every tensor of the store, in order, without reading a weight."""
    table = ((max_model_len, config.qk_rope_head_dim), torch.float32)
    return {**weight_specs(config), WINDOW_TABLE: table, COMPRESSED_TABLE: table}


def store_loaders(
    checkpoint: Checkpoint, config: ModelConfig, max_model_len: int
) -> dict[str, Callable[[], Tensor]]:
    """Return a function per tensor of the store that makes it, in the order of `store_specs`.

    Raises TokenizerError or ConfigError when derived constants disagree with the checkpoint.
    """
    tables = rope_tables(config, max_model_len)
    return {**weight_loaders(checkpoint), **{name: partial(tables.__getitem__, name) for name in tables}}


def build_store(checkpoint: Checkpoint, config: ModelConfig, max_model_len: int) -> dict[str, Tensor]:
    """Return the whole store; what the checkpoint holds in final form are read-only views of its files."""
    return {name: load() for name, load in store_loaders(checkpoint, config, max_model_len).items()}
