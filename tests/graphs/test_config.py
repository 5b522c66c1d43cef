"""Reading config.json: accepted forms, and every kind of refusal."""

import json
import logging
import sys

import pytest
from model_dirs import release_config

from deepinfer.errors import ConfigError, UnsupportedModelError
from deepinfer.graphs.config import MAX_CONFIG_BYTES, load_config, parse_config
from deepinfer.graphs.roles import layer_roles

DELETE = object()


def edited(path: str, value):
    """The released config with one key, `a.b`, set to a value or deleted."""
    raw = release_config()
    *parents, key = path.split(".")
    target = raw
    for parent in parents:
        target = target[parent]
    if value is DELETE:
        del target[key]
    else:
        target[key] = value
    return raw


def flattened(raw: dict) -> dict:
    text = {key: value for key, value in raw["text_config"].items() if key != "model_type"}
    return {key: value for key, value in raw.items() if key != "text_config"} | text


def test_the_golden_config_is_read(golden_dir):
    config = load_config(golden_dir)
    assert (config.hidden_size, config.num_hidden_layers, config.rms_norm_eps) == (128, 8, 1e-20)
    assert config.compress_ratios == (0, 2, 2, 2, 1, 1, 1, 1)
    assert config.rope_scaling.factor == 16.0
    assert config.eos_token_id == 1
    assert config.cut == 4


def test_the_released_schedule_has_the_published_roles():
    names = [role.name for role in layer_roles(parse_config(release_config()))]
    assert names[:2] == ["window_only"] * 2
    assert [layer for layer, name in enumerate(names) if name == "kv_index_source"] == [2, 8, 14]
    assert names[20] == "candidate_source"
    masked = [layer for layer, name in enumerate(names) if name == "candidate_index_source"]
    assert masked == [24, 28, 32, 36]
    assert names.count("consumer_ratio2") == 15
    assert names.count("consumer_ratio1") == 15


def test_sources_of_a_layer_are_the_last_ones_at_or_before_it():
    config = parse_config(release_config())
    assert [config.kv_source(layer) for layer in (0, 2, 7, 8, 19, 20, 39)] == [None, 2, 2, 8, 14, 20, 20]
    assert [config.index_source(layer) for layer in (1, 13, 23, 24, 39)] == [None, 8, 20, 24, 36]
    assert config.has_engram(14)
    assert config.engram_rows(14) == 384016682
    assert config.engram_columns == 24
    assert config.hc_mix_size == 24


def test_ratios_of_draft_layers_are_left_out():
    config = parse_config(release_config())
    assert len(config.compress_ratios) == config.num_hidden_layers == 40


def test_flat_and_nested_files_describe_the_same_model():
    raw = release_config()
    assert parse_config(raw) == parse_config(flattened(raw))


def test_the_canonical_form_does_not_depend_on_spelling_or_skipped_keys():
    raw = release_config()
    other = flattened(raw)
    del other["architectures"]
    other["rope_theta"] = 10000.0
    other["rope_parameters"] = other.pop("rope_scaling")
    first, second = parse_config(raw).to_canonical_dict(), parse_config(other).to_canonical_dict()
    assert json.dumps(first) == json.dumps(second)
    changed = parse_config(edited("text_config.swiglu_limit", 9.0)).to_canonical_dict()
    assert changed != first


def test_left_out_groups_are_off():
    raw = release_config()
    for key in list(raw["text_config"]):
        if key.startswith(("engram_", "candidate_", "dspark_")):
            del raw["text_config"][key]
    config = parse_config(raw)
    assert not config.engram_enabled
    assert not config.candidate_enabled
    assert config.dspark_target_layer_ids == ()
    assert not any(config.uses_candidate_mask(layer) for layer in range(40))


