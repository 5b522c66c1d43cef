"""Checkpoints of deepseek_v4: both schemes of names, tiles of 128 by 128, tables of experts."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from v4_checkpoint import quantised_config, write_quantised, write_with_transformers_names

from deepinfer.errors import CheckpointError
from deepinfer.graphs.checkpoint import Checkpoint
from deepinfer.graphs.config import load_config
from deepinfer.graphs.store import build_store, store_specs
from deepinfer.graphs.weights import build_weight_store
from deepinfer.kernels.formats import e4m3_to_float, e8m0_to_float
from deepinfer.kernels.linear_fp8 import dequantize_tiles


@pytest.fixture(scope="module")
def quantised_dir(v4_golden_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    golden = json.loads((v4_golden_dir / "config.json").read_text())
    return write_quantised(quantised_config(golden), tmp_path_factory.mktemp("v4") / "quantised")


def test_both_schemes_of_names_give_the_same_store(v4_golden_dir, tmp_path):
    other = write_with_transformers_names(v4_golden_dir, tmp_path / "other")
    config = load_config(v4_golden_dir)
    assert load_config(other) == config
    first, second = Checkpoint(v4_golden_dir, config), Checkpoint(other, config)
    assert first.names == second.names and not second.skipped
    want, got = build_weight_store(first), build_weight_store(second)
    assert list(got) == list(want)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_a_missing_and_a_superfluous_tensor_are_named_in_their_scheme(v4_golden_dir, tmp_path):
    path = write_with_transformers_names(v4_golden_dir, tmp_path / "other") / "model.safetensors"
    tensors, config = load_file(path), load_config(v4_golden_dir)
    gone = "model.layers.3.mlp.experts.gate_up_proj"
    save_file({name: tensor for name, tensor in tensors.items() if name != gone}, path)
    with pytest.raises(CheckpointError, match=f"{gone}: the tensor is missing"):
        Checkpoint(path.parent, config)
    save_file({**tensors, "layers.0.attn.wq_a.weight": tensors[gone].clone()}, path)
    with pytest.raises(CheckpointError, match=r"layers\.0\.attn\.wq_a\.weight: .* no such tensor"):
        Checkpoint(path.parent, config)


@pytest.mark.parametrize("packed", [False, True])
def test_the_specs_tell_the_store(v4_golden_dir, quantised_dir, packed):
    for directory in (v4_golden_dir, quantised_dir):
        config = load_config(directory)
        store = build_store(Checkpoint(directory, config), config, 64, packed=packed)
        specs = {name: (tuple(value.shape), value.dtype) for name, value in store.items()}
        assert specs == store_specs(config, 64, packed=packed)
        assert all(tensor.is_contiguous() for tensor in store.values())


@pytest.mark.parametrize("name", ["wq_a", "wq_b", "wkv", "wo_a", "wo_b", "indexer.wq_b"])
def test_scales_of_tiles_of_128_are_repeated_exactly(quantised_dir, name):
    """The values of a matrix do not change: every tile of 32 has the scale of the one it lies in."""
    config = load_config(quantised_dir)
    checkpoint = Checkpoint(quantised_dir, config)
    stem = f"layers.1.attn.{name}"
    codes, scale = checkpoint.get(f"{stem}.weight"), checkpoint.get(f"{stem}.scale")
    wide = e8m0_to_float(scale).repeat_interleave(128, 0).repeat_interleave(128, 1)
    want = e4m3_to_float(codes) * wide[: codes.shape[0], : codes.shape[1]]
    store = build_weight_store(checkpoint)
    got = dequantize_tiles(store[f"{stem}.weight"], store[f"{stem}.scale"])
    assert torch.equal(got.flatten(0, 1), want)


def test_shared_experts_have_gate_rows_first_with_their_scales(quantised_dir):
    config = load_config(quantised_dir)
    checkpoint = Checkpoint(quantised_dir, config)
    store, stem = build_weight_store(checkpoint), "layers.1.ffn.shared_experts"
    for half, name in enumerate(("w1", "w3")):
        scale = store[f"{stem}.w13.scale"][0, 4 * half : 4 * half + 4]
        assert torch.equal(scale[::4, ::4], checkpoint.get(f"{stem}.{name}.scale"))


def test_an_expert_that_does_not_exist_is_refused(v4_golden_dir, tmp_path):
    directory = tmp_path / "copy"
    shutil.copytree(v4_golden_dir, directory)
    path, config = directory / "model.safetensors", load_config(v4_golden_dir)
    tensors = load_file(path)
    tensors["layers.1.ffn.gate.tid2eid"][7, 1] = config.n_routed_experts
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"layers\.1\.ffn\.gate\.tid2eid"):
        build_weight_store(Checkpoint(directory, config))
