"""FP4 records in both scale formats: golden vectors, hand values, every bf16 value, random bit patterns."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from routes import ROUTES

from deepinfer.errors import UsageError
from deepinfer.kernels import dequantize_fp4, quantize_fp4
from deepinfer.kernels.formats import e4m3_to_float, e8m0_to_float

FORMATS = ("e8m0", "e4m3")
GROUP = {"e8m0": 32, "e4m3": 16}
ALL_BF16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def one_group(scale_format: str, *values: float) -> torch.Tensor:
    x = torch.zeros(1, GROUP[scale_format], dtype=torch.bfloat16)
    x[0, : len(values)] = torch.tensor(values)
    return x


def scale_of(record: torch.Tensor, scale_format: str) -> float:
    byte = record[0, GROUP[scale_format] // 2]
    return (e8m0_to_float(byte) if scale_format == "e8m0" else e4m3_to_float(byte)).item()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("scale_format", "name"), [("e8m0", "fp4_g32"), ("e4m3", "fp4_g16")])
def test_golden_vectors(route, scale_format, name, golden_kernels, same_bytes):
    record = getattr(quantize_fp4, route)(golden_kernels["fp8_g32.x"], scale_format)
    packed, scale = golden_kernels[f"{name}.packed"], golden_kernels[f"{name}.scale_bytes"]
    same_bytes(record, torch.cat((packed, scale), dim=1))
    values = getattr(dequantize_fp4, route)(record, scale_format, torch.bfloat16)
    same_bytes(values, golden_kernels[f"{name}.qdq"])


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("scale_format", "amax", "scale"),
    [
        ("e8m0", 6.0, 1.0),
        ("e8m0", 6.0625, 2.0),
        ("e8m0", 0.0, 2.0**-126),
        ("e4m3", 7.0, 1.125),
        ("e4m3", 7.5, 1.25),
        ("e4m3", 6.375, 1.0),
        ("e4m3", 3008.0, 448.0),
        ("e4m3", 0.0, 2.0**-9),
    ],
)
def test_scales_of_the_specification(route, scale_format, amax, scale):
    record = getattr(quantize_fp4, route)(one_group(scale_format, -amax), scale_format)
    assert scale_of(record, scale_format) == scale


@pytest.mark.parametrize("route", ROUTES)
def test_values_of_the_specification(route):
    ties = one_group("e8m0", 6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5)
    quantize, dequantize = getattr(quantize_fp4, route), getattr(dequantize_fp4, route)
    assert dequantize(quantize(ties, "e8m0"), "e8m0", torch.float32)[0, :8].tolist() == [
        6,
        0,
        1,
        1,
        2,
        2,
        4,
        4,
    ]
    x = one_group("e4m3", 7, 1, -3.5)
    assert dequantize(quantize(x, "e4m3"), "e4m3", torch.float32)[0, :3].tolist() == [6.75, 1.125, -3.375]


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("anchor", [6.0, 6.5, 2.0**-20, 2688.0])
def test_native_equals_the_reference_on_every_bf16_value(scale_format, anchor, same_bytes):
    x = torch.zeros(1 << 16, GROUP[scale_format], dtype=torch.bfloat16)
    x[:, 0], x[:, 1] = anchor, ALL_BF16
    same_bytes(quantize_fp4.native(x, scale_format), quantize_fp4.reference(x, scale_format))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), scale_format=st.sampled_from(FORMATS))
def test_native_equals_the_reference_on_random_bits(seed, scale_format):
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(1 << 31), 1 << 31, (7, 64), generator=generator)
    record = quantize_fp4.reference(bits.to(torch.int32).view(torch.float32), scale_format)
    assert torch.equal(quantize_fp4.native(bits.to(torch.int32).view(torch.float32), scale_format), record)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), scale_format=st.sampled_from(FORMATS))
def test_any_bytes_dequantise_alike_and_exactly(seed, scale_format):
    generator = torch.Generator().manual_seed(seed)
    size = 2 * (GROUP[scale_format] // 2 + 1)
    record = torch.randint(0, 256, (4, size), generator=generator, dtype=torch.uint8)
    got, want = (getattr(dequantize_fp4, route)(record, scale_format, torch.float32) for route in ROUTES)
    assert torch.equal(got.nan_to_num(nan=12345.0), want.nan_to_num(nan=12345.0))
    narrow = dequantize_fp4.native(record, scale_format, torch.bfloat16).float()
    assert torch.equal(narrow.nan_to_num(nan=12345.0), want.nan_to_num(nan=12345.0))


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("route", ROUTES)
def test_infinities_saturate_and_nan_takes_its_group(route, scale_format):
    group = GROUP[scale_format]
    x = torch.ones(2, 2 * group)
    x[0, 1], x[1, 1] = -float("inf"), float("nan")
    quantize, dequantize = getattr(quantize_fp4, route), getattr(dequantize_fp4, route)
    y = dequantize(quantize(x, scale_format), scale_format, torch.float32)
    assert y[0, 1] <= -2688
    assert not y[0].isnan().any()
    assert y[1, :group].isnan().all()
    assert not y[:, group:].isnan().any()


def test_wrong_arguments_are_refused():
    for route, error in (("reference", UsageError), ("native", RuntimeError)):
        with pytest.raises(error, match="quantize_fp4: scale_format:? must be 'e8m0' or 'e4m3', got 'e5m2'"):
            getattr(quantize_fp4, route)(torch.zeros(2, 32), "e5m2")
        with pytest.raises(error, match="quantize_fp4: last axis of x.* multiple of 32, got 48"):
            getattr(quantize_fp4, route)(torch.zeros(2, 48), "e8m0")
        with pytest.raises(error, match="dequantize_fp4: last axis of record.* multiple of 9, got 64"):
            getattr(dequantize_fp4, route)(torch.zeros(2, 64, dtype=torch.uint8), "e4m3", torch.float32)
