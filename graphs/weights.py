"""The weight store: tensors in the form the step functions use, under the names they use.

Packed storage is kept (FP8 and FP4 codes and scales as uint8, or bfloat16 without scales); only layout
changes: a leading group axis on matrices, experts stacked, w1 over w3, scales of large tiles repeated for the
tiles of 32 that they are made of, table rows joined with their scales. Norm weights are float32, whatever the
checkpoint stores. Owns names and shapes of the store; knows nothing about files.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from deepinfer.errors import CheckpointError
from deepinfer.graphs.checkpoint import Checkpoint
from deepinfer.graphs.config_schema import QUANT_TILE, ModelConfig
from deepinfer.graphs.engram_tables import EngramTables, build_engram_tables


@dataclass(frozen=True)
class WeightSpec:
    """Shape and dtype of a tensor of the store, and how it is made from a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    build: Callable[[Checkpoint, EngramTables | None], Tensor]


_Named = tuple[str, WeightSpec]
_UINT8, _BF16, _F32, _INT64 = torch.uint8, torch.bfloat16, torch.float32, torch.int64


def _copy(source: str, shape: tuple[int, ...], dtype: torch.dtype) -> WeightSpec:
    """One tensor of the checkpoint, viewed in another shape or widened."""
    return WeightSpec(shape, dtype, lambda ckpt, _: ckpt.get(source).to(dtype).reshape(shape))


def _concat(sources: list[str], shape: tuple[int, ...], dtype: torch.dtype = _UINT8) -> WeightSpec:
    """Tensors of the checkpoint one after another along the rows, then viewed in `shape`."""
    return WeightSpec(
        shape, dtype, lambda ckpt, _: torch.cat([ckpt.get(name) for name in sources]).reshape(shape)
    )


def _tile_scales(sources: list[str], shape: tuple[int, ...], rows: int, side: int) -> WeightSpec:
    """Scales of tiles of `side`, of matrices of `rows` each, as those of tiles of 32: equal values."""
    times, tiles = side // QUANT_TILE, (rows // QUANT_TILE, shape[-1])

    def widened(scale: Tensor) -> Tensor:
        return scale.repeat_interleave(times, 0).repeat_interleave(times, 1)[: tiles[0], : tiles[1]]

    if times == 1:
        return _concat(sources, shape) if len(sources) > 1 else _copy(sources[0], shape, _UINT8)
    return WeightSpec(
        shape, _UINT8, lambda ckpt, _: torch.cat([widened(ckpt.get(name)) for name in sources]).reshape(shape)
    )


