"""How many cache blocks a build reserves: as given, for all requests at full length, or by a budget."""

import msgspec

from deepinfer.errors import SettingsError
from deepinfer.graphs.cache_layout import CacheLayout, cache_layout
from deepinfer.graphs.config import ModelConfig
from deepinfer.settings import CompileConfig


def resolve_sizes(options: CompileConfig, config: ModelConfig) -> tuple[CompileConfig, CacheLayout]:
    """The config with every derived value filled in, and the caches it asks for.

    Raises SettingsError for lengths, pools or a budget that cannot serve a single request.
    """
    budget = options.kv_cache_memory_bytes
    options = msgspec.structs.replace(options, kv_cache_memory_bytes=None)
    resolved = options.resolved(max_position_embeddings=config.max_position_embeddings)
    layout = _layout(resolved, config)
    if budget is None:
        return resolved, layout
    slots = layout.num_slots * layout.slot_bytes
    least = 1 + layout.max_blocks_per_request
    blocks = (budget - slots) // layout.block_bytes
    if blocks < least:
        raise SettingsError(
            f"{budget:,} bytes are too few: {slots:,} for {layout.num_slots} slots and "
            f"{least * layout.block_bytes:,} for one request of {resolved.max_model_len} tokens are needed",
            where="compile.kv_cache_memory_bytes",
            action="give more, or lower max_num_seqs or max_model_len",
        )
    assert resolved.num_blocks is not None
    most = resolved.num_blocks  # all requests at full length: more would never be used
    resolved = msgspec.structs.replace(resolved, num_blocks=min(blocks, most))
    return resolved, _layout(resolved, config)


def _layout(options: CompileConfig, config: ModelConfig) -> CacheLayout:
    assert options.max_model_len is not None
    return cache_layout(
        config,
        options.precision,
        max_num_seqs=options.max_num_seqs,
        max_model_len=options.max_model_len,
        num_blocks=options.num_blocks,
    )
