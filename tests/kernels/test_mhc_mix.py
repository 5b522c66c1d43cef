"""Hyper-connection coefficients: golden vectors, hand values, float64, scalar float32 emulation."""

import math

import numpy as np
import pytest
import torch
from routes import ROUTES

from deepinfer.errors import UsageError
from deepinfer.kernels import mhc_mix
from deepinfer.kernels.mhc_mix import mhc_coefficients

NAMES = ("pre", "post", "comb")
f32 = np.float32


def from_mixes(route, mixes, base, scale, iters, hc_eps):
    """Coefficients of given m: a row of the residual is m, filled up to unit RMS, and fn picks m out."""
    rows, outputs = mixes.shape
    streams = math.isqrt(outputs + 1) - 1
    width = 64 * int(1 + mixes.pow(2).sum(1).max() / (64 * streams))
    x = torch.zeros(rows, streams * width)
    x[:, :outputs] = mixes
    x[:, -1] = (streams * width - mixes.pow(2).sum(1)).sqrt()
    fn = torch.eye(streams * width)[:outputs].contiguous()
    residual = x.reshape(rows, streams, width)
    return getattr(mhc_mix, route)(residual, fn, base, scale, iters, 0.0, hc_eps)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("iters", [1, 3, 20])
def test_golden_vectors(route, iters, golden_kernels):
    mixes, base, scale = (golden_kernels[f"hc.{name}"].float() for name in ("mixes", "base", "scale"))
    for name, got in zip(NAMES, from_mixes(route, mixes, base, scale, iters, 1e-6), strict=True):
        want = golden_kernels[f"hc.iters{iters}.{name}"]
        torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-6)


