"""FP8 records: golden vectors, hand values, every bf16 value, random bit patterns, idempotence."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from routes import ROUTES

from deepinfer.errors import UsageError
from deepinfer.kernels import dequantize_fp8, quantize_fp8

ALL_BF16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def random_floats(seed: int, rows: int) -> torch.Tensor:
    """Uniform bit patterns: every magnitude, infinities and NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(1 << 31), 1 << 31, (rows, 96), generator=generator)
    return bits.to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("route", ROUTES)
def test_golden_vectors(route, golden_kernels, same_bytes):
    record = getattr(quantize_fp8, route)(golden_kernels["fp8_g32.x"])
    codes, scale = golden_kernels["fp8_g32.codes"], golden_kernels["fp8_g32.scale_bytes"]
    same_bytes(record, torch.cat((codes, scale), dim=1))
    same_bytes(getattr(dequantize_fp8, route)(record, torch.bfloat16), golden_kernels["fp8_g32.qdq"])


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("amax", "exponent"), [(448, 0), (449, 1), (224, -1), (300, 0), (1e-4, -22), (3, -7), (0, -22)]
)
def test_scales_of_the_specification(route, amax, exponent):
    x = torch.zeros(1, 32)
    x[0, 9] = -amax
    assert getattr(quantize_fp8, route)(x)[0, 32].item() == exponent + 127


@pytest.mark.parametrize("route", ROUTES)
def test_codes_of_the_specification(route):
    x = torch.zeros(1, 32, dtype=torch.bfloat16)
    x[0, :4] = torch.tensor([3, 0.01, -1, 0.3])
    record = getattr(quantize_fp8, route)(x)
    codes = record[0, :32].view(torch.float8_e4m3fn).float()
    assert codes[:5].tolist() == [384, 1.25, -128, 40, 0]


@pytest.mark.parametrize("anchor", [448.0, 1.0, 2.0**-30, 3.0e38])
def test_native_equals_the_reference_on_every_bf16_value(anchor, same_bytes):
    x = torch.zeros(1 << 16, 32, dtype=torch.bfloat16)
    x[:, 0], x[:, 1] = anchor, ALL_BF16
    same_bytes(quantize_fp8.native(x), quantize_fp8.reference(x))
    neighbours = ALL_BF16.reshape(-1, 32)
    same_bytes(quantize_fp8.native(neighbours), quantize_fp8.reference(neighbours))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_native_equals_the_reference_on_random_bits(seed):
    x = random_floats(seed, 5)
    record = quantize_fp8.reference(x)
    assert torch.equal(quantize_fp8.native(x), record)
    for dtype in (torch.bfloat16, torch.float32):
        got, want = dequantize_fp8.native(record, dtype), dequantize_fp8.reference(record, dtype)
        assert torch.equal(got.nan_to_num(nan=12345.0), want.nan_to_num(nan=12345.0))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), scale=st.sampled_from([1e-6, 1e-3, 1.0, 1e3, 1e30]))
def test_quantising_twice_changes_nothing_and_the_error_is_bounded(seed, scale):
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(seed)) * scale
    record = quantize_fp8(x)
    values = dequantize_fp8(record, torch.float32)
    assert torch.equal(dequantize_fp8(record, torch.bfloat16).float(), values)
    # The record may change: a maximum that rounds down to a power of two halves the scale.
    assert torch.equal(dequantize_fp8(quantize_fp8(values), torch.float32), values)
    step = torch.exp2(record[:, 64:].float() - 127).repeat_interleave(32, 1)
    assert ((values - x).abs() <= torch.maximum(x.abs() / 16, step * 2.0**-10)).all()


@pytest.mark.parametrize("route", ROUTES)
def test_infinities_saturate_and_nan_stays_alone(route):
    x = torch.ones(3, 64)
    x[0, 1], x[1, 1], x[2, 1] = float("inf"), -float("inf"), float("nan")
    record = getattr(quantize_fp8, route)(x)
    assert record[:, 64].tolist() == [120 + 127, 120 + 127, 127 - 8]
    y = getattr(dequantize_fp8, route)(record, torch.float32)
    assert y[0, 1] == float("inf")
    assert y[1, 1] == -float("inf")
    assert (y[:, 32:] == 1).all()
    assert y[2].isnan().nonzero().flatten().tolist() == [1]
    assert (y[2, 2:] == 1).all()


def test_wrong_sizes_are_refused():
    for route, error in (("reference", UsageError), ("native", RuntimeError)):
        with pytest.raises(error, match="quantize_fp8: last axis of x.* multiple of 32, got 48"):
            getattr(quantize_fp8, route)(torch.zeros(2, 48))
        with pytest.raises(error, match="dequantize_fp8: last axis of record.* multiple of 33, got 64"):
            getattr(dequantize_fp8, route)(torch.zeros(2, 64, dtype=torch.uint8), torch.float32)
        with pytest.raises(error, match="out_dtype.* must be bfloat16 or float32"):
            getattr(dequantize_fp8, route)(torch.zeros(2, 66, dtype=torch.uint8), torch.float16)