@pytest.mark.parametrize(
    ("value", "ids", "first"), [(1, (1,), 1), ([1, 5], (1, 5), 1), (None, (), None), ([], (), None)]
)
def test_end_of_text_may_be_one_id_a_list_or_none(value, ids, first):
    config = parse_config(edited("eos_token_id", value))
    assert (config.eos_token_ids, config.eos_token_id) == (ids, first)


@pytest.mark.parametrize(
    "model_type",
    ["deepseek_v4_x", "deepseek_v3", "deepseek_v41_x", "deepseek_v41_text", "llama", None, ["x"]],
)
def test_other_model_types_are_refused_with_the_supported_list(model_type):
    with pytest.raises(UnsupportedModelError, match="supported: deepseek_v41"):
        parse_config(edited("model_type", model_type))


def test_another_text_model_type_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"text_config\.model_type"):
        parse_config(edited("text_config.model_type", "deepseek_v4_text"))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("text_config.hidden_act", "gelu"),
        ("text_config.scoring_func", "sigmoid"),
        ("text_config.topk_method", "greedy"),
        ("text_config.num_key_value_heads", 8),
        ("text_config.num_key_value_heads", True),
        ("text_config.n_shared_experts", 2),
        ("text_config.attention_bias", True),
        ("text_config.tie_word_embeddings", True),
        ("text_config.attention_dropout", 0.1),
        ("text_config.n_group", 8),
        ("text_config.topk_group", 4),
        ("text_config.num_hash_layers", 3),
        ("text_config.gate_temp", 0.5),
        ("text_config.rope_scaling.rope_type", "linear"),
        ("text_config.rope_scaling.mscale", 1.0),
        ("text_config.logit_softcap", 30.0),
        ("text_config.layer_types", ["full_attention"]),
        ("text_config.dim", 5120),
        ("rope_type", "default"),
        ("eos_token_ids", [1]),
        ("dtype", "float16"),
        ("torch_dtype", "float32"),
        ("quantization_config.quant_method", "gptq"),
        ("quantization_config.activation_scheme", "static"),
        ("quantization_config.weight_block_size", [128, 128]),
        ("quantization_config.scale_fmt", "float"),
        ("quantization_config.expert_dtype", "nvfp4"),
        ("quantization_config.fmt", "e5m2"),
        ("quantization_config.modules_to_not_convert", ["head"]),
        ("quantization_config.moe_quant_algo", "NVFP4"),
    ],
)
def test_arithmetic_that_is_not_implemented_is_refused_by_name(path, value):
    with pytest.raises(UnsupportedModelError) as caught:
        parse_config(edited(path, value))
    assert path.removeprefix("text_config.") in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("text_config.attention_dropout", 0.0),
        ("text_config.n_group", None),
        ("text_config.num_hash_layers", 0),
        ("quantization_config.fmt", "e4m3"),
        ("transformers_version", "5.24.0"),
        ("text_config.use_cache", True),
        ("text_config.initializer_range", 0.02),
        ("text_config.attention_bias", DELETE),
        ("vision_config", None),
    ],
)
def test_values_that_change_nothing_are_accepted(path, value):
    assert parse_config(edited(path, value)) == parse_config(release_config())


REQUIRED = [
    "vocab_size",
    "num_hidden_layers",
    "hidden_act",
    "scoring_func",
    "topk_method",
    "num_key_value_heads",
    "rms_norm_eps",
    "norm_topk_prob",
    "swiglu_limit",
    "compress_ratios",
    "kv_source_layer_ids",
    "rope_scaling",
    "rope_scaling.factor",
    "hc_mult",
]


@pytest.mark.parametrize("field", REQUIRED)
def test_a_missing_field_is_named(field):
    with pytest.raises(ConfigError, match=rf"{field}: the field is missing"):
        parse_config(edited(f"text_config.{field}", DELETE))


