"""RMSNorm: golden vectors, float64, and a scalar float32 emulation of the native order of sums."""

import numpy as np
import pytest
import torch
from routes import ROUTES

from deepinfer.errors import UsageError
from deepinfer.kernels import rms_norm

EPS = 1e-20


def sum_of_squares(row: np.ndarray) -> np.float32:
    padded = np.zeros(-(-len(row) // 16) * 16, np.float32)
    padded[: len(row)] = row
    lanes = np.zeros(16, np.float32)
    for step in padded.reshape(-1, 16):
        lanes = lanes + step * step
    for half in (8, 4, 2, 1):
        lanes = lanes[:half] + lanes[half : 2 * half]
    return lanes[0]


@pytest.mark.parametrize("route", ROUTES)
def test_golden_vectors(route, golden_kernels, same_bytes):
    y = getattr(rms_norm, route)(golden_kernels["rmsnorm.x"], golden_kernels["rmsnorm.w"], EPS)
    same_bytes(y, golden_kernels["rmsnorm.y"])


@pytest.mark.parametrize("route", ROUTES)
def test_float32_is_close_to_float64(route):
    x, weight, _ = rms_norm.make_inputs(50, torch.float32, 0)
    exact = weight.double() * x.double() / (x.double().pow(2).mean(-1, keepdim=True) + EPS).sqrt()
    torch.testing.assert_close(getattr(rms_norm, route)(x, weight, EPS).double(), exact, rtol=5e-7, atol=1e-9)


@pytest.mark.parametrize("size", [1, 15, 16, 40, 1280])
def test_native_sums_in_the_documented_order(size):
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(3, size, generator=generator)
    weight = torch.rand(size, generator=generator)
    y = rms_norm.native(x, weight, 1e-6)
    for row, got in zip(x.numpy(), y.numpy(), strict=True):
        mean = sum_of_squares(row) / np.float32(size) + np.float32(1e-6)
        scale = np.float32(1) / np.sqrt(mean)
        assert (weight.numpy() * (row * scale) == got).all()


@pytest.mark.parametrize("route", ROUTES)
def test_zero_rows_stay_zero_and_infinities_give_nan(route):
    x = torch.zeros(3, 64)
    x[1, 5], x[2, 5] = float("inf"), float("nan")
    y = getattr(rms_norm, route)(x, torch.ones(64), EPS)
    assert (y[0] == 0).all()
    assert y[1, 5].isnan()
    assert y[2].isnan().all()


@pytest.mark.parametrize("route", ROUTES)
def test_leading_axes_are_kept(route, same_bytes):
    x, weight, eps = rms_norm.make_inputs(12, torch.bfloat16, 1)
    run = getattr(rms_norm, route)
    same_bytes(run(x.reshape(3, 4, 128), weight, eps), run(x, weight, eps).reshape(3, 4, 128))


def test_wrong_weight_is_refused():
    x, _, eps = rms_norm.make_inputs(2, torch.bfloat16, 0)
    with pytest.raises(UsageError, match=r"rms_norm: weight: must have shape \[128\], got \[7\]"):
        rms_norm(x, torch.ones(7), eps)
    with pytest.raises(RuntimeError, match=r"rms_norm: weight must have shape \[128\].*got \[7\]"):
        rms_norm.native(x, torch.ones(7), eps)
