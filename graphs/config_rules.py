"""Rules between the fields of a model config; each broken rule has its own message.

Owns spec model.md 1.3 (schedule) and 17 (divisibility). Ranges of single fields are the parser's.
"""

from typing import Any, NoReturn

from deepinfer.errors import ConfigError
from deepinfer.graphs.config_schema import QUANT_TILE, ModelConfig


def _refuse(field: str, what: str) -> NoReturn:
    raise ConfigError(
        what, where=f"config.json {field}", action="use the config.json released with the weights"
    )


def _check_ascending(config: ModelConfig, field: str) -> None:
    layers = getattr(config, field)
    if any(a >= b for a, b in zip(layers, layers[1:], strict=False)):
        _refuse(field, f"{list(layers)} must be strictly ascending")
    outside = [layer for layer in layers if layer >= config.num_hidden_layers]
    if outside:
        _refuse(field, f"layer {outside[0]} does not exist: num_hidden_layers is {config.num_hidden_layers}")


def _check_multiple(field: str, expression: str, value: int, unit: int, why: str) -> None:
    if value % unit:
        _refuse(field, f"{expression} = {value} must be a multiple of {unit} ({why})")


def _check_token_ids(config: ModelConfig) -> None:
    ids: dict[str, Any] = {
        "bos_token_id": config.bos_token_id,
        "pad_token_id": config.pad_token_id,
        "image_token_id": config.image_token_id,
    }
    ids |= {f"eos_token_id[{i}]": token for i, token in enumerate(config.eos_token_ids)}
    if config.engram_enabled:
        ids["engram_pad_token_id"] = config.engram_pad_token_id
    for field, token in ids.items():
        if token is not None and token >= config.vocab_size:
            _refuse(field, f"{token} must be below vocab_size = {config.vocab_size}")


def _check_sources(config: ModelConfig) -> None:
    for field in ("kv_source_layer_ids", "index_source_layer_ids", "dspark_target_layer_ids"):
        _check_ascending(config, field)
    for field in ("kv_source_layer_ids", "index_source_layer_ids"):
        for layer in getattr(config, field):
            if config.ratio(layer) == 0:
                _refuse(field, f"layer {layer} has compress ratio 0, a source needs a ratio above 0")
    for layer in config.kv_source_layer_ids:
        if not config.generation.biased_compression and not config.is_index_source(layer):
            _refuse("kv_source_layer_ids", f"layer {layer} must also be in index_source_layer_ids")
    for layer in config.index_source_layer_ids:
        if not config.kv_source_layer_ids or layer < config.kv_source_layer_ids[0]:
            _refuse("index_source_layer_ids", f"layer {layer} comes before the first kv source")


def _check_schedule(config: ModelConfig) -> None:
    allowed = config.generation.ratios
    bad = [r for r in config.compress_ratios if r not in allowed]
    if bad:
        _refuse("compress_ratios", f"ratio {bad[0]} is not one of {', '.join(map(str, sorted(allowed)))}")
    _check_sources(config)
    for layer in range(config.num_hidden_layers):
        if config.ratio(layer) == 0:
            continue
        source = config.kv_source(layer)
        if source is None:
            _refuse("kv_source_layer_ids", f"layer {layer} has ratio {config.ratio(layer)} but no kv source")
        if config.ratio(source) != config.ratio(layer):
            _refuse(
                "compress_ratios",
                f"layer {layer} has ratio {config.ratio(layer)}, its kv source {source} has another",
            )


def _check_candidates(config: ModelConfig) -> None:
    source = config.candidate_source_layer_id
    if not config.candidate_enabled:
        return
    if not config.is_kv_source(source):
        _refuse("candidate_source_layer_id", f"layer {source} must be in kv_source_layer_ids")
    for layer in config.index_source_layer_ids:
        if layer > source and config.kv_source(layer) != source:
            _refuse(
                "candidate_source_layer_id",
                f"index source {layer} after it reads kv source {config.kv_source(layer)}, not {source}",
            )
    # A kv source is an index source too, so with this the candidate source is the last kv source.
    for field in ("candidate_topk_blocks", "candidate_block_size"):
        if getattr(config, field) < 1:
            _refuse(field, f"{getattr(config, field)} must be at least 1 when a candidate source is set")
    reach = (config.candidate_topk_blocks - 1) * config.candidate_block_size + 1
    if reach < config.index_topk:
        _refuse(
            "candidate_topk_blocks",
            f"(candidate_topk_blocks - 1) * candidate_block_size + 1 = {reach} must be at least "
            f"index_topk = {config.index_topk}",
        )


