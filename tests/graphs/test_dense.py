"""The dense form for training computes what the eager model computes, and gradients reach every parameter."""

import pytest
import torch
from golden import Golden
from torch import Tensor

from deepinfer.graphs.dense import StraightThrough, forward_dense
from deepinfer.graphs.eager import EagerModel, eager_logits
from deepinfer.kernels import dequantize_fp8
from deepinfer.kernels import training_library as library
from deepinfer.kernels.formats import dequantize_fp4_groups
from deepinfer.kernels.linear_fp8 import dequantize_tiles


@pytest.fixture(params=["torch", "library"], autouse=True)
def training_library(request, monkeypatch) -> None:
    """Every test runs on torch's own functions and on the training library."""
    library.load_training_library()
    monkeypatch.setattr(library, "_loaded", request.param == "library")


@pytest.fixture(scope="module")
def golden(golden_dir) -> Golden:
    return Golden(golden_dir)


@pytest.fixture(scope="module")
def model(golden) -> EagerModel:
    return EagerModel.load(golden.directory, "float32", max_model_len=97)


@pytest.fixture(scope="module")
def unpacked(model) -> dict[str, Tensor]:
    """The store with every packed matrix as float32 values."""
    weights = {}
    for name, value in model.weights.items():
        scale = model.weights.get(name.removesuffix("weight") + "scale") if name.endswith(".weight") else None
        if name.endswith("engram.embed"):
            weights[name] = dequantize_fp8(value, torch.float32)
        elif scale is None:
            weights[name] = value
        elif ".ffn.experts." in name:
            weights[name] = dequantize_fp4_groups(value, scale, "e8m0")
        else:
            weights[name] = dequantize_tiles(value, scale)
    return weights


def test_dense_equals_eager_with_quantisers_off(golden, model, unpacked):
    """Two sequences side by side, each as the eager model computes it alone."""
    tokens = golden.tokens("n97")
    logits = forward_dense(
        model.config, StraightThrough("float32"), unpacked, torch.tensor([tokens, tokens[::-1]])
    )
    for row, sequence in enumerate((tokens, tokens[::-1])):
        expected = torch.from_numpy(eager_logits(golden.directory, sequence, "float32"))
        assert (logits[row] - expected).abs().max() <= 1e-4


def test_quantised_dense_is_as_close_to_native_as_any_other_summation(golden, model, unpacked):
    """The golden README's coarse limit for short cases; without quantisers the result is another one."""
    tokens = golden.tokens("n9")
    native = torch.from_numpy(eager_logits(golden.directory, tokens, "native"))
    dense = forward_dense(model.config, StraightThrough("native"), unpacked, torch.tensor([tokens]))[0]
    plain = forward_dense(model.config, StraightThrough("float32"), unpacked, torch.tensor([tokens]))[0]
    assert (dense - native).pow(2).mean().sqrt() <= 0.15 * native.std()
    assert (dense - plain).abs().max() > 0.05


def test_gradients_reach_every_parameter(golden, model, unpacked):
    """Through straight-through roundings; only what picks (router bias, index scores) has none."""
    weights = {
        name: value.float().clone().requires_grad_()
        if value.dtype in (torch.float32, torch.bfloat16)
        else value
        for name, value in unpacked.items()
    }
    tokens = torch.tensor([golden.tokens("n40")])
    forward_dense(model.config, StraightThrough("native"), weights, tokens).square().mean().backward()
    missing = {
        name
        for name, value in weights.items()
        if isinstance(value, Tensor) and value.requires_grad and (value.grad is None or not value.grad.any())
    }
    picks_only = ("gate.bias", "indexer.wq_b.weight", "indexer.weights_proj", "indexer.wk", "indexer.k_norm")
    assert all(name.endswith(picks_only) or name.startswith("rope.") for name in missing), missing
