"""The training library against torch's own functions and autograd, values and gradients."""

import pytest
import torch
from torch import Tensor

from deepinfer.kernels import training_library as library
from deepinfer.kernels.differentiable import round_tiles
from deepinfer.kernels.mhc_mix import mhc_coefficients


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    library.load_training_library()


def assert_same(got: object, want: object, inputs: list[Tensor]) -> None:
    """Values and the gradients of a random projection agree."""
    got = got if isinstance(got, tuple) else (got,)
    want = want if isinstance(want, tuple) else (want,)
    generator = torch.Generator().manual_seed(9)
    loss = [torch.zeros(()), torch.zeros(())]
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)
        weight = torch.randn(one.shape, generator=generator)
        for index, value in enumerate((one, other)):
            if value.requires_grad:
                loss[index] = loss[index] + (value * weight).sum()
    for mine, reference in zip(
        torch.autograd.grad(loss[0], inputs), torch.autograd.grad(loss[1], inputs), strict=True
    ):
        torch.testing.assert_close(mine, reference, rtol=2e-4, atol=2e-5)


def leaf(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator).requires_grad_()


def plain_attention(query, record, stored, picks, sink, scale, window, length):
    rows = query.shape[0]
    lines, positions = torch.arange(rows) // length, torch.arange(rows) % length
    offsets = torch.arange(window - 1, -1, -1)
    at = positions.unsqueeze(1) - offsets
    keys = record[(torch.arange(rows).unsqueeze(1) - offsets).clamp(min=0)]
    picked = stored[lines.unsqueeze(1), picks.clamp(min=0)]
    keys = torch.cat((keys, picked), 1)
    visible = torch.cat((at >= 0, picks >= 0), 1)
    logits = torch.einsum("thd,tnd->thn", query, keys) * scale
    logits = logits.masked_fill(~visible.unsqueeze(1), -torch.inf)
    shares = torch.cat((logits, sink.view(1, -1, 1).expand(rows, -1, 1)), -1).softmax(-1)[..., :-1]
    return torch.einsum("thn,tnd->thd", shares, keys), shares.sum(1)


@pytest.mark.parametrize("picked", [0, 3, 17])
def test_attention(picked):
    generator = torch.Generator().manual_seed(picked)
    length, sequences, window = 24, 2, 5
    query, record = leaf(generator, 48, 3, 32), leaf(generator, 48, 32)
    stored, sink = leaf(generator, sequences, 20, 32), leaf(generator, 3)
    picks = torch.full((48, picked), -1)
    for row in range(48):
        count = min(picked, row % length)
        picks[row, :count] = torch.randperm(20, generator=generator)[:count].sort().values
    settings = (0.3, window, length)
    got = library.Attend.apply(query, record, stored, picks, sink, *settings)
    want = plain_attention(query, record, stored, picks, sink, *settings)
    inputs = [query, record, sink, *([stored] if picked else [])]
    assert_same((got[0],), (want[0],), inputs)
    torch.testing.assert_close(got[1], want[1], rtol=2e-5, atol=2e-6)


def test_streams():
    generator = torch.Generator().manual_seed(1)
    residual, pre, post = leaf(generator, 7, 4, 48), leaf(generator, 7, 4), leaf(generator, 7, 4)
    y, comb = leaf(generator, 7, 48), leaf(generator, 7, 4, 4)
    assert_same(
        library.Collapse.apply(residual, pre), torch.einsum("tn,tnd->td", pre, residual), [residual, pre]
    )
    want = torch.einsum("tn,td->tnd", post, y) + torch.einsum("tmn,tmd->tnd", comb, residual)
    assert_same(library.Expand.apply(y, residual, post, comb), want, [y, residual, post, comb])


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_mixing_coefficients(iterations):
    generator = torch.Generator().manual_seed(2)
    mixes, base, scale = leaf(generator, 33, 24), leaf(generator, 24), leaf(generator, 3)
    got = library.Mix.apply(mixes, base, scale, iterations, 1e-6)
    assert_same(got, mhc_coefficients(mixes, base, scale, iterations, 1e-6), [mixes, base, scale])


@pytest.mark.parametrize("ratio", [1, 2])
def test_index_scores(ratio):
    generator = torch.Generator().manual_seed(3)
    length, entries = 12, 12 // ratio
    query, weights, keys = leaf(generator, 24, 3, 16), leaf(generator, 24, 3), leaf(generator, 2, entries, 16)
    positions = torch.arange(24) % length
    visible = torch.arange(entries) < ((positions + 1) // ratio).unsqueeze(1)
    dots = torch.einsum("shd,sed->she", query.view(2, -1, 16), keys).view(24, 3, entries)
    want = torch.where(visible, (dots.relu() * weights.unsqueeze(-1)).sum(1), 0)
    assert_same(library.IndexScores.apply(query, weights, keys, ratio, length), want, [query, weights, keys])


def test_tiles_are_rounded_to_the_same_bits():
    generator = torch.Generator().manual_seed(4)
    spread = torch.exp2(torch.randint(-20, 8, (3, 64, 96), generator=generator).float())
    weight = torch.randn(3, 64, 96, generator=generator) * spread
    weight[0, 0, :4] = torch.tensor([0.0, -0.0, 1e-30, 448.0])
    assert torch.equal(torch.ops.deepinfer_training.round_tiles(weight), round_tiles(weight))
