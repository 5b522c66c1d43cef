"""The weight store: names, shapes, and that nothing but layout differs from the checkpoint."""

import dataclasses

import pytest
import torch
from model_dirs import release_config

from deepinfer.graphs.checkpoint import Checkpoint
from deepinfer.graphs.config import load_config, parse_config
from deepinfer.graphs.weights import build_weight_store, weight_specs


@pytest.fixture(scope="module")
def checkpoint(golden_dir):
    return Checkpoint(golden_dir, load_config(golden_dir))


@pytest.fixture(scope="module")
def store(checkpoint):
    return build_weight_store(checkpoint)


def test_the_specs_tell_the_store_without_reading_weights(store, checkpoint):
    specs = weight_specs(checkpoint.config)
    assert list(specs) == list(store)
    assert specs == {name: (tuple(t.shape), t.dtype) for name, t in store.items()}


def test_every_tensor_is_contiguous(store):
    assert [name for name, tensor in store.items() if not tensor.is_contiguous()] == []


def test_every_checkpoint_tensor_but_the_image_bias_is_in_the_store(store, checkpoint, monkeypatch):
    read = set()
    original = Checkpoint.get
    monkeypatch.setattr(Checkpoint, "get", lambda self, name: read.add(name) or original(self, name))
    build_weight_store(checkpoint)
    left_out = set(checkpoint.names) - read
    assert left_out == {f"layers.{layer}.ffn.gate.bias_vl" for layer in range(8)}


@pytest.mark.parametrize("name", ["wq_a", "wq_b", "wkv", "wo_b", "indexer.wq_b"])
def test_dense_matrices_get_a_group_axis(store, checkpoint, name):
    for part in ("weight", "scale"):
        key = f"layers.3.attn.{name}.{part}"
        assert torch.equal(store[key], checkpoint.get(key).unsqueeze(0))
        assert store[key].dtype == torch.uint8


def test_output_groups_are_consecutive_rows(store, checkpoint):
    weight, scale = (store[f"layers.3.attn.wo_a.{part}"] for part in ("weight", "scale"))
    assert (weight.shape, scale.shape) == ((2, 32, 256), (2, 1, 8))
    assert torch.equal(weight[1], checkpoint.get("layers.3.attn.wo_a.weight")[32:])
    assert torch.equal(scale[1], checkpoint.get("layers.3.attn.wo_a.scale")[1:])


def test_experts_are_stacked_with_gate_rows_first(store, checkpoint):
    for part in ("weight", "scale"):
        w13, w2 = (store[f"layers.5.ffn.experts.{w}.{part}"] for w in ("w13", "w2"))
        for expert in (0, 15):
            stem = f"layers.5.ffn.experts.{expert}"
            assert torch.equal(w13[expert, :64], checkpoint.get(f"{stem}.w1.{part}"))
            assert torch.equal(w13[expert, 64:], checkpoint.get(f"{stem}.w3.{part}"))
            assert torch.equal(w2[expert], checkpoint.get(f"{stem}.w2.{part}"))


def test_the_shared_expert_has_the_same_layout(store, checkpoint):
    stem = "layers.5.ffn.shared_experts"
    for part, rows in (("weight", 64), ("scale", 2)):
        w13 = store[f"{stem}.w13.{part}"]
        assert torch.equal(w13[0, :rows], checkpoint.get(f"{stem}.w1.{part}"))
        assert torch.equal(w13[0, rows:], checkpoint.get(f"{stem}.w3.{part}"))
        assert torch.equal(store[f"{stem}.w2.{part}"][0], checkpoint.get(f"{stem}.w2.{part}"))


def test_table_rows_are_records_of_codes_then_scales(store, checkpoint):
    table = store["layers.1.engram.embed"]
    assert torch.equal(table[:, :32], checkpoint.get("layers.1.engram.embed.weight"))
    assert torch.equal(table[:, 32:], checkpoint.get("layers.1.engram.embed.scale"))


def test_query_and_key_weights_are_multiplied_in_float32(store, checkpoint):
    q, k = (checkpoint.get(f"layers.3.engram.{part}_weight") for part in "qk")
    assert q.dtype == torch.bfloat16
    assert torch.equal(store["layers.3.engram.qk_weight"], q.float() * k.float())


def test_norm_weights_are_widened_exactly(store, checkpoint):
    for name, source in (("norm", "norm.weight"), ("layers.1.attn.q_norm", "layers.1.attn.q_norm.weight")):
        assert store[name].dtype == torch.float32
        assert torch.equal(store[name].bfloat16(), checkpoint.get(source))


def test_without_engram_there_is_no_table_and_no_map(checkpoint):
    config = dataclasses.replace(checkpoint.config, engram_layer_ids=(), engram_num_embeddings=())
    assert not any("engram" in name for name in weight_specs(config))


def test_roles_decide_which_tensors_a_layer_has():
    specs = weight_specs(parse_config(release_config()))

    def layers_with(part: str) -> list[int]:
        return [layer for layer in range(40) if f"layers.{layer}.attn.{part}" in specs]

    assert layers_with("compressor.wkv") == [2, 8, 14, 20]
    assert layers_with("compressor.wgate") == [2, 8, 14]
    assert layers_with("indexer.wk") == [2, 8, 14, 20]
    assert layers_with("indexer.weights_proj") == [2, 8, 14, 20, 24, 28, 32, 36]
    assert layers_with("attn_sink") == list(range(40))


def test_released_sizes_follow_from_the_specs():
    specs = weight_specs(parse_config(release_config()))
    sizes = {
        name: torch.Size(shape).numel() * torch.empty((), dtype=dtype).element_size()
        for name, (shape, dtype) in specs.items()
    }
    assert specs["layers.0.ffn.experts.w13.weight"][0] == (384, 4608, 2560)
    assert specs["layers.0.attn.wo_a.scale"][0] == (8, 32, 128)
    routed = sum(size for name, size in sizes.items() if ".experts." in name)
    assert routed == 40 * 384 * 18_800_640
    tables = sum(size for name, size in sizes.items() if name.endswith("engram.embed"))
    assert tables == (384006168 + 384016682) * 264
