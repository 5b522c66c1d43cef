"""The tensors a checkpoint of a given config holds: names, shapes and storage dtypes (spec model.md 13.1).

Owns names as they are on disk. Knows nothing about files.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from deepinfer.graphs.config_schema import QUANT_TILE, ModelConfig

# Parts of a checkpoint that the text model does not use: drafter, vision tower, its adapter.
SKIPPED_PREFIXES = ("mtp.", "vision.", "aligner.", "image_")


@dataclass(frozen=True)
class TensorSpec:
    """Shape and allowed safetensors dtypes of one stored tensor."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]


_FP8 = ("F8_E4M3",)
_SCALE = ("F8_E8M0",)
_FP4 = ("I8",)  # two E2M1 codes per byte, no integers
_BF16 = ("BF16",)
_F32 = ("F32",)
_NORM = ("BF16", "F32")
_IDS = ("I64", "I32")

_Entry = tuple[str, TensorSpec]


def is_skipped(name: str) -> bool:
    """Whether a tensor belongs to a part of the checkpoint that is knowingly not read."""
    return name.startswith(SKIPPED_PREFIXES)


def _dense(c: ModelConfig, stem: str, rows: int, columns: int) -> Iterator[_Entry]:
    """A matrix in FP8 with one scale per square tile, or in bfloat16."""
    if not c.quantized_weights:
        yield f"{stem}.weight", TensorSpec((rows, columns), _BF16)
        return
    tile = c.generation.tile
    yield f"{stem}.weight", TensorSpec((rows, columns), _FP8)
    yield f"{stem}.scale", TensorSpec((-(-rows // tile), -(-columns // tile)), _SCALE)


def _expert(c: ModelConfig, stem: str, rows: int, columns: int) -> Iterator[_Entry]:
    """A matrix in FP4 with one scale per row and 32 columns, or in bfloat16."""
    if not c.quantized_weights:
        yield f"{stem}.weight", TensorSpec((rows, columns), _BF16)
        return
    yield f"{stem}.weight", TensorSpec((rows, columns // 2), _FP4)
    yield f"{stem}.scale", TensorSpec((rows, columns // QUANT_TILE), _SCALE)


def _compression(c: ModelConfig, stem: str, layer: int, size: int) -> Iterator[_Entry]:
    """Projections and norm of entries of `size` values; with overlap a row has a part in two entries."""
    width = size * (2 if c.overlaps(layer) else 1)
    projection = TensorSpec((width, c.hidden_size), _BF16)
    yield f"{stem}.wkv.weight", projection
    if c.ratio(layer) > 1:
        yield f"{stem}.wgate.weight", projection
    if c.generation.biased_compression:
        yield f"{stem}.ape", TensorSpec((c.ratio(layer), width), _F32)
    yield f"{stem}.norm.weight", TensorSpec((size,), _NORM)


def _attention(c: ModelConfig, layer: int) -> Iterator[_Entry]:
    stem = f"layers.{layer}.attn"
    yield from _dense(c, f"{stem}.wq_a", c.q_lora_rank, c.hidden_size)
    yield f"{stem}.q_norm.weight", TensorSpec((c.q_lora_rank,), _NORM)
    yield from _dense(c, f"{stem}.wq_b", c.attention_width, c.q_lora_rank)
    yield from _dense(c, f"{stem}.wkv", c.head_dim, c.hidden_size)
    yield f"{stem}.kv_norm.weight", TensorSpec((c.head_dim,), _NORM)
    yield from _dense(c, f"{stem}.wo_a", c.o_groups * c.o_lora_rank, c.o_group_width)
    yield from _dense(c, f"{stem}.wo_b", c.hidden_size, c.o_groups * c.o_lora_rank)
    yield f"{stem}.attn_sink", TensorSpec((c.num_attention_heads,), _F32)
    if c.is_kv_source(layer):
        yield from _compression(c, f"{stem}.compressor", layer, c.head_dim)
    if c.is_index_source(layer):
        yield from _dense(c, f"{stem}.indexer.wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank)
        yield f"{stem}.indexer.weights_proj.weight", TensorSpec((c.index_n_heads, c.hidden_size), _BF16)
        if c.generation.biased_compression:
            yield from _compression(c, f"{stem}.indexer.compressor", layer, c.index_head_dim)
        elif c.is_kv_source(layer):
            yield f"{stem}.indexer.wk.weight", TensorSpec((c.index_head_dim, c.head_dim), _BF16)
            yield f"{stem}.indexer.k_norm.weight", TensorSpec((c.index_head_dim,), _NORM)


def _experts(c: ModelConfig, layer: int) -> Iterator[_Entry]:
    stem, width, inner = f"layers.{layer}.ffn", c.hidden_size, c.moe_intermediate_size
    yield f"{stem}.gate.weight", TensorSpec((c.n_routed_experts, width), _BF16)
    if c.is_hash_routed(layer):
        yield f"{stem}.gate.tid2eid", TensorSpec((c.vocab_size, c.num_experts_per_tok), _IDS)
    else:
        yield f"{stem}.gate.bias", TensorSpec((c.n_routed_experts,), _F32)
        if c.generation.image_bias:
            yield f"{stem}.gate.bias_vl", TensorSpec((c.n_routed_experts,), _F32)
    for expert in range(c.n_routed_experts):
        yield from _expert(c, f"{stem}.experts.{expert}.w1", inner, width)
        yield from _expert(c, f"{stem}.experts.{expert}.w3", inner, width)
        yield from _expert(c, f"{stem}.experts.{expert}.w2", width, inner)
    yield from _dense(c, f"{stem}.shared_experts.w1", inner, width)
    yield from _dense(c, f"{stem}.shared_experts.w3", inner, width)
    yield from _dense(c, f"{stem}.shared_experts.w2", width, inner)


def _engram(c: ModelConfig, layer: int) -> Iterator[_Entry]:
    stem, rows = f"layers.{layer}.engram", c.engram_rows(layer)
    yield f"{stem}.embed.weight", TensorSpec((rows, c.engram_head_dim), _FP8)
    yield f"{stem}.embed.scale", TensorSpec((rows, c.engram_head_dim // QUANT_TILE), _SCALE)
    columns = c.engram_columns * c.engram_head_dim
    yield from _dense(c, f"{stem}.wkv", (c.hc_mult + 1) * c.hidden_size, columns)
    for name in ("q_weight", "k_weight"):
        yield f"{stem}.{name}", TensorSpec((c.hc_mult, c.hidden_size), _NORM)


def _layer(c: ModelConfig, layer: int) -> Iterator[_Entry]:
    stem = f"layers.{layer}"
    for sublayer in ("attn", "ffn"):
        yield f"{stem}.{sublayer}_norm.weight", TensorSpec((c.hidden_size,), _NORM)
        yield f"{stem}.hc_{sublayer}_fn", TensorSpec((c.hc_mix_size, c.hc_mult * c.hidden_size), _F32)
        yield f"{stem}.hc_{sublayer}_base", TensorSpec((c.hc_mix_size,), _F32)
        yield f"{stem}.hc_{sublayer}_scale", TensorSpec((3,), _F32)
    yield from _attention(c, layer)
    yield from _experts(c, layer)
    if c.has_engram(layer):
        yield from _engram(c, layer)


def iter_expected_tensors(config: ModelConfig) -> Iterator[tuple[str, TensorSpec]]:
    """Every tensor the text model needs, by its name on disk; lazily, as a config may ask for any number."""
    embedding = TensorSpec((config.vocab_size, config.hidden_size), _BF16)
    yield "embed.weight", embedding
    yield "head.weight", embedding
    yield "norm.weight", TensorSpec((config.hidden_size,), _NORM)
    if not config.generation.delayed_collapse:
        yield "hc_head_fn", TensorSpec((config.hc_mult, config.hc_mult * config.hidden_size), _F32)
        yield "hc_head_base", TensorSpec((config.hc_mult,), _F32)
        yield "hc_head_scale", TensorSpec((1,), _F32)
    for layer in range(config.num_hidden_layers):
        yield from _layer(config, layer)
