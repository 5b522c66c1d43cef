"""The weight store of a build: a checkpoint's weights in final form, and constants derived from a length.

Packed, it holds matrices in the layouts that the native products read fastest: values and names are the same.
The eager model uses the plain store, artifacts hold the packed one.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from deepinfer.graphs.checkpoint import Checkpoint
from deepinfer.graphs.config import ModelConfig
from deepinfer.graphs.rope import COMPRESSED_TABLE, WINDOW_TABLE, rope_tables
from deepinfer.graphs.weights import weight_loaders, weight_specs
from deepinfer.kernels.linear_fp4 import dequantize_experts
from deepinfer.kernels.linear_fp8 import dequantize_tiles
from deepinfer.kernels.packing import pack_groups, pack_linear, pack_linear_fp4, pack_linear_fp8

Spec = tuple[tuple[int, ...], torch.dtype]
Specs = dict[str, Spec]
Loaders = dict[str, Callable[[], Tensor]]

# weights of `linear`; those with scales are told by their names' ends
_LINEAR = ("ffn.gate.weight", "compressor.wkv", "compressor.wgate", "indexer.wk", "indexer.weights_proj")


def store_specs(config: ModelConfig, max_model_len: int, *, packed: bool = False) -> Specs:
    """Return shape and dtype of every tensor of the store, in order, without reading a weight."""
    table = ((max_model_len, config.qk_rope_head_dim), torch.float32)
    specs: Specs = {**weight_specs(config), WINDOW_TABLE: table, COMPRESSED_TABLE: table}
    if not packed:
        return specs
    for pack, parts in _packings(specs).values():
        specs.update(zip(parts, _packed_specs(pack, *(specs[part] for part in parts)), strict=True))
    return specs


@cache  # layers repeat each other's shapes
def _packed_specs(pack: Callable[..., Any], *parts: Spec) -> tuple[Spec, ...]:
    results = pack(*(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in parts))
    results = results if isinstance(results, tuple) else (results,)
    return tuple((tuple(result.shape), result.dtype) for result in results)


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


def dequantized_store(store: Mapping[str, Tensor], max_bytes: int) -> dict[str, Tensor]:
    """Return the plain `store` with quantised matrices as float32, without their scales, up to `max_bytes`.

    They are what a reference makes of the quantised ones at every call, so results keep every bit. Matrices
    that every row passes come first, then experts; those that no longer fit stay as they are.
    """
    result, left = dict(store), max_bytes
    matrices = [(pack is pack_linear_fp4, parts) for pack, parts in _packings(store).values()]
    quantized = [(experts, *parts) for experts, parts in matrices if len(parts) == 2]
    for experts, weight, scale in sorted(quantized, key=lambda matrix: matrix[0]):
        values_per_byte = 2 if experts else 1
        size = store[weight].numel() * values_per_byte * torch.float32.itemsize
        if size <= left:
            dequantize = dequantize_experts if experts else dequantize_tiles
            result[weight] = dequantize(store[weight], result.pop(scale))
            left -= size
    return result


def _packings(names: Iterable[str]) -> dict[str, tuple[Callable[..., Any], tuple[str, ...]]]:
    """How the matrices among the tensors are packed, by name: the function, and its arguments by name."""
    known = set(names)
    packings: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {}
    for name in names:
        scale = name.removesuffix("weight") + "scale"
        if name == "head" or name.endswith(_LINEAR):
            packings[name] = pack_linear, (name,)
        elif name.endswith(".weight") and scale in known:
            pack = pack_linear_fp4 if ".ffn.experts." in name else pack_linear_fp8
            packings[name] = pack, (name, scale)
        elif name.endswith(".weight"):  # unquantised
            packings[name] = pack_groups, (name,)
    return packings


def _packed(loaders: Loaders) -> Loaders:
    """Wrap the loaders of matrices so that they make the packed form."""
    packed = dict(loaders)
    for pack, parts in _packings(loaders).values():
        loads = tuple(loaders[part] for part in parts)
        packed |= {part: partial(_packed_part, pack, loads, number) for number, part in enumerate(parts)}
    return packed


def _packed_part(pack: Callable[..., Any], loads: tuple[Callable[[], Tensor], ...], number: int) -> Tensor:
    results = pack(*(load() for load in loads))
    part: Tensor = results[number] if isinstance(results, tuple) else results
    return part.contiguous()
