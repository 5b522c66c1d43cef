"""Dense linear: float64, mixed dtypes, and the documented order of sums."""

import numpy as np
import pytest
import torch
from routes import ROUTES

from deepinfer.errors import UsageError
from deepinfer.kernels import linear


def dot(x: np.ndarray, w: np.ndarray) -> np.float32:
    """The native order: chains of 256 fused multiply-adds (exact product in float64), added one by one."""
    total = np.float32(0)
    for begin in range(0, len(x), 256):
        chain = np.float32(0)
        for a, b in zip(x[begin : begin + 256], w[begin : begin + 256], strict=True):
            chain = np.float32(np.float64(chain) + np.float64(a) * np.float64(b))
        total = total + chain
    return total


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("inputs", [1, 17, 512, 1500])
@pytest.mark.parametrize("outputs", [1, 3, 24, 130])
def test_close_to_float64_at_ragged_sizes(route, inputs, outputs):
    generator = torch.Generator().manual_seed(inputs)
    x = torch.randn(9, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator)
    got = getattr(linear, route)(x, weight, torch.float32).double()
    exact, size = x.double() @ weight.double().T, x.abs().double() @ weight.abs().double().T
    assert ((got - exact).abs() <= 1e-6 * size).all()


@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_every_mix_of_dtypes(x_dtype, weight_dtype, out_dtype):
    x, weight, _ = linear.make_inputs(6, torch.float32, 2)
    x, weight = x.to(x_dtype), weight.to(weight_dtype)
    rtol, atol = linear.tolerance[out_dtype]
    got, want = linear.native(x, weight, out_dtype), linear.reference(x, weight, out_dtype)
    assert got.dtype == out_dtype
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


@pytest.mark.parametrize("inputs", [16, 40, 1100])
def test_native_sums_in_the_documented_order(inputs):
    generator = torch.Generator().manual_seed(inputs)
    x = torch.randn(5, inputs, generator=generator)
    weight = torch.randn(6, inputs, generator=generator)
    got = linear.native(x, weight, torch.float32).numpy()
    want = np.array([[dot(row, column) for column in weight.numpy()] for row in x.numpy()])
    assert (got == want).all()


def test_more_rows_than_one_block(same_bytes):
    x, weight, dtype = linear.make_inputs(150, torch.bfloat16, 3)
    whole = linear.native(x, weight, dtype)
    for first, last in ((0, 64), (64, 128), (63, 66), (149, 150)):
        same_bytes(linear.native(x[first:last], weight, dtype), whole[first:last])


@pytest.mark.parametrize("outputs", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("inputs", [32, 128, 512])
def test_reference_rows_are_independent_at_narrow_sizes(outputs, inputs, same_bytes, set_threads):
    set_threads(1)
    generator = torch.Generator().manual_seed(outputs)
    x = torch.randn(27, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator)
    whole = linear(x, weight, torch.float32)
    for rows in (1, 2, 5, 8, 16):
        same_bytes(linear(x[:rows], weight, torch.float32), whole[:rows])


def test_wrong_shapes_are_refused():
    x, weight, dtype = linear.make_inputs(2, torch.bfloat16, 0)
    with pytest.raises(UsageError, match=r"linear: weight: must have shape \[any, 160\], got \[72, 159\]"):
        linear(x, weight[:, :-1].contiguous(), dtype)
    with pytest.raises(UsageError, match=r"linear: out_dtype: must be bfloat16 or float32"):
        linear(x, weight, torch.float16)
    with pytest.raises(RuntimeError, match=r"linear: weight must have shape"):
        linear.native(x, weight[:, :-1].contiguous(), dtype)
    with pytest.raises(RuntimeError, match=r"linear: out_dtype must be bfloat16 or float32"):
        linear.native(x, weight, torch.float16)