@pytest.mark.parametrize("path", ["quantization_config", "quantization_config.scale_fmt"])
def test_a_missing_quantisation_is_not_guessed(path):
    with pytest.raises(ConfigError, match=rf"{path}: the field is missing"):
        parse_config(edited(path, DELETE))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("hidden_size", True, "must be an integer"),
        ("hidden_size", 5120.0, "must be an integer"),
        ("hidden_size", "5120", "must be an integer"),
        ("hidden_size", None, "must be an integer"),
        ("hidden_size", 0, "must be between"),
        ("hidden_size", -5120, "must be between"),
        ("hidden_size", 10**30, "must be between"),
        ("num_hidden_layers", 10**9, "must be between"),
        ("rms_norm_eps", 0, "must be above 0"),
        ("rms_norm_eps", float("inf"), "must be above 0"),
        ("rope_theta", 10**400, "must be above 0"),
        ("rope_theta", "1e4", "must be a number"),
        ("rope_theta", False, "must be a number"),
        ("norm_topk_prob", 1, "must be true or false"),
        ("compress_ratios", 2, "must be a list"),
        ("compress_ratios", [0.0] * 40, "must be an integer"),
        ("kv_source_layer_ids", [2, True], "must be an integer"),
        ("engram_layer_ids", {"1": 2}, "must be a list"),
        ("candidate_source_layer_id", -2, "must be between"),
        ("rope_scaling", "yarn", "must be an object"),
        ("rope_scaling.factor", "16", "must be a number"),
        ("rope_scaling.type", "linear", "rope_type and type differ"),
        ("rope_parameters", {"rope_type": "yarn"}, "rope_parameters and rope_scaling differ"),
    ],
)
def test_a_malformed_field_is_refused(path, value, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parse_config(edited(f"text_config.{path}", value))
    assert path.split(".")[0].replace("rope_parameters", "rope_scaling") in str(caught.value)


def test_a_field_that_differs_between_the_levels_is_refused():
    with pytest.raises(ConfigError, match="at the top level"):
        parse_config(edited("vocab_size", 7))


def write_config(directory, text: str | bytes):
    directory.joinpath("config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    return directory


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "object was expected"),
        (b"\xff\xfe{}", "not valid JSON"),
        ('{"a": 1, "a": 2}', "appears twice"),
        ('{"text_config": {"hc_mult": 4, "hc_mult": 4}}', "appears twice"),
        ('{"rms_norm_eps": NaN}', "NaN is not JSON"),
        ('{"rms_norm_eps": -Infinity}', "-Infinity is not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' + "1" * 5000 + "}", "not valid JSON"),
        (" " * MAX_CONFIG_BYTES + "{}", "larger than"),
    ],
)
def test_a_file_that_is_no_strict_json_is_refused(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        load_config(write_config(tmp_path, text))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="missing"):
        load_config(tmp_path)


def test_the_vendor_inference_config_is_not_read(tmp_path, golden_dir):
    (tmp_path / "inference_config.json").write_bytes((golden_dir / "inference_config.json").read_bytes())
    with pytest.raises(ConfigError, match="missing"):
        load_config(tmp_path)


def test_code_of_the_model_directory_is_reported_and_never_imported(tmp_path, caplog):
    raw = release_config()
    raw["auto_map"] = {"AutoModelForCausalLM": "modeling_hostile_x.Model"}
    for name in ("modeling_hostile_x.py", "__init__.py", "sitecustomize.py"):
        (tmp_path / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with caplog.at_level(logging.WARNING, logger="deepinfer"):
        config = load_config(write_config(tmp_path, json.dumps(raw)))
    assert "auto_map" in config.ignored_keys
    assert "auto_map is ignored" in caplog.text
    assert "modeling_hostile_x" not in sys.modules
    assert not (tmp_path / "ran").exists()
    assert config == parse_config(release_config())


def test_hostile_text_in_a_message_is_escaped():
    with pytest.raises(UnsupportedModelError) as caught:
        parse_config(edited("\ud800\x1b[31m" + "k" * 10_000, 1))
    assert str(caught.value).isascii()
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 500
