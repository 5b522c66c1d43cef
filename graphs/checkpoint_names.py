"""Where a tensor lies in a checkpoint that transformers has written: its own names, experts in one tensor.

The vendor's names are those of the rest of the code (`checkpoint_tensors.py`). transformers reads them and
may write them back, or write its own: layers below `model.`, other words for most parts, and the experts of a
layer stacked, gate rows before up rows (spec model.md 13.2, 21.2 item 10).
"""

import re
from collections.abc import Collection
from dataclasses import dataclass

from deepinfer.graphs.checkpoint_tensors import TensorSpec
from deepinfer.graphs.config_schema import ModelConfig

# in a checkpoint of these names, and in none of the vendor's
MARK = "model.embed_tokens.weight"

_TRUNK = {
    "embed.weight": MARK,
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_base": "model.hc_head.hc_base",
    "hc_head_scale": "model.hc_head.hc_scale",
}
_WITHIN_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn.attn_sink": "self_attn.sinks",
    "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight",
    "attn.wq_a.weight": "self_attn.q_a_proj.weight",
    "attn.wq_b.weight": "self_attn.q_b_proj.weight",
    "attn.wkv.weight": "self_attn.kv_proj.weight",
    "attn.wo_a.weight": "self_attn.o_a_proj.weight",
    "attn.wo_b.weight": "self_attn.o_b_proj.weight",
    "attn.indexer.wq_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
    "attn.indexer.weights_proj.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
    "ffn.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
}
for _part in ("attn", "ffn"):
    for _leaf in ("fn", "base", "scale"):
        _WITHIN_LAYER[f"hc_{_part}_{_leaf}"] = f"{_part}_hc.{_leaf}"
for _vendor, _other in (
    ("attn.compressor", "self_attn.compressor"),
    ("attn.indexer.compressor", "self_attn.compressor.indexer"),
):
    _WITHIN_LAYER[f"{_vendor}.wkv.weight"] = f"{_other}.kv_proj.weight"
    _WITHIN_LAYER[f"{_vendor}.wgate.weight"] = f"{_other}.gate_proj.weight"
    _WITHIN_LAYER[f"{_vendor}.ape"] = f"{_other}.position_bias"
    _WITHIN_LAYER[f"{_vendor}.norm.weight"] = f"{_other}.kv_norm.weight"

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"ffn\.experts\.(\d+)\.(w[123])\.weight")


@dataclass(frozen=True)
class Place:
    """The stored tensor `name` of `shape`, and the part of it that is meant."""

    name: str
    shape: tuple[int, ...]
    part: tuple[int | slice, ...] = ()


def uses_transformers_names(names: Collection[str]) -> bool:
    """Whether a checkpoint with these tensors has the names of transformers."""
    return MARK in names


def vendor_place(name: str, spec: TensorSpec) -> Place:
    """A tensor lies under its own name, whole."""
    return Place(name, spec.shape)


def transformers_place(config: ModelConfig, name: str, spec: TensorSpec) -> Place:
    """Where the tensor of the vendor's `name` lies."""
    if name in _TRUNK:
        return Place(_TRUNK[name], spec.shape)
    layer = _LAYER.fullmatch(name)
    assert layer is not None, name
    stem, leaf = f"model.layers.{layer[1]}", layer[2]
    expert = _EXPERT.fullmatch(leaf)
    if expert is None:
        return Place(f"{stem}.{_WITHIN_LAYER[leaf]}", spec.shape)
    rows, columns = spec.shape
    index, matrix, count = int(expert[1]), expert[2], config.n_routed_experts
    if matrix == "w2":
        return Place(f"{stem}.mlp.experts.down_proj", (count, rows, columns), (index,))
    half = slice(0, rows) if matrix == "w1" else slice(rows, 2 * rows)
    return Place(f"{stem}.mlp.experts.gate_up_proj", (count, 2 * rows, columns), (index, half))
