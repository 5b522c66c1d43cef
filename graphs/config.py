"""Reading config.json: strict, by exact model type, refusing whatever would change the maths unseen.

Owns which keys are read, which are skipped and which values ask for something that is not implemented.
Nested (`text_config`) and flat files give the same ModelConfig. The vendor's inference_config.json and code
files in the directory are not looked at.
"""

import logging
from pathlib import Path
from typing import Any

from deepinfer.errors import ConfigError, UnsupportedModelError
from deepinfer.graphs import config_v4
from deepinfer.graphs.config_fields import (
    RESTORE,
    integers,
    object_of,
    parse_group,
    same,
    show,
    unknown_key,
    unsupported,
    where_of,
)
from deepinfer.graphs.config_rules import check_rules
from deepinfer.graphs.config_schema import ModelConfig, RopeScaling
from deepinfer.graphs.generations import GENERATIONS, V4, V41, Generation
from deepinfer.graphs.strict_json import read_json_object

__all__ = ["MAX_CONFIG_BYTES", "ModelConfig", "RopeScaling", "load_config", "parse_config"]

MAX_CONFIG_BYTES = 1 << 20

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
        # of training
        "output_router_logits", "router_aux_loss_coef", "router_jitter_noise",
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
    "gate_temp": (None, 1, 1.0),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "mlp_bias": (None, False),
    "expert_dtype": ("fp4",),
}
_NEUTRAL_OF: dict[str, dict[str, tuple[Any, ...]]] = {
    V41.model_type: {
        "num_hash_layers": (None, 0),
        "hc_pre_from_prev_sublayer": (True,),
        "q_head_norm": (False,),
    },
    V4.model_type: {
        "topk_method": (None, "noaux_tc"),
        "hc_pre_from_prev_sublayer": (False,),
        "q_head_norm": (True,),
    },
}

# Keys that must be present, and the one value that is implemented.
_REQUIRED: dict[str, Any] = {
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "num_key_value_heads": 1,
}
_REQUIRED_OF: dict[str, dict[str, Any]] = {
    V41.model_type: {"topk_method": "noaux_tc"},
    V4.model_type: {},
}

_QUANTIZATION: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "scale_fmt": "ue8m0",
}
_QUANTIZATION_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "fmt": (None, "e4m3"),
    "modules_to_not_convert": (None, []),
}


# ---- the whole file -------------------------------------------------------------------------------------


def _generation(raw: dict[str, Any]) -> Generation:
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in GENERATIONS:
        raise UnsupportedModelError(
            f"model type {show(model_type)} is not supported; supported: {', '.join(GENERATIONS)}",
            where=where_of("model_type"),
            action="convert another model, or wait for its family to be added",
        )
    return GENERATIONS[model_type]


def _flatten(raw: dict[str, Any], generation: Generation) -> dict[str, Any]:
    """One flat object: the keys of `text_config` beside those of the top level; a real clash is refused."""
    values = {key: value for key, value in raw.items() if key not in ("text_config", "model_type")}
    if "text_config" not in raw:
        return values
    if generation.text_model_type is None:
        unknown_key("text_config")
    text = object_of("text_config", raw["text_config"])
    text_type = text.pop("model_type", generation.text_model_type)
    if text_type != generation.text_model_type:
        unsupported("text_config.model_type", text_type, generation.text_model_type)
    for key, value in text.items():
        if key in values and key not in _IGNORED and not same(values[key], value):
            raise ConfigError(
                f"{show(values[key])} at the top level, {show(value)} in text_config",
                where=where_of(key),
                action=RESTORE,
            )
        values.setdefault(key, value)
    return values


