"""Number formats against brute force: nearest value by search, ties to the even code."""

import pytest
import torch

from deepinfer.kernels.formats import (
    e2m1_to_float,
    e4m3_to_float,
    e8m0_to_float,
    float_to_e2m1,
    float_to_e4m3,
    float_to_e8m0_ceil,
    pack_nibbles,
)

ALL_BF16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()


def nearest(values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Index of the nearest entry of an ascending table of magnitudes, ties to the even index."""
    gaps = (values.abs().double()[:, None] - table.double()).abs()
    best = gaps.min(1, keepdim=True).values
    indices = torch.arange(len(table))
    tied = gaps == best
    even = tied & (indices % 2 == 0)
    wanted = torch.where(even.any(1, keepdim=True), even, tied)
    return wanted.int().argmax(1)


def test_e4m3_codes_of_every_bf16_value():
    finite = ALL_BF16[ALL_BF16.isfinite()]
    table = e4m3_to_float(torch.arange(127, dtype=torch.uint8))
    assert (table[1:] > table[:-1]).all()
    assert table[-1] == 448
    want = nearest(finite.clamp(-448, 448), table) + 128 * finite.signbit().int()
    assert torch.equal(float_to_e4m3(finite).int(), want.int())


def test_e4m3_codes_round_trip_and_specials():
    codes = torch.arange(256, dtype=torch.uint8)
    finite = codes[codes % 128 != 127]
    assert torch.equal(float_to_e4m3(e4m3_to_float(finite)), finite)
    assert e4m3_to_float(torch.tensor([0x7F, 0xFF], dtype=torch.uint8)).isnan().all()
    specials = torch.tensor([float("inf"), -float("inf"), float("nan"), -0.0])
    assert float_to_e4m3(specials).tolist() == [0x7E, 0xFE, 0x7F, 0x80]


def test_e2m1_codes_of_every_bf16_value():
    values = ALL_BF16[~ALL_BF16.isnan()]
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    want = nearest(values.clamp(-6, 6), table) + 8 * values.signbit().int()
    assert torch.equal(float_to_e2m1(values).int(), want.int())


def test_e2m1_golden_ties(golden_kernels):
    codes = float_to_e2m1(golden_kernels["e2m1_ties.in"].float())
    assert torch.equal(e2m1_to_float(pack_nibbles(codes)), golden_kernels["e2m1_ties.out"])


def test_nibbles_of_the_specification():
    assert e2m1_to_float(torch.tensor([0x21, 0xF7], dtype=torch.uint8)).tolist() == [0.5, 1.0, 6.0, -6.0]


def test_every_byte_is_the_two_codes_of_its_nibbles_low_first():
    codes = torch.arange(256, dtype=torch.uint8)
    single = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    single = torch.cat((single, -single))
    want = torch.stack((single[(codes & 0xF).long()], single[(codes >> 4).long()]), dim=-1)
    for shape in ((256,), (4, 64), (2, 16, 8)):
        got = e2m1_to_float(codes.view(shape))
        assert torch.equal(got.view(torch.int32), want.view(*shape[:-1], -1).view(torch.int32))
    columns = e2m1_to_float(codes.view(16, 16).T)
    assert torch.equal(columns, e2m1_to_float(codes.view(16, 16).T.contiguous()))
    assert e2m1_to_float(codes.view(16, 16)[:0]).shape == (0, 32)


def test_e4m3_codes_are_what_torch_takes_them_for():
    codes = torch.arange(256, dtype=torch.uint8).view(4, 64)
    want = codes.view(torch.float8_e4m3fn).to(torch.float32)
    assert torch.equal(e4m3_to_float(codes).view(torch.int32), want.view(torch.int32))


def test_e8m0_is_a_power_of_two_and_255_is_nan():
    values = e8m0_to_float(torch.arange(256, dtype=torch.uint8))
    assert values[:255].double().log2().tolist() == list(range(-127, 128))
    assert values[255].isnan()


@pytest.mark.parametrize("exponent", [-126, -22, 0, 1, 100])
def test_the_ceiling_of_a_power_of_two_is_itself(exponent):
    exact = torch.tensor(2.0**exponent)
    above = torch.nextafter(exact, torch.tensor(float("inf")))
    assert float_to_e8m0_ceil(exact).item() == exponent + 127
    assert float_to_e8m0_ceil(above).item() == exponent + 128
