"""Reading config.json: strict, by exact model type, refusing whatever would change the maths unseen.

Owns which keys are read, which are skipped and which values ask for something that is not implemented.
Nested (`text_config`) and flat files give the same ModelConfig. The vendor's inference_config.json and code
files in the directory are not looked at.
"""

import dataclasses
import logging
from pathlib import Path
from typing import Any, NoReturn

from deepinfer.errors import ConfigError, UnsupportedModelError
from deepinfer.graphs.config_rules import check_rules
from deepinfer.graphs.config_schema import MODEL_TYPE, TEXT_MODEL_TYPE, ModelConfig, RopeScaling
from deepinfer.graphs.strict_json import printable, read_json_object

__all__ = ["MAX_CONFIG_BYTES", "ModelConfig", "RopeScaling", "load_config", "parse_config"]

MAX_CONFIG_BYTES = 1 << 20
_RESTORE = "use the config.json released with the weights"

# Keys that say nothing about the text model's arithmetic.
_IGNORED = frozenset(
    {
        "architectures", "transformers_version", "use_cache", "initializer_range", "vision_config",
        "auto_map", "_name_or_path", "id2label", "label2id", "problem_type", "tokenizer_class", "return_dict",
        "output_attentions", "output_hidden_states", "chunk_size_feed_forward",
        "image_start_token_id", "image_end_token_id", "image_newline_token_id",
        # the drafter's own shape: its tensors are skipped, only its tap layers matter here
        "dspark_block_size", "dspark_noise_token_id", "dspark_markov_rank",
        "dspark_n_routed_experts", "dspark_n_activated_experts",
    }
)  # fmt: skip

# Keys that may be absent, and the values under which they change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "dtype": (None, "bfloat16"),
    "torch_dtype": (None, "bfloat16"),
    "attention_bias": (False,),
    "tie_word_embeddings": (False,),
    "attention_dropout": (None, 0, 0.0),
    "n_group": (None, 1),
    "topk_group": (None, 1),
    "num_hash_layers": (None, 0),
    "gate_temp": (None, 1, 1.0),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "hc_pre_from_prev_sublayer": (True,),
    "q_head_norm": (False,),
    "expert_dtype": ("fp4",),
}

# Keys that must be present, and the one value that is implemented.
_REQUIRED: dict[str, Any] = {
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "num_key_value_heads": 1,
}

_QUANTIZATION: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}
_QUANTIZATION_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "fmt": (None, "e4m3"),
    "modules_to_not_convert": (None, []),
}


def _where(key: str) -> str:
    return f"config.json {printable(key)}"


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _same(value: Any, wanted: Any) -> bool:
    """Equality without True == 1."""
    return value == wanted and isinstance(value, bool) == isinstance(wanted, bool)


def _unsupported(key: str, value: Any, allowed: Any) -> NoReturn:
    raise UnsupportedModelError(
        f"{_show(value)} is not implemented; supported: {_show(allowed)}",
        where=_where(key),
        action="use a model that this version supports",
    )


# ---- single fields --------------------------------------------------------------------------------------