def _check_dims(config: ModelConfig) -> None:
    heads, groups = config.num_attention_heads, config.o_groups
    if heads % groups:
        _refuse("o_groups", f"num_attention_heads = {heads} must be a multiple of o_groups = {groups}")
    tile = "side of an FP8 weight tile"
    side = config.generation.tile if config.quantized_weights else QUANT_TILE
    for field in ("hidden_size", "q_lora_rank", "moe_intermediate_size"):
        _check_multiple(field, field, getattr(config, field), side, tile)
    for field in ("head_dim", "index_head_dim"):
        _check_multiple(field, field, getattr(config, field), QUANT_TILE, "group of a cache record")
    # Tiles of wo_a must not straddle two groups. The width of a group is whole heads, hence whole tiles.
    _check_multiple("o_lora_rank", "o_lora_rank", config.o_lora_rank, side, tile)
    rope = config.qk_rope_head_dim
    if rope % 2:
        _refuse("qk_rope_head_dim", f"{rope} must be even: rotation works on pairs")
    for field in ("head_dim", "index_head_dim"):
        if rope > getattr(config, field):
            _refuse("qk_rope_head_dim", f"{rope} must not exceed {field} = {getattr(config, field)}")
    if config.num_experts_per_tok > config.n_routed_experts:
        _refuse(
            "num_experts_per_tok",
            f"{config.num_experts_per_tok} must not exceed n_routed_experts = {config.n_routed_experts}",
        )


def _check_hash_layers(config: ModelConfig) -> None:
    if config.num_hash_layers > config.num_hidden_layers:
        _refuse(
            "num_hash_layers",
            f"{config.num_hash_layers} must not exceed num_hidden_layers = {config.num_hidden_layers}",
        )


def _check_engram(config: ModelConfig) -> None:
    _check_ascending(config, "engram_layer_ids")
    layers, rows = config.engram_layer_ids, config.engram_num_embeddings
    if len(layers) != len(rows):
        _refuse("engram_num_embeddings", f"{len(rows)} tables for {len(layers)} layers in engram_layer_ids")
    if not config.engram_enabled:
        return
    late = [layer for layer in layers if layer >= config.cut]
    if late:
        _refuse("engram_layer_ids", f"layer {late[0]} must come before the last kv source, {config.cut}")
    lower_bounds = {
        "engram_max_ngram_size": 2,
        "engram_n_heads": 1,
        "engram_vocab_size": 2,
        "engram_compressed_vocab_size": 1,
        "engram_head_dim": 1,
    }
    for field, minimum in lower_bounds.items():
        if getattr(config, field) < minimum:
            _refuse(field, f"{getattr(config, field)} must be at least {minimum} when Engram layers are set")
    _check_multiple(
        "engram_head_dim", "engram_head_dim", config.engram_head_dim, QUANT_TILE, "group of a table row"
    )
    if config.engram_compressed_vocab_size > config.vocab_size:
        _refuse(
            "engram_compressed_vocab_size",
            f"{config.engram_compressed_vocab_size} must not exceed vocab_size = {config.vocab_size}",
        )


def check_rules(config: ModelConfig) -> None:
    """Check every rule between fields; raises ConfigError naming the field, its value and the rule."""
    if len(config.compress_ratios) != config.num_hidden_layers:
        _refuse(
            "compress_ratios",
            f"{len(config.compress_ratios)} ratios for num_hidden_layers = {config.num_hidden_layers}",
        )
    _check_schedule(config)
    _check_candidates(config)
    _check_dims(config)
    _check_hash_layers(config)
    _check_engram(config)
    _check_token_ids(config)
    scaling = config.rope_scaling
    if scaling.beta_fast <= scaling.beta_slow:
        _refuse(
            "rope_scaling", f"beta_fast = {scaling.beta_fast} must exceed beta_slow = {scaling.beta_slow}"
        )
    if scaling.factor < 1:
        _refuse("rope_scaling", f"factor = {scaling.factor} must be at least 1")