def _dense(c: ModelConfig, name: str, source: str, groups: int, rows: int, columns: int) -> Iterator[_Named]:
    """A matrix of stacked `rows` x `columns` groups: weight [G, N, K] and, in FP8, scale [G, N/32, K/32]."""
    shape = (groups, rows, columns)
    if not c.quantized_weights:
        yield f"{name}.weight", _copy(f"{source}.weight", shape, _BF16)
        return
    tiles = (groups, rows // QUANT_TILE, columns // QUANT_TILE)
    yield f"{name}.weight", _copy(f"{source}.weight", shape, _UINT8)
    yield f"{name}.scale", _tile_scales([f"{source}.scale"], tiles, groups * rows, c.generation.tile)


def _compression(c: ModelConfig, stem: str, layer: int, size: int) -> Iterator[_Named]:
    width = size * (2 if c.overlaps(layer) else 1)
    for name in ("wkv", "wgate") if c.ratio(layer) > 1 else ("wkv",):
        yield f"{stem}.{name}", _copy(f"{stem}.{name}.weight", (width, c.hidden_size), _BF16)
    if c.generation.biased_compression:
        yield f"{stem}.ape", _copy(f"{stem}.ape", (c.ratio(layer), width), _F32)
    yield f"{stem}.norm", _copy(f"{stem}.norm.weight", (size,), _F32)


def _attention(c: ModelConfig, layer: int) -> Iterator[_Named]:
    stem = f"layers.{layer}.attn"

    def dense(name: str, rows: int, columns: int, groups: int = 1) -> Iterator[_Named]:
        return _dense(c, f"{stem}.{name}", f"{stem}.{name}", groups, rows, columns)

    def plain(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> _Named:
        return f"{stem}.{name}", _copy(f"{stem}.{name}.weight", shape, dtype)

    yield from dense("wq_a", c.q_lora_rank, c.hidden_size)
    yield plain("q_norm", (c.q_lora_rank,), _F32)
    yield from dense("wq_b", c.attention_width, c.q_lora_rank)
    yield from dense("wkv", c.head_dim, c.hidden_size)
    yield plain("kv_norm", (c.head_dim,), _F32)
    yield from dense("wo_a", c.o_lora_rank, c.o_group_width, groups=c.o_groups)
    yield from dense("wo_b", c.hidden_size, c.o_groups * c.o_lora_rank)
    yield f"{stem}.attn_sink", _copy(f"{stem}.attn_sink", (c.num_attention_heads,), _F32)
    if c.is_kv_source(layer):
        yield from _compression(c, f"{stem}.compressor", layer, c.head_dim)
    if c.is_index_source(layer):
        yield from dense("indexer.wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank)
        yield plain("indexer.weights_proj", (c.index_n_heads, c.hidden_size), _BF16)
        if c.generation.biased_compression:
            yield from _compression(c, f"{stem}.indexer.compressor", layer, c.index_head_dim)
        elif c.is_kv_source(layer):
            yield plain("indexer.wk", (c.index_head_dim, c.head_dim), _BF16)
            yield plain("indexer.k_norm", (c.index_head_dim,), _F32)


def _expert_ids(source: str, shape: tuple[int, int], experts: int) -> WeightSpec:
    """The experts of every token, int64; an id that no expert has is refused."""

    def build(checkpoint: Checkpoint, _: EngramTables | None) -> Tensor:
        ids = checkpoint.get(source).to(_INT64)
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < experts:
            raise CheckpointError(
                f"expert ids must lie in 0 .. {experts - 1}, got {int(ids.min())} .. {int(ids.max())}",
                where=f"tensor {source}",
                action="download the checkpoint again",
            )
        return ids

    return WeightSpec(shape, _INT64, build)


def _router(c: ModelConfig, layer: int) -> Iterator[_Named]:
    stem, count = f"layers.{layer}.ffn.gate", c.n_routed_experts
    yield f"{stem}.weight", _copy(f"{stem}.weight", (count, c.hidden_size), _BF16)
    if c.is_hash_routed(layer):
        shape = (c.vocab_size, c.num_experts_per_tok)
        yield f"{stem}.tid2eid", _expert_ids(f"{stem}.tid2eid", shape, count)
    else:
        yield f"{stem}.bias", _copy(f"{stem}.bias", (count,), _F32)


def _experts(c: ModelConfig, layer: int) -> Iterator[_Named]:
    stem, width, inner = f"layers.{layer}.ffn", c.hidden_size, c.moe_intermediate_size
    count, shared = c.n_routed_experts, f"{stem}.shared_experts"
    yield from _router(c, layer)
    units = (("weight", 2), ("scale", QUANT_TILE)) if c.quantized_weights else (("weight", 1),)
    dtype = _UINT8 if c.quantized_weights else _BF16
    for kind, unit in units:
        up = [f"{stem}.experts.{e}.{w}.{kind}" for e in range(count) for w in ("w1", "w3")]
        down = [f"{stem}.experts.{e}.w2.{kind}" for e in range(count)]
        yield f"{stem}.experts.w13.{kind}", _concat(up, (count, 2 * inner, width // unit), dtype)
        yield f"{stem}.experts.w2.{kind}", _concat(down, (count, width, inner // unit), dtype)
    both = [f"{shared}.w1", f"{shared}.w3"]
    yield (
        f"{shared}.w13.weight",
        _concat([f"{name}.weight" for name in both], (1, 2 * inner, width), dtype),
    )
    if c.quantized_weights:
        tiles = (1, 2 * inner // QUANT_TILE, width // QUANT_TILE)
        scales = [f"{name}.scale" for name in both]
        yield f"{shared}.w13.scale", _tile_scales(scales, tiles, inner, c.generation.tile)
    yield from _dense(c, f"{shared}.w2", f"{shared}.w2", 1, width, inner)


def _record_table(source: str, rows: int, head_dim: int) -> WeightSpec:
    """Table rows as FP8 records, codes then scales, so that one gather reads a row."""
    shape = (rows, head_dim + head_dim // QUANT_TILE)
    return WeightSpec(
        shape,
        _UINT8,
        lambda ckpt, _: torch.cat([ckpt.get(f"{source}.weight"), ckpt.get(f"{source}.scale")], dim=1),
    )


def _constant(shape: tuple[int, ...], field: str, layer_index: int | None = None) -> WeightSpec:
    def build(_: Checkpoint, tables: EngramTables | None) -> Tensor:
        values = torch.from_numpy(getattr(tables, field))
        return values if layer_index is None else values[layer_index].clone()

    return WeightSpec(shape, _INT64, build)


def _engram(c: ModelConfig, layer: int) -> Iterator[_Named]:
    stem, index = f"layers.{layer}.engram", c.engram_layer_ids.index(layer)
    yield f"{stem}.embed", _record_table(f"{stem}.embed", c.engram_rows(layer), c.engram_head_dim)
    columns = c.engram_columns
    yield from _dense(
        c, f"{stem}.wkv", f"{stem}.wkv", 1, (c.hc_mult + 1) * c.hidden_size, columns * c.engram_head_dim
    )
    yield (
        f"{stem}.qk_weight",
        WeightSpec(
            (c.hc_mult, c.hidden_size),
            _F32,
            lambda ckpt, _: ckpt.get(f"{stem}.q_weight").float() * ckpt.get(f"{stem}.k_weight").float(),
        ),
    )
    yield f"{stem}.multipliers", _constant((c.engram_max_ngram_size,), "multipliers", index)
    yield f"{stem}.primes", _constant((columns,), "primes", index)
    yield f"{stem}.offsets", _constant((columns,), "offsets", index)


def _layer(c: ModelConfig, layer: int) -> Iterator[_Named]:
    stem = f"layers.{layer}"
    for part in ("attn", "ffn"):
        yield f"{stem}.{part}_norm", _copy(f"{stem}.{part}_norm.weight", (c.hidden_size,), _F32)
        for name, shape in (
            (f"{stem}.hc_{part}_fn", (c.hc_mix_size, c.hc_mult * c.hidden_size)),
            (f"{stem}.hc_{part}_base", (c.hc_mix_size,)),
            (f"{stem}.hc_{part}_scale", (3,)),
        ):
            yield name, _copy(name, shape, _F32)
    yield from _attention(c, layer)
    yield from _experts(c, layer)
    if c.has_engram(layer):
        yield from _engram(c, layer)


def _head_mix(c: ModelConfig) -> Iterator[_Named]:
    """The learned collapse before the head, as a mix whose `pre` it is; post and comb are of no use."""

    def padded(source: str, shape: tuple[int, ...]) -> WeightSpec:
        def build(checkpoint: Checkpoint, _: EngramTables | None) -> Tensor:
            given = checkpoint.get(source)
            return torch.cat((given, given.new_zeros(shape[0] - given.shape[0], *shape[1:])))

        return WeightSpec(shape, _F32, build)

    yield "hc_head_fn", padded("hc_head_fn", (c.hc_mix_size, c.hc_mult * c.hidden_size))
    yield "hc_head_base", padded("hc_head_base", (c.hc_mix_size,))
    yield "hc_head_scale", padded("hc_head_scale", (3,))


def _all_weights(c: ModelConfig) -> Iterator[_Named]:
    matrix = (c.vocab_size, c.hidden_size)
    yield "embed", _copy("embed.weight", matrix, _BF16)
    if c.engram_enabled:
        yield "engram.token_map", _constant((c.vocab_size,), "token_map")
    for layer in range(c.num_hidden_layers):
        yield from _layer(c, layer)
    if not c.generation.delayed_collapse:
        yield from _head_mix(c)
    yield "norm", _copy("norm.weight", (c.hidden_size,), _F32)
    yield "head", _copy("head.weight", matrix, _BF16)


def weight_specs(config: ModelConfig) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every tensor of the store, in order, without reading weights."""
    return {name: (spec.shape, spec.dtype) for name, spec in _all_weights(config)}


def weight_loaders(checkpoint: Checkpoint) -> dict[str, Callable[[], Tensor]]:
    """A function per tensor of the store that makes it, in order: a writer need not hold the store whole.

    Raises TokenizerError or ConfigError when the constants of the n-gram hash cannot be derived.
    """
    tables = build_engram_tables(checkpoint.model_dir, checkpoint.config)

    def load(name: str, spec: WeightSpec) -> Tensor:
        tensor = spec.build(checkpoint, tables)
        assert tuple(tensor.shape) == spec.shape and tensor.dtype == spec.dtype, name
        return tensor

    return {name: partial(load, name, spec) for name, spec in _all_weights(checkpoint.config)}


def build_weight_store(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """All tensors the step functions use, by name, in the order of `weight_specs`.

    Tensors whose layout equals the checkpoint's are read-only views of its files. Raises TokenizerError or
    ConfigError when the constants of the n-gram hash cannot be derived.
    """
    return {name: load() for name, load in weight_loaders(checkpoint).items()}