def _int(key: str, value: Any, minimum: int, maximum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{_show(value)} must be an integer", where=_where(key), action=_RESTORE)
    if not minimum <= value <= maximum:
        raise ConfigError(
            f"{_show(value)} must be between {minimum} and {maximum}", where=_where(key), action=_RESTORE
        )
    return value


def _float(key: str, value: Any, maximum: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{_show(value)} must be a number", where=_where(key), action=_RESTORE)
    if not 0 < value <= maximum:  # false for NaN and infinity too
        raise ConfigError(
            f"{_show(value)} must be above 0 and at most {maximum:g}", where=_where(key), action=_RESTORE
        )
    return float(value)


def _ints(key: str, value: Any, minimum: int, maximum: int) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ConfigError(f"{_show(value)} must be a list of integers", where=_where(key), action=_RESTORE)
    return tuple(_int(f"{key}[{i}]", item, minimum, maximum) for i, item in enumerate(value))


def _parse_field(key: str, value: Any, meta: Any) -> Any:
    match meta["kind"]:
        case "int":
            return _int(key, value, meta["min"], meta["max"])
        case "optional_int":
            return None if value is None else _int(key, value, meta["min"], meta["max"])
        case "float":
            return _float(key, value, meta["max"])
        case "ints":
            return _ints(key, value, meta["min"], meta["max"])
        case "bool":
            if not isinstance(value, bool):
                raise ConfigError(f"{_show(value)} must be true or false", where=_where(key), action=_RESTORE)
            return value
        case "choice":
            if value not in meta["choices"]:
                _unsupported(key, value, list(meta["choices"]))
            return value
        case "rope":
            return _parse_rope(key, value)
    raise AssertionError(meta)


def _object(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{_show(value)} must be an object", where=_where(key), action=_RESTORE)
    return dict(value)


def _parse_group(cls: type, prefix: str, values: dict[str, Any]) -> dict[str, Any]:
    """Take the fields of dataclass `cls` out of `values`; what is left there was not understood."""
    parsed = {}
    for field in dataclasses.fields(cls):
        if field.metadata["kind"] == "notes":
            continue
        if field.name in values:
            parsed[field.name] = _parse_field(prefix + field.name, values.pop(field.name), field.metadata)
        elif field.default is dataclasses.MISSING:
            raise ConfigError("the field is missing", where=_where(prefix + field.name), action=_RESTORE)
    return parsed


def _parse_rope(key: str, value: Any) -> RopeScaling:
    values = _object(key, value)
    if "type" in values:  # older spelling of rope_type
        legacy = values.pop("type")
        if values.setdefault("rope_type", legacy) != legacy:
            raise ConfigError("rope_type and type differ", where=_where(key), action=_RESTORE)
    scaling = RopeScaling(**_parse_group(RopeScaling, f"{key}.", values))
    for unknown in values:
        _unknown(f"{key}.{unknown}")
    return scaling


# ---- the whole file -------------------------------------------------------------------------------------


def _unknown(key: str) -> NoReturn:
    raise UnsupportedModelError(
        "this key is not known and may change the model's arithmetic",
        where=_where(key),
        action="remove it only if you know that it does not",
    )


def _flatten(raw: dict[str, Any]) -> dict[str, Any]:
    """One flat object: the keys of `text_config` beside those of the top level; a real clash is refused."""
    values = {key: value for key, value in raw.items() if key not in ("text_config", "model_type")}
    model_type = raw.get("model_type")
    if model_type != MODEL_TYPE:
        raise UnsupportedModelError(
            f"model type {_show(model_type)} is not supported; supported: {MODEL_TYPE}",
            where=_where("model_type"),
            action="convert another model, or wait for its family to be added",
        )
    if "text_config" not in raw:
        return values
    text = _object("text_config", raw["text_config"])
    text_type = text.pop("model_type", TEXT_MODEL_TYPE)
    if text_type != TEXT_MODEL_TYPE:
        _unsupported("text_config.model_type", text_type, TEXT_MODEL_TYPE)
    for key, value in text.items():
        if key in values and key not in _IGNORED and not _same(values[key], value):
            raise ConfigError(
                f"{_show(values[key])} at the top level, {_show(value)} in text_config",
                where=_where(key),
                action=_RESTORE,
            )
        values.setdefault(key, value)
    return values


def _check_quantization(value: Any) -> None:
    values = _object("quantization_config", value)
    for key, wanted in _QUANTIZATION.items():
        name = f"quantization_config.{key}"
        if key not in values:
            raise ConfigError("the field is missing", where=_where(name), action=_RESTORE)
        if not _same(values.pop(key), wanted):
            _unsupported(name, value[key], wanted)
    for key, found in values.items():
        name = f"quantization_config.{key}"
        if key not in _QUANTIZATION_NEUTRAL:
            _unknown(name)
        if not any(_same(found, allowed) for allowed in _QUANTIZATION_NEUTRAL[key]):
            _unsupported(name, found, list(_QUANTIZATION_NEUTRAL[key]))


def _check_fixed_values(values: dict[str, Any]) -> None:
    """Take the keys that have one implemented value out of `values`."""
    for key, wanted in _REQUIRED.items():
        if key not in values:
            raise ConfigError("the field is missing", where=_where(key), action=_RESTORE)
        found = values.pop(key)
        if not _same(found, wanted):
            _unsupported(key, found, wanted)
    for key, allowed in _NEUTRAL.items():
        if key in values:
            found = values.pop(key)
            if not any(_same(found, value) for value in allowed):
                _unsupported(key, found, list(allowed))
    if "quantization_config" not in values:
        raise ConfigError("the field is missing", where=_where("quantization_config"), action=_RESTORE)
    _check_quantization(values.pop("quantization_config"))


def _normalise_spelling(values: dict[str, Any]) -> None:
    """Bring accepted variants of a field into its one form."""
    if "rope_parameters" in values:  # name under which newer transformers store rope_scaling
        parameters = values.pop("rope_parameters")
        if values.setdefault("rope_scaling", parameters) != parameters:
            raise ConfigError(
                "rope_parameters and rope_scaling differ", where=_where("rope_scaling"), action=_RESTORE
            )
    eos = values.pop("eos_token_id", None)
    values["eos_token_ids"] = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if values.get("n_shared_experts", 1) != 1 and not isinstance(values["n_shared_experts"], bool):
        _unsupported("n_shared_experts", values["n_shared_experts"], 1)
    ratios, layers = values.get("compress_ratios"), values.get("num_hidden_layers")
    if isinstance(ratios, list) and isinstance(layers, int) and 0 < layers < len(ratios):
        drafter = _ints("compress_ratios", ratios, 0, 2)[layers:]  # entries after the backbone's
        values["compress_ratios"] = ratios[: len(ratios) - len(drafter)]


def parse_config(raw: dict[str, Any]) -> ModelConfig:
    """Make a checked ModelConfig of the parsed content of a config.json.

    Raises UnsupportedModelError for another model type, unknown keys and values that ask for arithmetic that
    is not implemented; ConfigError for missing, malformed or inconsistent fields (spec model.md 1, 17).
    """
    values = _flatten(raw)
    if "eos_token_ids" in values:
        _unknown("eos_token_ids")
    _check_fixed_values(values)
    _normalise_spelling(values)
    parsed = _parse_group(ModelConfig, "", values)
    for key in values:
        if key not in _IGNORED:
            _unknown(key)
    config = ModelConfig(**parsed, ignored_keys=tuple(sorted(values)))
    check_rules(config)
    return config


def load_config(model_dir: str | Path) -> ModelConfig:
    """Read and check `model_dir`/config.json; see `parse_config` for the errors raised."""
    path = Path(model_dir) / "config.json"
    if not path.is_file():
        raise ConfigError(
            "the file is missing",
            where="config.json",
            action="point at a directory with config.json and weights",
        )
    config = parse_config(read_json_object(path, MAX_CONFIG_BYTES, ConfigError))
    if "auto_map" in config.ignored_keys:
        logging.getLogger("deepinfer").warning("config.json auto_map is ignored: model code is never run")
    return config
