"""A checkpoint of a very small model in the released on-disk layout, which a test can afford to compile.

Two layers, one key source of each kind (ratio 2 and ratio 1), no Engram; or one layer with a window only.
Its weights are random and mean nothing; the same seed gives the same bytes.
"""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from model_dirs import write_shard

from deepinfer.graphs.checkpoint_tensors import TensorSpec, iter_expected_tensors
from deepinfer.graphs.config import parse_config

INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")

_TEXT: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "moe_intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "o_lora_rank": 32,
    "o_groups": 1,
    "hidden_act": "silu",
    "swiglu_limit": 1.0,
    "rms_norm_eps": 1e-20,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 256,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 64,
    },
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "sliding_window": 8,
    "compress_ratios": [2, 1],
    "kv_source_layer_ids": [0, 1],
    "index_source_layer_ids": [0, 1],
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_topk": 4,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 2,
    "hc_eps": 1e-6,
}
_WINDOW_ONLY: dict[str, Any] = {
    "num_hidden_layers": 1,
    "compress_ratios": [0],
    "kv_source_layer_ids": [],
    "index_source_layer_ids": [],
}


def tiny_config(*, window_only: bool = False, **changes: Any) -> dict[str, Any]:
    """The content of the model's config.json; `changes` replace keys of its text part."""
    text = {**_TEXT, **(_WINDOW_ONLY if window_only else {}), **changes}
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": text,
    }


def write_tiny_checkpoint(directory: Path, *, seed: int = 0, window_only: bool = False) -> Path:
    """Make `directory` with config.json, an index and two shards; returns it."""
    directory.mkdir(parents=True)
    content = tiny_config(window_only=window_only)
    (directory / "config.json").write_text(json.dumps(content, indent=1))
    tensors = dict(iter_expected_tensors(parse_config(content)))
    names = list(tensors)
    half = len(names) // 2
    weight_map = {}
    for shard, part in zip(SHARDS, (names[:half], names[half:]), strict=True):
        _write_shard(directory / shard, {name: tensors[name] for name in part}, seed)
        weight_map |= dict.fromkeys(part, shard)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index))
    return directory


def _write_shard(path: Path, tensors: Mapping[str, TensorSpec], seed: int) -> None:
    header: dict[str, Any] = {}
    data = bytearray()
    for name, spec in tensors.items():
        stored = random_bytes(name, spec, seed)
        header[name] = {
            "dtype": spec.dtypes[0],
            "shape": list(spec.shape),
            "data_offsets": [len(data), len(data) + len(stored)],
        }
        data += stored
    write_shard(path, header, bytes(data))


def random_bytes(name: str, spec: TensorSpec, seed: int) -> bytes:
    """Finite values of moderate size in the tensor's storage format; a generator per tensor."""
    numbers = np.random.default_rng(random.Random(f"{seed} {name}").getrandbits(64))
    match spec.dtypes[0]:
        case "F8_E4M3":  # at most 1.9 in size, so never NaN
            codes = numbers.integers(0, 0x40, spec.shape) | (numbers.integers(0, 2, spec.shape) << 7)
            return codes.astype(np.uint8).tobytes()
        case "F8_E8M0":
            return numbers.integers(122, 126, spec.shape).astype(np.uint8).tobytes()
        case "I8":
            return numbers.integers(0, 256, spec.shape).astype(np.uint8).tobytes()
        case "BF16":
            bits = (_values(numbers, name, spec).view(np.uint32) >> 16).astype(np.uint16)
            return bits.tobytes()
        case "F32":
            return _values(numbers, name, spec).tobytes()
    raise AssertionError(spec)


def _values(numbers: np.random.Generator, name: str, spec: TensorSpec) -> np.ndarray:
    centre = 1.0 if "norm" in name else 0.0
    return (centre + 0.1 * numbers.standard_normal(spec.shape)).astype("<f4")
