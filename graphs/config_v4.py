"""What a `deepseek_v4` config.json leaves to be derived, and the names transformers gives to some of it.

The vendor's file lists `compress_ratios` and `num_hash_layers`; one that transformers has written describes
the same by types of layers and rates, and nests what belongs to rotations. Every compressed layer is its own
source of keys, and those of few tokens per entry pick from them (spec model.md 16.2).
"""

from typing import Any

from deepinfer.errors import ConfigError
from deepinfer.graphs.config_fields import (
    RESTORE,
    number,
    object_of,
    show,
    unknown_key,
    unsupported,
    where_of,
)
from deepinfer.graphs.generations import OVERLAPPING_RATIO

# parts of the next generation, and what is derived here: a file of this one has none of them
_FOREIGN_PREFIXES = ("engram_", "candidate_", "dspark_")
_FOREIGN = ("kv_source_layer_ids", "index_source_layer_ids", "image_token_id")

_RATES = {"compressed_sparse_attention": OVERLAPPING_RATIO, "heavily_compressed_attention": 128}
_WINDOW_TYPE = "sliding_attention"
_ROTATION_TYPE = ("default", "yarn")
_EXPERT_TYPES = ("hash_moe", "moe")


def refuse_foreign_keys(values: dict[str, Any]) -> None:
    """Raise UnsupportedModelError for a key that only a file of the next generation may have."""
    for key in values:
        if key in _FOREIGN or key.startswith(_FOREIGN_PREFIXES):
            unknown_key(key)


def vendor_spelling(values: dict[str, Any]) -> None:
    """Bring what transformers writes into the vendor's form, in place; what is said twice must agree."""
    _spell_schedule(values)
    _spell_experts(values)
    if isinstance(values.get("rope_parameters"), dict) and "compress" in values["rope_parameters"]:
        _spell_rotations(values)
    if "partial_rotary_factor" in values:
        factor = values.pop("partial_rotary_factor")
        if factor is not None and isinstance(values.get("head_dim"), int):
            share = number("partial_rotary_factor", factor, 1.0)
            _agree(values, "qk_rope_head_dim", int(values["head_dim"] * share), "partial_rotary_factor")


def derive_sources(values: dict[str, Any]) -> None:
    """Add the sources of keys and of picks, which follow from the ratios."""
    ratios = values.get("compress_ratios")
    if isinstance(ratios, list):
        values["kv_source_layer_ids"] = [layer for layer, ratio in enumerate(ratios) if ratio]
        values["index_source_layer_ids"] = [
            layer for layer, ratio in enumerate(ratios) if ratio == OVERLAPPING_RATIO
        ]


def _agree(values: dict[str, Any], key: str, derived: Any, other: str) -> None:
    if values.setdefault(key, derived) != derived:
        raise ConfigError(
            f"{show(values[key])} does not agree with {other}, which asks for {show(derived)}",
            where=where_of(key),
            action=RESTORE,
        )


def _spell_schedule(values: dict[str, Any]) -> None:
    types, rates = values.pop("layer_types", None), values.pop("compress_rates", None)
    if types is None:
        return
    given = {**_RATES, **(object_of("compress_rates", rates) if rates is not None else {})}
    if given["compressed_sparse_attention"] != OVERLAPPING_RATIO or len(given) != len(_RATES):
        unsupported("compress_rates", given, _RATES)
    known = {_WINDOW_TYPE: 0, **given}
    if not isinstance(types, list) or any(not isinstance(each, str) or each not in known for each in types):
        unsupported("layer_types", types, sorted(known))
    ratios = [known[each] for each in types]
    layers = values.get("num_hidden_layers")
    if isinstance(values.get("compress_ratios"), list) and isinstance(layers, int):
        values["compress_ratios"] = values["compress_ratios"][:layers]  # without the drafter's
    _agree(values, "compress_ratios", ratios, "layer_types")


def _spell_experts(values: dict[str, Any]) -> None:
    types = values.pop("mlp_layer_types", None)
    if types is None:
        return
    if not isinstance(types, list) or any(each not in _EXPERT_TYPES for each in types):
        unsupported("mlp_layer_types", types, list(_EXPERT_TYPES))
    hashed = types.count("hash_moe")
    if types[:hashed] != ["hash_moe"] * hashed:
        unsupported("mlp_layer_types", types, "hash_moe in the first layers only")
    _agree(values, "num_hash_layers", hashed, "mlp_layer_types")


def _spell_rotations(values: dict[str, Any]) -> None:
    """Nested parameters: `main` for layers with a window alone, `compress` for the others."""
    nested = object_of("rope_parameters", values.pop("rope_parameters"))
    for label, theta in (("main", "rope_theta"), ("compress", "compress_rope_theta")):
        where = f"rope_parameters.{label}"
        group = object_of(where, nested.pop(label, None))
        kind = group.get("rope_type")
        if kind != _ROTATION_TYPE[label == "compress"]:
            unsupported(f"{where}.rope_type", kind, _ROTATION_TYPE[label == "compress"])
        if group.pop("attention_factor", 1.0) not in (None, 1.0):
            unsupported(f"{where}.attention_factor", "another value", 1.0)
        if "rope_theta" in group:
            _agree(values, theta, group.pop("rope_theta"), where)
        if isinstance(values.get("head_dim"), int) and "partial_rotary_factor" in group:
            share = number(f"{where}.partial_rotary_factor", group.pop("partial_rotary_factor"), 1.0)
            _agree(values, "qk_rope_head_dim", int(values["head_dim"] * share), where)
        if label == "compress":
            _agree(values, "rope_scaling", group, where)
        elif group.keys() - {"rope_type"}:
            unknown_key(f"{where}.{min(group.keys() - {'rope_type'})}")
    for unknown in nested:
        unknown_key(f"rope_parameters.{unknown}")
