"""Collapse of the streams: float64, the step functions' bits, the rounding before the norm, extremes."""

import pytest
import torch
from routes import ROUTES

from deepinfer.errors import UsageError
from deepinfer.kernels import mhc_collapse, rms_norm
from deepinfer.kernels.mhc_collapse import weigh_streams


def ordered_sum(terms: torch.Tensor, dim: int) -> torch.Tensor:
    """First to last."""
    first, *rest = terms.unbind(dim)
    for term in rest:
        first = first + term
    return first


def collapse(residual: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """The plain form: float32 sum of the streams, rounded once."""
    return ordered_sum(pre.unsqueeze(-1) * residual.float(), 1).to(residual.dtype)


EPS = 1e-20


def case(rows, streams, width, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    residual = torch.randn(rows, streams, width, generator=generator).to(dtype)
    weight = torch.rand(width, generator=generator).to(torch.bfloat16)
    return residual, torch.rand(rows, streams, generator=generator), weight


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("streams", "width"), [(1, 1), (2, 15), (3, 16), (4, 40), (4, 1280), (8, 33)])
def test_close_to_float64(route, streams, width):
    residual, pre, weight = case(5, streams, width, torch.float32)
    total = (pre.double().unsqueeze(-1) * residual.double()).sum(1)
    exact = weight.double() * total / (total.pow(2).mean(-1, keepdim=True) + EPS).sqrt()
    got = getattr(mhc_collapse, route)(residual, pre, weight, EPS)
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("streams", "width"), [(4, 256), (3, 50)])
def test_the_sum_has_the_bits_of_the_step_functions_and_is_rounded_before_the_norm(
    dtype, streams, width, same_bytes
):
    residual, pre, weight = case(11, streams, width, dtype)
    total = collapse(residual, pre)
    same_bytes(weigh_streams(residual, pre), total)
    same_bytes(mhc_collapse.reference(residual, pre, weight, EPS), rms_norm.reference(total, weight, EPS))
    same_bytes(mhc_collapse.native(residual, pre, weight, EPS), rms_norm.native(total, weight, EPS))


@pytest.mark.parametrize("route", ROUTES)
def test_zero_rows_stay_zero_and_nan_fills_its_row(route):
    residual, pre, weight = case(3, 4, 64, torch.bfloat16)
    residual[0], residual[1, 2, 7] = 0, float("inf")
    pre[2, 1] = float("nan")
    y = getattr(mhc_collapse, route)(residual, pre, weight, EPS)
    assert (y[0] == 0).all()
    assert y[1, 7].isnan()
    assert y[2].isnan().all()


def test_wrong_arguments_are_refused():
    residual, pre, weight = case(3, 4, 64, torch.bfloat16)
    for route, error in (("reference", UsageError), ("native", RuntimeError)):
        run = getattr(mhc_collapse, route)
        with pytest.raises(error, match="mhc_collapse: pre:? must have shape"):
            run(residual, pre[:, :3].contiguous(), weight, EPS)
        with pytest.raises(error, match="mhc_collapse: norm_weight:? must have shape"):
            run(residual, pre, weight[:-1].contiguous(), EPS)
        with pytest.raises(error, match="mhc_collapse: pre"):
            run(residual, pre.bfloat16(), weight, EPS)
        with pytest.raises(error, match="mhc_collapse: residual:? must have at least 1 stream"):
            run(residual[:, :0].contiguous(), pre[:, :0].contiguous(), weight, EPS)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("layer", [0, 1, 4, 7])
def test_golden_layers(route, layer, golden_values, golden_weights, same_bytes):
    residual, pre = golden_values[f"L{layer}.R_in"], golden_values[f"L{layer}.pre_in"]
    weight = golden_weights[f"layers.{layer}.attn_norm.weight"]
    got = getattr(mhc_collapse, route)(residual, pre, weight, EPS)
    same_bytes(got, golden_values[f"L{layer}.attn_x"])