def test_golden_vectors_from_the_mixes_themselves(golden_kernels):
    mixes, base, scale = (golden_kernels[f"hc.{name}"].float() for name in ("mixes", "base", "scale"))
    for name, got in zip(NAMES, mhc_coefficients(mixes, base, scale, 20, 1e-6), strict=True):
        torch.testing.assert_close(got, golden_kernels[f"hc.iters20.{name}"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("route", ROUTES)
def test_values_of_the_specification(route):
    mixes = torch.tensor([[math.sin(k + 1) for k in range(24)]])
    base = torch.tensor([math.cos(k) / 2 for k in range(24)])
    pre, post, comb = from_mixes(route, mixes, base, torch.tensor([0.7, 1.3, 2.0]), 20, 1e-6)
    tolerance = {"rtol": 0, "atol": 2e-6}
    wanted_pre = torch.tensor([[0.74819996, 0.71231708, 0.47270581, 0.26410264]])
    wanted_post = torch.tensor([[0.34345782, 0.88974551, 1.58305838, 1.68131192]])
    wanted_comb = torch.tensor(
        [
            [
                [0.39307679, 0.17460543, 0.16945023, 0.26286655],
                [0.03686883, 0.52513010, 0.42139753, 0.01660251],
                [0.00145295, 0.01372473, 0.30936820, 0.67545322],
                [0.56860044, 0.28653874, 0.09978304, 0.04507672],
            ]
        ]
    )
    torch.testing.assert_close(pre, wanted_pre, **tolerance)
    torch.testing.assert_close(post, wanted_post, **tolerance)
    torch.testing.assert_close(comb, wanted_comb, **tolerance)


def fma(a, b, c):
    """One rounding, but for the rare sum that lies on a tie of float32 only after float64 rounded it."""
    return (np.float64(a) * np.float64(b) + np.float64(c)).astype(f32)


def exp_f32(x: np.float32) -> np.float32:
    n = np.rint(x * f32(1.44269504088896341))
    r = fma(n, f32(-0.693359375), x)
    r = fma(n, f32(2.12194440e-4), r)
    p = f32(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = fma(p, r, f32(c))
    return (fma(p, r * r, r) + f32(1)) * f32(2.0 ** int(n))


def halved(lanes):
    for half in (8, 4, 2, 1):
        lanes = lanes[..., :half] + lanes[..., half : 2 * half]
    return lanes[..., 0]


def emulate_row(dots, mean_square, base, scale, iters, rms_eps, hc_eps, n):
    """The scalar second half of the native kernel, operation by operation."""
    rms = f32(1) / np.sqrt(mean_square + f32(rms_eps))
    parts = [0] * n + [1] * n + [2] * (n * n)
    logits = [dots[k] * rms * scale[part] + base[k] for k, part in enumerate(parts)]
    sigmoid = [f32(1) / (f32(1) + exp_f32(-value)) for value in logits[: 2 * n]]
    pre = [value + f32(hc_eps) for value in sigmoid[:n]]
    post = [f32(2) * value for value in sigmoid[n:]]
    comb = np.array(logits[2 * n :], f32).reshape(n, n)

    def ordered_sum(values):
        total = f32(0)
        for value in values:
            total = total + value
        return total

    for row in comb:
        row[:] = [exp_f32(value - row.max()) for value in row]
        row[:] = row / ordered_sum(row) + f32(hc_eps)
    for step in range(2 * iters - 1):
        for line in comb.T if step % 2 == 0 else comb:
            line[:] = line / (ordered_sum(line) + f32(hc_eps))
    return np.array(pre), np.array(post), comb


def test_native_is_the_documented_scalar_computation():
    residual, fn, base, scale, iters, rms_eps, hc_eps = mhc_mix.make_inputs(4, torch.float32, 9)
    got = mhc_mix.native(residual, fn, base, scale, iters, rms_eps, hc_eps)
    flat = residual.flatten(1)
    for row in range(4):
        squares, dots = np.zeros(16, f32), np.zeros((24, 16), f32)
        for step, weight in zip(
            flat[row].numpy().reshape(-1, 16), fn.reshape(24, -1, 16).unbind(1), strict=True
        ):
            squares = squares + step * step
            dots = fma(step, weight.numpy(), dots)
        mean = halved(squares) / f32(flat.shape[1])
        want = emulate_row(halved(dots), mean, base.numpy(), scale.numpy(), iters, rms_eps, hc_eps, 4)
        for part, expected in zip(got, want, strict=True):
            assert (part[row].numpy() == expected).all()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("streams", [1, 2, 3, 4, 8, 16])
def test_close_to_float64_for_any_number_of_streams(route, streams):
    generator = torch.Generator().manual_seed(streams)
    outputs = (2 + streams) * streams
    residual = torch.randn(6, streams, 48, generator=generator)
    fn = torch.randn(outputs, streams * 48, generator=generator) / 10
    base, scale = torch.randn(outputs, generator=generator), torch.tensor([0.7, 1.3, 2.0])
    x = residual.flatten(1).double()
    mixes = (x @ fn.double().T) / (x.pow(2).mean(1, keepdim=True) + 1e-20).sqrt()
    exact = mhc_coefficients(mixes, base.double(), scale.double(), 7, 1e-6)
    for got, want in zip(
        getattr(mhc_mix, route)(residual, fn, base, scale, 7, 1e-20, 1e-6), exact, strict=True
    ):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("route", ROUTES)
def test_columns_sum_to_one_and_extreme_logits_stay_finite(route):
    residual, fn, base, scale, iters, rms_eps, hc_eps = mhc_mix.make_inputs(8, torch.bfloat16, 2)
    run = getattr(mhc_mix, route)
    comb = run(residual, fn, base, scale, iters, rms_eps, hc_eps)[2]
    torch.testing.assert_close(comb.sum(1), torch.ones(8, 4), rtol=0, atol=1e-5)
    for part in run(residual, fn * 1e4, base, scale, iters, rms_eps, hc_eps):
        assert part.isfinite().all()
    for part in run(torch.zeros_like(residual), fn, base, scale, iters, rms_eps, hc_eps):
        assert part.isfinite().all()


def test_wrong_arguments_are_refused():
    residual, fn, base, scale, _, rms_eps, hc_eps = mhc_mix.make_inputs(2, torch.bfloat16, 0)
    for route, error in (("reference", UsageError), ("native", RuntimeError)):
        run = getattr(mhc_mix, route)
        with pytest.raises(error, match="mhc_mix: fn:? must have shape"):
            run(residual, fn[:, :-1].contiguous(), base, scale, 20, rms_eps, hc_eps)
        with pytest.raises(error, match="mhc_mix: sinkhorn_iters:? must be at least 1, got 0"):
            run(residual, fn, base, scale, 0, rms_eps, hc_eps)
        with pytest.raises(error, match="mhc_mix: residual:? must have 1 to 16 streams, got 17"):
            run(torch.zeros(2, 17, 4), fn, base, scale, 20, rms_eps, hc_eps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("streams", "width"), [(1, 7), (3, 50), (4, 700)])
def test_tiles_chunks_and_tails_change_no_byte(dtype, streams, width, same_bytes):
    """Rows alone, by eight, in pairs and past a block of rows; inputs beyond one chunk and not by sixteen."""
    generator = torch.Generator().manual_seed(width)
    outputs = (2 + streams) * streams
    residual = torch.randn(70, streams, width, generator=generator).to(dtype)
    fn = torch.randn(outputs, streams * width, generator=generator) / width**0.5
    rest = (fn, torch.randn(outputs, generator=generator), torch.tensor([0.7, 1.3, 2.0]), 5, 1e-20, 1e-6)
    whole = mhc_mix.native(residual, *rest)
    for rows in (slice(0, 1), slice(69, 70), slice(3, 11), slice(2, 11), slice(5, 70)):
        for part, full in zip(mhc_mix.native(residual[rows].contiguous(), *rest), whole, strict=True):
            same_bytes(part, full[rows])
