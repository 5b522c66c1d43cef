"""The declared cache: every region's place in a block or a slot, derived from the model config.

Owns names, record shapes, ring lengths, offsets and strides (spec engine.md E.1-E.3). Blocks hold 128 token
positions and are shared by all layers; slots hold a request's rings. Ids start at 1: block 0 and slot 0 take
what padding rows write. Knows nothing about torch or about what a record's bytes mean.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from deepinfer.errors import SettingsError
from deepinfer.graphs.config_schema import QUANT_TILE, ModelConfig

BLOCK_TOKENS = 128
# Positions kept beyond what attention needs, so that up to 5 rejected draft tokens can be taken back (E.2).
ROLLBACK_TOKENS = 6
PRECISION_NAMES = ("native", "float32")
_SLOT_ALIGNMENT = 64
_ITEM_BYTES = {"uint8": 1, "int32": 4, "float32": 4}

RegionKind = Literal["state", "paged"]


@dataclass(frozen=True)
class Region:
    """One kind of record of one layer.

    `entries` per block (paged) or ring length (state); a paged entry covers `tokens_per_entry` positions, a
    state entry one. The record of position p is entry p // tokens_per_entry of the request's blocks, or ring
    entry p mod entries of its slot.
    """

    name: str
    kind: RegionKind
    offset_bytes: int
    entries: int
    record_shape: tuple[int, ...]
    dtype: str
    tokens_per_entry: int = 1

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return _ITEM_BYTES[self.dtype]

    @property
    def record_numel(self) -> int:
        """Elements of one record."""
        return math.prod(self.record_shape)

    @property
    def record_bytes(self) -> int:
        """Bytes of one record."""
        return self.record_numel * self.item_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of the region in one block or slot."""
        return self.entries * self.record_bytes


