"""Checkpoints of deepseek_v4 for tests: the golden one under other names, a quantised one of random bytes."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from model_dirs import write_shard
from safetensors.torch import load_file, save_file
from tiny_checkpoint import random_bytes

from deepinfer.graphs.checkpoint_tensors import iter_expected_tensors
from deepinfer.graphs.config import parse_config

# vendor's word, then that of transformers; the first that fits a part of a name counts
_WORDS = (
    (r"\.attn\.indexer\.compressor\.", ".self_attn.compressor.indexer."),
    (r"\.attn\.indexer\.wq_b\.", ".self_attn.compressor.indexer.q_b_proj."),
    (r"\.attn\.indexer\.weights_proj\.", ".self_attn.compressor.indexer.scorer.weights_proj."),
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.", ".mlp."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.hc_(attn|ffn)_", r".\1_hc."),
    (r"\.attn_sink$", ".sinks"),
    (r"\.q_norm\.", ".q_a_norm."),
    (r"(compressor|indexer)\.norm\.", r"\1.kv_norm."),
    (r"\.ape$", ".position_bias"),
    (r"\.wq_a\.", ".q_a_proj."),
    (r"\.wq_b\.", ".q_b_proj."),
    (r"\.wkv\.", ".kv_proj."),
    (r"\.wgate\.", ".gate_proj."),
    (r"\.wo_a\.", ".o_a_proj."),
    (r"\.wo_b\.", ".o_b_proj."),
    (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
    (r"shared_experts\.w1\.", "shared_experts.gate_proj."),
    (r"shared_experts\.w2\.", "shared_experts.down_proj."),
    (r"shared_experts\.w3\.", "shared_experts.up_proj."),
)
_TRUNK = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_base": "model.hc_head.hc_base",
    "hc_head_scale": "model.hc_head.hc_scale",
}


def transformers_config(config: dict[str, Any]) -> dict[str, Any]:
    """The same model as transformers describes it when it saves a config."""
    written = {
        key: value for key, value in config.items() if not key.startswith(("compress_ratios", "num_hash"))
    }
    scaling = written.pop("rope_scaling")
    factor = config["qk_rope_head_dim"] / config["head_dim"]
    for key in ("qk_rope_head_dim", "topk_method"):
        del written[key]
    hashed = config["num_hash_layers"]
    return written | {
        "mlp_layer_types": ["hash_moe"] * hashed + ["moe"] * (config["num_hidden_layers"] - hashed),
        "partial_rotary_factor": factor,
        "rope_parameters": {
            "main": {
                "rope_type": "default",
                "rope_theta": config["rope_theta"],
                "partial_rotary_factor": factor,
            },
            "compress": {
                **scaling,
                "rope_theta": config["compress_rope_theta"],
                "partial_rotary_factor": factor,
                "attention_factor": 1.0,
            },
        },
        "mlp_bias": False,
        "router_aux_loss_coef": 0.001,
    }


def write_with_transformers_names(source: Path, target: Path) -> Path:
    """Make `target` with the checkpoint in `source`, named and described as transformers does."""
    target.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(transformers_config(config)))
    tensors = load_file(source / "model.safetensors")
    renamed = {}
    for name, tensor in tensors.items():
        if ".ffn.experts." not in name:
            renamed[_renamed(name)] = tensor
    for layer in range(config["num_hidden_layers"]):
        experts = [f"layers.{layer}.ffn.experts.{e}" for e in range(config["n_routed_experts"])]
        up = [torch.cat((tensors[f"{e}.w1.weight"], tensors[f"{e}.w3.weight"])) for e in experts]
        renamed[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.stack(up)
        down = [tensors[f"{e}.w2.weight"] for e in experts]
        renamed[f"model.layers.{layer}.mlp.experts.down_proj"] = torch.stack(down)
    save_file(renamed, target / "model.safetensors")
    return target


def _renamed(name: str) -> str:
    if name in _TRUNK:
        return _TRUNK[name]
    for vendor, other in _WORDS:
        name = re.sub(vendor, other, name)
    return f"model.{name}"


def quantised_config(golden: dict[str, Any]) -> dict[str, Any]:
    """A model of three layers, one of every kind, whose matrices are whole tiles of 128."""
    return golden | {
        "num_hidden_layers": 3,
        "compress_ratios": [0, 4, 16],
        "layer_types": golden["layer_types"][1:4],
        "num_hash_layers": 1,
        "q_lora_rank": 128,
        "o_lora_rank": 128,
        "moe_intermediate_size": 128,
        "n_routed_experts": 4,
        "hidden_size": 256,
        "expert_dtype": "fp4",
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
    }


def write_quantised(config: dict[str, Any], target: Path) -> Path:
    """Make `target` with `config` and random weights of the formats that it asks for."""
    target.mkdir(parents=True)
    (target / "config.json").write_text(json.dumps(config))
    header: dict[str, Any] = {}
    data = bytearray()
    for name, spec in iter_expected_tensors(parse_config(config)):
        if name.endswith("tid2eid"):
            ids = torch.rand(
                spec.shape[0], config["n_routed_experts"], generator=torch.Generator().manual_seed(0)
            )
            stored = ids.argsort(1)[:, : spec.shape[1]].contiguous().numpy().tobytes()
        else:
            stored = random_bytes(name, spec, 0)
        offsets = [len(data), len(data) + len(stored)]
        header[name] = {"dtype": spec.dtypes[0], "shape": list(spec.shape), "data_offsets": offsets}
        data += stored
    write_shard(target / "model.safetensors", header, bytes(data))
    return target