def _check_quantization(value: Any, generation: Generation, experts: Any) -> None:
    """`experts` is what the top level says of the experts' format, or None."""
    values = object_of("quantization_config", value)
    wanted = {**_QUANTIZATION, "weight_block_size": [generation.tile] * 2, "expert_dtype": "fp4"}
    if generation is V4 and experts is not None:
        values.setdefault("expert_dtype", experts)
    for key, allowed in wanted.items():
        name = f"quantization_config.{key}"
        if key not in values:
            raise ConfigError("the field is missing", where=where_of(name), action=RESTORE)
        if not same(found := values.pop(key), allowed):
            unsupported(name, found, allowed)
    for key, found in values.items():
        name = f"quantization_config.{key}"
        if key not in _QUANTIZATION_NEUTRAL:
            unknown_key(name)
        if not any(same(found, allowed) for allowed in _QUANTIZATION_NEUTRAL[key]):
            unsupported(name, found, list(_QUANTIZATION_NEUTRAL[key]))


def _check_fixed_values(values: dict[str, Any], generation: Generation) -> bool:
    """Take the keys of one implemented value out of `values`; returns whether weights are quantised."""
    for key, wanted in {**_REQUIRED, **_REQUIRED_OF[generation.model_type]}.items():
        if key not in values:
            raise ConfigError("the field is missing", where=where_of(key), action=RESTORE)
        found = values.pop(key)
        if not same(found, wanted):
            unsupported(key, found, wanted)
    experts = values.get("expert_dtype")
    for key, allowed in {**_NEUTRAL, **_NEUTRAL_OF[generation.model_type]}.items():
        if key in values:
            found = values.pop(key)
            if not any(same(found, value) for value in allowed):
                unsupported(key, found, list(allowed))
    if "quantization_config" not in values:
        if generation.plain_weights:
            return False
        raise ConfigError("the field is missing", where=where_of("quantization_config"), action=RESTORE)
    _check_quantization(values.pop("quantization_config"), generation, experts)
    return True


def _normalise_spelling(values: dict[str, Any], generation: Generation) -> None:
    """Bring accepted variants of a field into its one form."""
    if "rope_parameters" in values:  # name under which newer transformers store rope_scaling
        parameters = values.pop("rope_parameters")
        if values.setdefault("rope_scaling", parameters) != parameters:
            raise ConfigError(
                "rope_parameters and rope_scaling differ", where=where_of("rope_scaling"), action=RESTORE
            )
    eos = values.pop("eos_token_id", None)
    values["eos_token_ids"] = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if values.get("n_shared_experts", 1) != 1 and not isinstance(values["n_shared_experts"], bool):
        unsupported("n_shared_experts", values["n_shared_experts"], 1)
    ratios, layers = values.get("compress_ratios"), values.get("num_hidden_layers")
    if isinstance(ratios, list) and isinstance(layers, int) and 0 < layers < len(ratios):
        drafter = integers("compress_ratios", ratios, 0, max(generation.ratios))[
            layers:
        ]  # entries after the backbone's
        values["compress_ratios"] = ratios[: len(ratios) - len(drafter)]


def parse_config(raw: dict[str, Any]) -> ModelConfig:
    """Make a checked ModelConfig of the parsed content of a config.json.

    Raises UnsupportedModelError for another model type, unknown keys and values that ask for arithmetic that
    is not implemented; ConfigError for missing, malformed or inconsistent fields (spec model.md 1, 17).
    """
    generation = _generation(raw)
    values = _flatten(raw, generation)
    if "eos_token_ids" in values:
        unknown_key("eos_token_ids")
    quantized = _check_fixed_values(values, generation)
    if generation is V4:
        config_v4.refuse_foreign_keys(values)
        config_v4.vendor_spelling(values)
    _normalise_spelling(values, generation)
    if generation is V4:
        config_v4.derive_sources(values)
    parsed = parse_group(ModelConfig, "", values)
    for key in values:
        if key not in _IGNORED:
            unknown_key(key)
    config = ModelConfig(
        **parsed,
        model_type=generation.model_type,
        quantized_weights=quantized,
        ignored_keys=tuple(sorted(values)),
    )
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
