"""Training of the small model: what is exported is what was trained, and a stopped run goes on exactly."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from deepinfer.graphs.checkpoint import Checkpoint
from deepinfer.graphs.config import load_config
from deepinfer.graphs.weights import build_weight_store
from deepinfer.kernels import dequantize_fp8
from deepinfer.kernels.formats import dequantize_fp4_groups
from deepinfer.kernels.linear_fp8 import dequantize_tiles

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny"
sys.path.insert(0, str(EXAMPLE))
import evaluate  # noqa: E402
import parameters  # noqa: E402
import train  # noqa: E402


@pytest.fixture(scope="module")
def masters() -> dict[str, torch.Tensor]:
    return parameters.initial_masters(load_config(EXAMPLE / "checkpoint"), seed=7)


def test_the_exported_checkpoint_holds_the_rounded_parameters(masters, tmp_path):
    """Through the checkpoint reader, in every format; at most 16 MB on disk."""
    config = load_config(EXAMPLE / "checkpoint")
    biases = {layer: torch.randn(config.n_routed_experts) for layer in range(config.num_hidden_layers)}
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((EXAMPLE / "checkpoint" / name).read_bytes())
    parameters.export(config, masters, biases, tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 16 << 20
    store = build_weight_store(Checkpoint(tmp_path, config))
    for name, master in masters.items():
        expected = parameters.rounded(name, master.detach())
        kind = parameters.format_of(name)
        if kind == "fp8":
            actual = dequantize_tiles(store[name], store[name.removesuffix("weight") + "scale"])
        elif kind == "fp4":
            scale = store[name.removesuffix("weight") + "scale"]
            actual = dequantize_fp4_groups(store[name], scale, "e8m0")
        elif kind == "fp8_rows":
            actual = dequantize_fp8(store[name], torch.float32)
        elif name.endswith(("q_weight", "k_weight")):
            continue  # joined in the store, below
        else:
            actual = store[name].float()
        assert torch.equal(actual, expected), name
    for layer in config.engram_layer_ids:
        stem = f"layers.{layer}.engram."
        joined = masters[stem + "q_weight"].bfloat16().float() * masters[stem + "k_weight"].bfloat16().float()
        assert torch.equal(store[stem + "qk_weight"], joined.detach())
    for layer, bias in biases.items():
        assert torch.equal(store[f"layers.{layer}.ffn.gate.bias"], bias)


def test_a_resumed_run_takes_the_same_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "LENGTH", 32)
    tokens = np.random.default_rng(3).integers(3, 3000, 4000).astype(np.uint16)
    tokens.tofile(tmp_path / "train.bin")
    whole = train.Run(tmp_path, tmp_path / "whole", total_tokens=10_000)
    expected = [whole.step()["loss"] for _ in range(3)]
    assert expected[0] == pytest.approx(np.log(3072), rel=0.15)
    first = train.Run(tmp_path, tmp_path / "stopped", total_tokens=10_000)
    first.step()
    first.save()
    second = train.Run(tmp_path, tmp_path / "stopped", total_tokens=10_000)
    assert [second.step()["loss"] for _ in range(2)] == expected[1:]


@pytest.mark.parametrize("num_tokens", [2, 1023, 1024, 1025, 1600, 5000])
def test_every_token_but_the_first_is_scored_once(num_tokens):
    scored = []
    for start, end, first in evaluate.windows(num_tokens):
        assert end - start <= evaluate.LENGTH and first >= start
        scored += range(first + 1, end)
    assert scored == list(range(1, num_tokens))
