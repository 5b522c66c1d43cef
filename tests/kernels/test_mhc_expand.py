"""Expansion of the streams: float64, the step functions' bits, extremes."""

import pytest
import torch
from routes import ROUTES

from deepinfer.errors import UsageError
from deepinfer.kernels import mhc_expand


def ordered_sum(terms: torch.Tensor, dim: int) -> torch.Tensor:
    """First to last."""
    first, *rest = terms.unbind(dim)
    for term in rest:
        first = first + term
    return first


def expand(y: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """The plain form."""
    mixed = ordered_sum(comb.unsqueeze(-1) * residual.float().unsqueeze(2), 1)
    return (post.unsqueeze(-1) * y.float().unsqueeze(1) + mixed).to(residual.dtype)


def case(rows, streams, width, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randn(rows, width, generator=generator).to(dtype)
    residual = torch.randn(rows, streams, width, generator=generator).to(dtype)
    comb = torch.rand(rows, streams, streams, generator=generator)
    return y, residual, torch.rand(rows, streams, generator=generator), comb


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("streams", "width"), [(1, 1), (2, 15), (3, 16), (4, 40), (4, 1280), (8, 33), (17, 4)]
)
def test_both_routes_give_the_bits_of_the_step_functions(dtype, streams, width, same_bytes):
    inputs = case(5, streams, width, dtype)
    want = expand(*inputs)
    for route in ROUTES:
        same_bytes(getattr(mhc_expand, route)(*inputs), want)


@pytest.mark.parametrize("route", ROUTES)
def test_close_to_float64(route):
    y, residual, post, comb = case(6, 4, 50, torch.float32)
    exact = post.double().unsqueeze(-1) * y.double().unsqueeze(1)
    exact = exact + comb.double().transpose(1, 2) @ residual.double()
    got = getattr(mhc_expand, route)(y, residual, post, comb)
    torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("route", ROUTES)
def test_nan_touches_its_column_alone(route):
    y, residual, post, comb = case(3, 4, 40, torch.bfloat16)
    y[0, 3], residual[1, 2, 39] = float("nan"), float("nan")
    bad = getattr(mhc_expand, route)(y, residual, post, comb).isnan()
    assert bad[0, :, 3].all()
    assert bad[1, :, 39].all()
    assert bad.sum() == 8


def test_wrong_arguments_are_refused():
    y, residual, post, comb = case(3, 4, 40, torch.bfloat16)
    for route, error in (("reference", UsageError), ("native", RuntimeError)):
        run = getattr(mhc_expand, route)
        with pytest.raises(error, match="mhc_expand: residual"):
            run(y, residual.float(), post, comb)
        with pytest.raises(error, match="mhc_expand: residual:? must have shape"):
            run(y[:, :-1].contiguous(), residual, post, comb)
        with pytest.raises(error, match="mhc_expand: comb:? must have shape"):
            run(y, residual, post, comb[:, :3].contiguous())
        with pytest.raises(error, match="mhc_expand: residual:? must have at least 1 stream"):
            run(y, residual[:, :0].contiguous(), post[:, :0].contiguous(), comb[:, :0, :0].contiguous())


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("layer", [0, 1, 4, 7])
def test_golden_layers(route, layer, golden_values, same_bytes):
    names = ("attn_y", "R_in", "attn_post", "attn_comb")
    got = getattr(mhc_expand, route)(*(golden_values[f"L{layer}.{name}"] for name in names))
    same_bytes(got, golden_values[f"L{layer}.R_mid"])