@dataclass(frozen=True)
class CacheLayout:
    """Two byte arenas, `[num_blocks, block_bytes]` and `[num_slots, slot_bytes]`, and their regions."""

    regions: tuple[Region, ...]
    block_tokens: int
    block_bytes: int
    slot_bytes: int
    num_blocks: int
    num_slots: int
    max_blocks_per_request: int

    def region(self, name: str) -> Region:
        """The region called `name`."""
        return next(region for region in self.regions if region.name == name)

    def of_kind(self, kind: RegionKind) -> tuple[Region, ...]:
        """The regions of one arena, in order."""
        return tuple(region for region in self.regions if region.kind == kind)

    def record_bytes_per_block(self) -> int:
        """Bytes of records in a block, without the padding at its end."""
        return sum(region.total_bytes for region in self.of_kind("paged"))

    def strides(self, region: Region) -> tuple[int, ...]:
        """Strides, in elements, of the view `[blocks or slots, entries, *record_shape]` of its arena."""
        arena = self.block_bytes if region.kind == "paged" else self.slot_bytes
        inner = [math.prod(region.record_shape[i + 1 :]) for i in range(len(region.record_shape))]
        return (arena // region.item_bytes, region.record_numel, *inner)

    def to_dict(self) -> dict[str, Any]:
        """The layout as JSON values."""
        values = asdict(self)
        values["regions"] = [
            {**asdict(region), "record_shape": list(region.record_shape)} for region in self.regions
        ]
        return values


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


@dataclass(frozen=True)
class _Records:
    """Shape and dtype of the records of one precision and generation (spec model.md 12.5)."""

    window: tuple[int, ...]
    compressed: tuple[int, ...]
    index_key: tuple[int, ...]
    dtype: str

    @property
    def block_unit(self) -> int:
        """Unit of the block stride: native records of both sizes tile it, float32 keeps lines whole."""
        return math.lcm(self.compressed[0], self.window[0]) if self.dtype == "uint8" else 64


def _records(config: ModelConfig, precision: str) -> _Records:
    head, key = config.head_dim, config.index_head_dim
    if precision == "float32":
        return _Records((head,), (head,), (key,), "float32")
    index_key = (key // 2 + key // QUANT_TILE,)  # E2M1 pairs, one scale per 32
    if config.generation.biased_compression:  # E4M3 codes, a bfloat16 tail, one scale per 64 codes
        rotated = config.qk_rope_head_dim
        scales = _round_up(-(-(head - rotated) // 64), 8)
        mixed = (head + rotated + scales,)
        return _Records(window=mixed, compressed=mixed, index_key=index_key, dtype="uint8")
    return _Records(
        window=(head + head // QUANT_TILE,),  # E4M3 codes, one scale per 32
        compressed=(head // 2 + head // 16,),  # E2M1 pairs, one scale per 16
        index_key=index_key,
        dtype="uint8",
    )


# What a region is before it has a place: name, kind, entries, record shape, dtype, tokens per entry.
_Declaration = tuple[str, RegionKind, int, tuple[int, ...], str, int]


def _declare(config: ModelConfig, precision: str) -> Iterator[_Declaration]:
    """The regions of every layer in order, then those of the whole model."""
    records = _records(config, precision)
    ring = config.sliding_window + ROLLBACK_TOKENS
    for layer in range(config.num_hidden_layers):
        stem, ratio = f"layers.{layer}", config.ratio(layer)
        yield f"{stem}.window", "state", ring, records.window, records.dtype, 1
        if not config.is_kv_source(layer):
            continue
        entries, overlap = BLOCK_TOKENS // ratio, 2 if config.overlaps(layer) else 1
        # a ring has what entries still to be written need, and what may be taken back
        open_ring = overlap * ratio + ROLLBACK_TOKENS - 1
        yield f"{stem}.compressed_kv", "paged", entries, records.compressed, records.dtype, ratio
        if config.is_index_source(layer):
            yield f"{stem}.index_key", "paged", entries, records.index_key, records.dtype, ratio
        if ratio > 1:  # value and gate of the tokens whose group is still open
            width = 2 * overlap * config.head_dim
            yield f"{stem}.open_group", "state", open_ring, (width,), "float32", 1
        if config.is_index_source(layer) and config.generation.biased_compression:
            width = 2 * overlap * config.index_head_dim
            yield f"{stem}.open_index_group", "state", open_ring, (width,), "float32", 1
    if config.engram_enabled:
        history = config.engram_max_ngram_size - 1 + ROLLBACK_TOKENS
        yield "token_history", "state", history, (1,), "int32", 1


def _place(declarations: Iterator[_Declaration]) -> tuple[tuple[Region, ...], dict[str, int]]:
    """Give every region the next aligned offset of its arena; returns regions and bytes used per arena."""
    used = {"state": 0, "paged": 0}
    regions = []
    for name, kind, entries, shape, dtype, tokens in declarations:
        offset = _round_up(used[kind], _ITEM_BYTES[dtype])
        region = Region(name, kind, offset, entries, shape, dtype, tokens)
        used[kind] = offset + region.total_bytes
        regions.append(region)
    return tuple(regions), used


def _check_limits(config: ModelConfig, max_num_seqs: int, max_model_len: int, num_blocks: int | None) -> None:
    if max_num_seqs < 1:
        raise SettingsError(f"{max_num_seqs} must be at least 1", where="max_num_seqs", action="raise it")
    if not 1 <= max_model_len <= config.max_position_embeddings:
        raise SettingsError(
            f"{max_model_len} must be between 1 and the model's limit, {config.max_position_embeddings}",
            where="max_model_len",
            action="choose a length the model supports",
        )
    needed = 1 + -(-max_model_len // BLOCK_TOKENS)
    if num_blocks is not None and num_blocks < needed:
        raise SettingsError(
            f"{num_blocks} must be at least {needed}: block 0 and a request of {max_model_len} tokens",
            where="num_blocks",
            action="raise num_blocks or lower max_model_len",
        )


def cache_layout(
    config: ModelConfig,
    precision: str,
    max_num_seqs: int,
    max_model_len: int,
    num_blocks: int | None = None,
) -> CacheLayout:
    """Lay out the caches for `max_num_seqs` requests of at most `max_model_len` tokens.

    `num_blocks` defaults to block 0 plus what all requests need at full length. Raises SettingsError for
    limits that cannot work.
    """
    if precision not in PRECISION_NAMES:
        raise SettingsError(
            f"{precision!r} is not a precision", where="precision", action="choose native or float32"
        )
    _check_limits(config, max_num_seqs, max_model_len, num_blocks)
    regions, used = _place(_declare(config, precision))
    unit = _records(config, precision).block_unit
    per_request = -(-max_model_len // BLOCK_TOKENS)
    return CacheLayout(
        regions=regions,
        block_tokens=BLOCK_TOKENS,
        block_bytes=max(_round_up(used["paged"], unit), unit),
        slot_bytes=_round_up(used["state"], _SLOT_ALIGNMENT),
        num_blocks=1 + max_num_seqs * per_request if num_blocks is None else num_blocks,
        num_slots=1 + max_num_seqs,
        max_blocks_per_request=per_request,
    )
