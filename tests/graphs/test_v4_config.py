"""config.json of deepseek_v4: what it derives, what transformers writes, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from model_dirs import release_config
from v4_checkpoint import quantised_config, transformers_config

from deepinfer.errors import ConfigError, UnsupportedModelError
from deepinfer.graphs.cache_layout import cache_layout
from deepinfer.graphs.config import parse_config
from deepinfer.graphs.generations import V4, V41


@pytest.fixture
def raw(v4_golden_dir: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((v4_golden_dir / "config.json").read_text())
    return content


def test_the_golden_config_has_the_schedule_of_its_table(raw):
    config = parse_config(raw)
    assert (config.generation, config.quantized_weights) == (V4, False)
    assert config.compress_ratios == (0, 0, 4, 16, 4, 16)
    assert config.kv_source_layer_ids == (2, 3, 4, 5) and config.index_source_layer_ids == (2, 4)
    assert [config.kv_source(layer) for layer in range(6)] == [None, None, 2, 3, 4, 5]
    assert [config.index_source(layer) for layer in range(6)] == [None, None, 2, None, 4, None]
    assert [config.overlaps(layer) for layer in range(6)] == [False, False, True, False, True, False]
    assert [config.is_hash_routed(layer) for layer in range(6)] == [True, True, False, False, False, False]


def test_the_released_shape_is_accepted(raw):
    """V4-Flash: C4 and C128 in turn, an entry for the drafter, FP8 in blocks of 128, FP4 experts."""
    raw |= {"num_hidden_layers": 43, "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0]}
    raw |= {"hidden_size": 4096, "q_lora_rank": 1024, "o_lora_rank": 1024, "moe_intermediate_size": 2048}
    raw |= {"num_hash_layers": 3, "num_nextn_predict_layers": 1}
    quantised = quantised_config(raw)
    raw |= {key: quantised[key] for key in ("quantization_config", "expert_dtype")}
    del raw["layer_types"], raw["compress_rates"]
    config = parse_config(raw)
    assert config.quantized_weights and config.generation.tile == 128
    assert len(config.kv_source_layer_ids) == 41 and len(config.index_source_layer_ids) == 21


def test_the_declared_caches(raw):
    """C4 keeps its windows' open rows with two halves, C16 as many rows as an entry has; 12.5's records."""
    layout = cache_layout(parse_config(raw), "native", max_num_seqs=1, max_model_len=256)
    regions = {region.name.removeprefix("layers."): region for region in layout.regions}
    assert {name for name in regions if name.startswith("0.")} == {"0.window"}
    assert {name for name in regions if name.startswith("2.")} == {
        f"2.{kind}" for kind in ("window", "compressed_kv", "index_key", "open_group", "open_index_group")
    }
    assert {name for name in regions if name.startswith("3.")} == {
        f"3.{kind}" for kind in ("window", "compressed_kv", "open_group")
    }
    shapes = {name: (region.entries, *region.record_shape) for name, region in regions.items()}
    assert shapes["2.window"] == (16 + 6, 32 + 2 * 32 + 8)
    assert shapes["2.compressed_kv"] == (32, 104) and shapes["3.compressed_kv"] == (8, 104)
    assert shapes["2.index_key"] == (32, 64 // 2 + 64 // 32)
    assert shapes["2.open_group"] == (2 * 4 + 5, 4 * 64) == shapes["2.open_index_group"]
    assert shapes["3.open_group"] == (16 + 5, 2 * 64)
    raw |= {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
    released = cache_layout(parse_config(raw), "native", max_num_seqs=1, max_model_len=256)
    assert released.region("layers.2.window").record_bytes == 584
    assert released.region("layers.3.compressed_kv").record_bytes == 584
    assert released.region("layers.2.index_key").record_bytes == 68


def test_what_transformers_writes_is_the_same_model(raw):
    assert parse_config(transformers_config(raw)) == parse_config(raw)


@pytest.mark.parametrize("model_type", ["deepseek_v4_x", "deepseek_v4_text", "deepseek_v3", "deepseek_v42"])
def test_an_unknown_sibling_is_refused_by_its_exact_name(raw, model_type):
    with pytest.raises(UnsupportedModelError) as caught:
        parse_config(raw | {"model_type": model_type})
    assert f"model type '{model_type}' is not supported" in str(caught.value)
    assert "supported: deepseek_v41, deepseek_v4" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kv_source_layer_ids", [2]),
        ("index_source_layer_ids", [2]),
        ("candidate_source_layer_id", 2),
        ("engram_layer_ids", [1]),
        ("dspark_target_layer_ids", [1]),
        ("text_config", {}),
        ("q_head_norm", False),
        ("hc_pre_from_prev_sublayer", True),
        ("mlp_bias", True),
        ("topk_method", "greedy"),
        ("layer_types", ["full_attention"] * 6),
        ("compress_rates", {"compressed_sparse_attention": 8}),
        ("mlp_layer_types", ["moe"] * 5 + ["hash_moe"]),
    ],
)
def test_what_belongs_to_another_model_is_refused_by_name(raw, key, value):
    with pytest.raises(UnsupportedModelError, match=key):
        parse_config(raw | {key: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compress_ratios": [0, 0, 4, 16, 4, 4]}, "compress_ratios.*layer_types"),
        ({"mlp_layer_types": ["moe"] * 6}, "num_hash_layers.*mlp_layer_types"),
        ({"num_hash_layers": 7}, "must not exceed num_hidden_layers"),
        ({"partial_rotary_factor": 0.25}, "qk_rope_head_dim.*partial_rotary_factor"),
    ],
)
def test_what_is_said_twice_must_agree(raw, changes, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(raw | changes)


def test_a_ratio_that_no_layer_of_the_generation_has_is_refused(raw):
    del raw["layer_types"], raw["compress_rates"]
    for ratio in (1, 2, 3, 256):
        with pytest.raises(ConfigError, match=f"ratio {ratio} is not one of 0, 4, 8"):
            parse_config(raw | {"compress_ratios": [0, 0, 4, 16, 4, ratio]})
    with pytest.raises(ConfigError, match="ratio 4 is not one of 0, 1, 2"):
        content = release_config()
        content["text_config"]["compress_ratios"] = [0, 0] + [4] * 38
        parse_config(content)


def test_tiles_of_the_other_generation_are_refused(raw):
    quantised = quantised_config(raw)
    quantised["quantization_config"]["weight_block_size"] = [32, 32]
    with pytest.raises(UnsupportedModelError, match="weight_block_size"):
        parse_config(quantised)


def test_the_identity_of_either_generation_names_its_own_fields(raw):
    own = parse_config(raw).to_canonical_dict()
    other = parse_config(release_config()).to_canonical_dict()
    assert (own["model_type"], other["model_type"]) == (V4.model_type, V41.model_type)
    assert own.keys() - other.keys() == {"quantized_weights", "num_hash_layers"}
