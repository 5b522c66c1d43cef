"""Rules between fields: each broken one has its own message, naming the field."""

import dataclasses

import pytest
from model_dirs import release_config

from deepinfer.errors import ConfigError
from deepinfer.graphs.config import ModelConfig, load_config, parse_config
from deepinfer.graphs.config_rules import check_rules


def broken(golden_dir, **changes) -> ModelConfig:
    return dataclasses.replace(load_config(golden_dir), **changes)


RULES = [
    ({"compress_ratios": (0, 2, 2, 2, 1, 1, 1)}, "compress_ratios", "7 ratios for num_hidden_layers = 8"),
    ({"compress_ratios": (0, 4, 2, 2, 1, 1, 1, 1)}, "compress_ratios", "ratio 4 is not one of"),
    ({"kv_source_layer_ids": (1, 4, 3)}, "kv_source_layer_ids", "strictly ascending"),
    ({"kv_source_layer_ids": (1, 1, 4)}, "kv_source_layer_ids", "strictly ascending"),
    ({"kv_source_layer_ids": (1, 3, 8)}, "kv_source_layer_ids", "layer 8 does not exist"),
    ({"kv_source_layer_ids": (0, 1, 3, 4)}, "kv_source_layer_ids", "layer 0 has compress ratio 0"),
    ({"index_source_layer_ids": (1, 3, 6)}, "kv_source_layer_ids", "layer 4 must also be in"),
    ({"kv_source_layer_ids": (3, 4)}, "index_source_layer_ids", "layer 1 comes before the first kv source"),
    (
        {"kv_source_layer_ids": (), "index_source_layer_ids": (1,)},
        "index_source_layer_ids",
        "before the first kv source",
    ),
    (
        {"kv_source_layer_ids": (3, 4), "index_source_layer_ids": (3, 4, 6)},
        "kv_source_layer_ids",
        "layer 1 has ratio 2 but no kv source",
    ),
    (
        {"kv_source_layer_ids": (1, 3), "index_source_layer_ids": (1, 3, 4, 6)},
        "compress_ratios",
        "layer 4 has ratio 1, its kv source 3 has another",
    ),
    ({"index_source_layer_ids": (1, 3, 4, 9)}, "index_source_layer_ids", "layer 9 does not exist"),
    ({"candidate_source_layer_id": 6}, "candidate_source_layer_id", "must be in kv_source_layer_ids"),
    ({"candidate_source_layer_id": 3}, "candidate_source_layer_id", "index source 4 after it reads"),
    ({"candidate_topk_blocks": 0}, "candidate_topk_blocks", "at least 1"),
    ({"candidate_block_size": 0}, "candidate_block_size", "at least 1"),
    ({"candidate_topk_blocks": 2}, "candidate_topk_blocks", "= 5 must be at least index_topk = 8"),
    ({"o_groups": 3}, "o_groups", "must be a multiple of o_groups = 3"),
    ({"hidden_size": 120}, "hidden_size", "multiple of 32"),
    ({"q_lora_rank": 48}, "q_lora_rank", "multiple of 32"),
    ({"moe_intermediate_size": 72}, "moe_intermediate_size", "multiple of 32"),
    ({"head_dim": 48}, "head_dim", "multiple of 32"),
    ({"index_head_dim": 40}, "index_head_dim", "multiple of 32"),
    ({"o_lora_rank": 16}, "o_lora_rank", "multiple of 32"),
    ({"qk_rope_head_dim": 31}, "qk_rope_head_dim", "must be even"),
    ({"qk_rope_head_dim": 66}, "qk_rope_head_dim", "must not exceed head_dim"),
    ({"index_head_dim": 32, "qk_rope_head_dim": 64}, "qk_rope_head_dim", "must not exceed index_head_dim"),
    ({"num_experts_per_tok": 17}, "num_experts_per_tok", "must not exceed n_routed_experts = 16"),
    ({"engram_layer_ids": (3, 1)}, "engram_layer_ids", "strictly ascending"),
    ({"engram_layer_ids": (1, 9)}, "engram_layer_ids", "layer 9 does not exist"),
    ({"engram_layer_ids": (1, 5)}, "engram_layer_ids", "must come before the last kv source"),
    ({"engram_num_embeddings": (660,)}, "engram_num_embeddings", "1 tables for 2 layers"),
    ({"engram_max_ngram_size": 1}, "engram_max_ngram_size", "at least 2"),
    ({"engram_n_heads": 0}, "engram_n_heads", "at least 1"),
    ({"engram_vocab_size": 0}, "engram_vocab_size", "at least 2"),
    ({"engram_compressed_vocab_size": 0}, "engram_compressed_vocab_size", "at least 1"),
    ({"engram_compressed_vocab_size": 513}, "engram_compressed_vocab_size", "must not exceed vocab_size"),
    ({"engram_head_dim": 16}, "engram_head_dim", "multiple of 32"),
    ({"engram_pad_token_id": 512}, "engram_pad_token_id", "must be below vocab_size"),
    ({"bos_token_id": 512}, "bos_token_id", "must be below vocab_size"),
    ({"pad_token_id": 999}, "pad_token_id", "must be below vocab_size"),
    ({"image_token_id": 512}, "image_token_id", "must be below vocab_size"),
    ({"eos_token_ids": (1, 512)}, "eos_token_id[1]", "must be below vocab_size"),
    ({"dspark_target_layer_ids": (7, 6)}, "dspark_target_layer_ids", "strictly ascending"),
    ({"dspark_target_layer_ids": (8,)}, "dspark_target_layer_ids", "layer 8 does not exist"),
]


@pytest.mark.parametrize(("changes", "field", "message"), RULES)
def test_a_broken_rule_is_named(golden_dir, changes, field, message):
    with pytest.raises(ConfigError) as caught:
        check_rules(broken(golden_dir, **changes))
    assert caught.value.where == f"config.json {field}"
    assert message in str(caught.value)


def test_the_candidate_source_must_be_the_last_kv_source(golden_dir):
    with pytest.raises(ConfigError, match="index source 6 after it reads kv source 6"):
        check_rules(broken(golden_dir, kv_source_layer_ids=(1, 3, 4, 6)))


@pytest.mark.parametrize(
    ("key", "value", "message"), [("beta_slow", 40, "beta_fast"), ("factor", 0.5, "factor")]
)
def test_rope_scaling_must_make_sense(key, value, message):
    raw = release_config()
    raw["text_config"]["rope_scaling"][key] = value
    with pytest.raises(ConfigError, match=message):
        parse_config(raw)


def test_an_output_group_may_be_one_head(golden_dir):
    config = broken(golden_dir, head_dim=32, qk_rope_head_dim=32, o_groups=8)
    check_rules(config)
    assert config.o_group_width == 32


def test_a_model_without_compression_is_consistent(golden_dir):
    config = broken(
        golden_dir,
        compress_ratios=(0,) * 8,
        kv_source_layer_ids=(),
        index_source_layer_ids=(),
        candidate_source_layer_id=-1,
    )
    check_rules(config)
    assert config.cut == 8
