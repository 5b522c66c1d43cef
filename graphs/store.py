"""The weight store of a build: a checkpoint's weights in final form, and constants derived from a length.

Packed, it holds matrices in the layouts that the native products read fastest: values and names are the same.
The eager model uses the plain store, artifacts hold the packed one.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from deepinfer.graphs.checkpoint import Checkpoint
from deepinfer.graphs.config import ModelConfig
from deepinfer.graphs.rope import COMPRESSED_TABLE, WINDOW_TABLE, rope_tables
from deepinfer.graphs.weights import weight_loaders, weight_specs
from deepinfer.kernels.packing import pack_linear, pack_linear_fp4, pack_linear_fp8

Specs = dict[str, tuple[tuple[int, ...], torch.dtype]]
Loaders = dict[str, Callable[[], Tensor]]

# weights of `linear`; those with scales are told by their names' ends
_LINEAR = ("ffn.gate.weight", "compressor.wkv", "compressor.wgate", "indexer.wk", "indexer.weights_proj")


def store_specs(config: ModelConfig, max_model_len: int, *, packed: bool = False) -> Specs:
    """Return shape and dtype of every tensor of the store, in order, without reading a weight."""
    table = ((max_model_len, config.qk_rope_head_dim), torch.float32)
    specs: Specs = {**weight_specs(config), WINDOW_TABLE: table, COMPRESSED_TABLE: table}
    if not packed:
        return specs
    shapes = {
        name: partial(torch.empty, shape, dtype=dtype, device="meta")
        for name, (shape, dtype) in specs.items()
    }
    tensors = {name: make() for name, make in _packed(shapes).items()}
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def store_loaders(
    checkpoint: Checkpoint, config: ModelConfig, max_model_len: int, *, packed: bool = False
) -> Loaders:
    """Return a function per tensor of the store that makes it, in the order of `store_specs`.

    Raises TokenizerError or ConfigError when derived constants disagree with the checkpoint.
    """
    tables = rope_tables(config, max_model_len)
    loaders: Loaders = {**weight_loaders(checkpoint)}
    loaders |= {name: partial(tables.__getitem__, name) for name in tables}
    return _packed(loaders) if packed else loaders


def build_store(
    checkpoint: Checkpoint, config: ModelConfig, max_model_len: int, *, packed: bool = False
) -> dict[str, Tensor]:
    """Return the whole store; what the checkpoint holds in final form are read-only views of its files."""
    loaders = store_loaders(checkpoint, config, max_model_len, packed=packed)
    return {name: load() for name, load in loaders.items()}


def _packed(loaders: Mapping[str, Callable[[], Tensor]]) -> Loaders:
    """Wrap the loaders of matrices so that they make the packed form."""
    packed: Loaders = dict(loaders)
    for name, load in loaders.items():
        scale = name.removesuffix("weight") + "scale"
        if name == "head" or name.endswith(_LINEAR):
            packed[name] = partial(_packed_linear, load)
        elif name.endswith(".weight") and scale in loaders:
            pack = pack_linear_fp4 if ".ffn.experts." in name else pack_linear_fp8
            pair = (pack, load, loaders[scale])
            packed[name], packed[scale] = partial(_packed_part, *pair, 0), partial(_packed_part, *pair, 1)
    return packed


def _packed_linear(load: Callable[[], Tensor]) -> Tensor:
    return pack_linear(load()).contiguous()


def _packed_part(
    pack: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    load_weight: Callable[[], Tensor],
    load_scale: Callable[[], Tensor],
    part: int,
) -> Tensor:
    return pack(load_weight(), load_scale())[part].contiguous()
