"""Records with a bfloat16 tail: their bytes, and how attention writes and reads them."""

import pytest
import torch
from routes import ROUTES

from deepinfer.kernels import (
    dequantize_tail,
    quantize_tail,
    rms_norm,
    rope,
    sparse_attention,
    window_record,
)
from deepinfer.kernels.quantize_tail import tail_record_bytes, tail_record_values


def test_the_released_record_has_584_bytes():
    """448 codes, 64 bfloat16, 7 scales and one byte of padding (12.5)."""
    assert tail_record_bytes(512, 64) == 584
    assert tail_record_values(584, 64) == 512
    for size, tail in ((64, 32), (96, 16), (512, 64), (1024, 128)):
        assert tail_record_values(tail_record_bytes(size, tail), tail) == size


@pytest.mark.parametrize("route", ROUTES)
def test_codes_scales_and_tail_lie_where_they_should(route):
    x = torch.zeros(1, 144)
    x[0, 0], x[0, 70], x[0, 128] = 448.0, -0.75, 1.0 + 2**-8
    record = getattr(quantize_tail, route)(x, 16)
    assert record.shape == (1, 128 + 32 + 8)
    assert record[0, 0] == 0x7E  # the largest code, at scale one
    scales = record[0, 160:]
    assert scales.tolist() == [127, 127 - 9, 0, 0, 0, 0, 0, 0]
    values = getattr(dequantize_tail, route)(record, 144, 16, torch.float32)
    assert (values[0, 0], values[0, 70], values[0, 128]) == (448.0, -0.75, 1.0)  # ties to even in bfloat16


@pytest.mark.parametrize("route", ROUTES)
def test_records_are_exact_in_bfloat16_and_idempotent(route):
    x = torch.randn(9, 112, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    encode, decode = getattr(quantize_tail, route), getattr(dequantize_tail, route)
    record = encode(x, 32)
    values = decode(record, 112, 32, torch.bfloat16)
    assert torch.equal(values[:, 80:], x[:, 80:])
    assert torch.equal(values.float(), decode(record, 112, 32, torch.float32))
    assert (values - x).float().abs().max() <= 2**-4 * x.abs().max()
    assert torch.equal(encode(values, 32), record)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("size", "tail"), [(512, 64), (96, 16), (72, 70), (130, 2)])
def test_records_of_odd_values_have_the_bytes_of_the_definition(route, dtype, size, tail, same_bytes):
    x = torch.randn(7, size, generator=torch.Generator().manual_seed(size)).to(dtype)
    x[1, 0], x[2, -1], x[3, :2], x[4], x[5] = float("nan"), float("nan"), float("inf"), 3e38, -0.0
    record = getattr(quantize_tail, route)(x, tail)
    clear = [0, 1, 3, 4, 5, 6]  # which NaN a rounded NaN becomes is nobody's promise
    same_bytes(record[clear], quantize_tail.reference(x, tail)[clear])
    values = getattr(dequantize_tail, route)(record, size, tail, dtype)
    want = dequantize_tail.reference(record, size, tail, dtype)
    assert torch.equal(values.isnan(), want.isnan())
    same_bytes(values.nan_to_num(nan=1.0), want.nan_to_num(nan=1.0))
    assert getattr(quantize_tail, route)(x[:0], tail).shape == (0, record.shape[1])


@pytest.mark.parametrize("route", ROUTES)
def test_window_records_are_norm_rotation_and_record(route):
    kv, weight, eps, table, positions, _ = window_record.make_inputs(11, torch.bfloat16, 2)
    positions[4] = -1
    got = getattr(window_record, route)(kv, weight, eps, table, positions, True, 16)
    want = quantize_tail(rope(rms_norm(kv, weight, eps), table, positions, False), 16)
    want[4] = 0
    assert torch.equal(got, want)


@pytest.mark.parametrize("with_mass", [False, True])
def test_attention_reads_records_with_a_tail(with_mass):
    """The same as over the vectors that the records hold."""
    inputs = list(sparse_attention.make_inputs(9, torch.float32, 5))
    width, tail = inputs[0].shape[2], 32
    inputs[0] = inputs[0].to(torch.bfloat16)
    plain, mixed = list(inputs), list(inputs)
    for place in (1, 2, 3):  # record, ring, compressed
        mixed[place] = quantize_tail(inputs[place], tail)
        plain[place] = dequantize_tail(mixed[place], width, tail, torch.float32)
    mixed[13], mixed[14], plain[14] = True, with_mass, with_mass
    want = sparse_attention.reference(*plain)
    for run in (getattr(sparse_attention, route) for route in ROUTES):
        for got, expected in zip(run(*mixed, tail), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=2.0**-7, atol=2e-6)
    assert [r.shape for r in sparse_attention.fake(*mixed, tail)] == [r.shape for r in want]
