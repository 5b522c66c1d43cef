"""Packed layouts: back and forth without a change, plain where they do not fit, same bits natively."""

import pytest
import torch

from deepinfer.errors import UsageError
from deepinfer.kernels import linear, linear_fp4, linear_fp8
from deepinfer.kernels.formats import FP8_GROUP, e4m3_to_float, e8m0_to_float
from deepinfer.kernels.packing import (
    pack_linear,
    pack_linear_fp4,
    pack_linear_fp8,
    unpack_linear,
    unpack_linear_fp4,
    unpack_linear_fp8,
)

ROUTES = ("reference", "native")


def matrix(outputs: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(outputs * 7919 + inputs)
    return torch.randn(outputs, inputs, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_linear_weight_comes_back_unchanged(dtype, same_bytes):
    weight = matrix(48, 70, dtype)
    packed = pack_linear(weight)
    assert packed.shape == (3, 70, 16)
    assert packed.is_contiguous()
    same_bytes(unpack_linear(packed), weight)
    same_bytes(unpack_linear(weight), weight)


@pytest.mark.parametrize(
    ("outputs", "inputs", "dtype"),
    [(40, 64, torch.float32), (32, 7, torch.bfloat16), (0, 8, torch.float32), (16, 0, torch.float32)],
)
def test_what_does_not_fit_stays_plain(outputs, inputs, dtype):
    weight = matrix(outputs, inputs, dtype)
    assert pack_linear(weight) is weight


@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 2), (144, 600), (32, 1026)])
def test_packed_and_plain_linear_give_the_same_bytes(
    route, x_dtype, weight_dtype, outputs, inputs, same_bytes
):
    weight = matrix(outputs, inputs, weight_dtype)
    packed = pack_linear(weight)
    assert packed.dim() == 3
    run = getattr(linear, route)
    for rows in (1, 2, 5, 7, 16, 70):
        x = matrix(rows, inputs, x_dtype)
        same_bytes(run(x, packed, torch.float32), run(x, weight, torch.float32))


def fp8_matrix(groups: int, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every code but NaN, every scale that keeps sums finite."""
    generator = torch.Generator().manual_seed(outputs + inputs)
    weight = torch.randint(0, 256, (groups, outputs, inputs), generator=generator, dtype=torch.uint8)
    weight[weight % 128 == 127] = 0
    tiles = (groups, -(-outputs // 32), -(-inputs // 32))
    return weight, torch.randint(0, 220, tiles, generator=generator, dtype=torch.uint8)


def fp4_matrix(experts: int, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(outputs + inputs)
    weight = torch.randint(0, 256, (experts, outputs, inputs // 2), generator=generator, dtype=torch.uint8)
    scale = torch.randint(0, 240, (experts, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
    return weight, scale


@pytest.mark.parametrize(("outputs", "inputs"), [(48, 96), (64, 32)])
def test_an_fp8_weight_comes_back_unchanged(outputs, inputs, same_bytes):
    weight, scale = fp8_matrix(2, outputs, inputs)
    packed, packed_scale = pack_linear_fp8(weight, scale)
    assert packed.shape == (2, outputs // 16, inputs, 16)
    assert packed_scale.shape == (2, outputs // 16, inputs // 32, 16)
    codes, rows = unpack_linear_fp8(packed, packed_scale)
    same_bytes(codes, weight)
    same_bytes(rows, scale.repeat_interleave(32, 1)[:, :outputs])


def test_a_nan_code_becomes_a_nan_scale_and_gives_the_same_product():
    weight, scale = fp8_matrix(1, 32, 64)
    weight[0, 5, 40], weight[0, 9, 1] = 0x7F, 0xFF
    packed, packed_scale = pack_linear_fp8(weight, scale)
    values = e4m3_to_float(weight) * e8m0_to_float(scale).repeat_interleave(32, 1).repeat_interleave(32, 2)
    assert values.isnan().sum() == 2
    rows = unpack_linear_fp8(packed, packed_scale)[1]
    assert (rows == 255).nonzero().tolist() == [[0, 5, 1], [0, 9, 0]]
    for route in ROUTES:
        y = getattr(linear_fp8, route)(torch.ones(3, 1, 64), packed, packed_scale, False)
        assert y.isnan().all(0).nonzero().tolist() == [[0, 5], [0, 9]]
        assert y.isnan().sum() == 6


@pytest.mark.parametrize(("outputs", "inputs"), [(48, 96), (16, 32)])
def test_an_fp4_weight_comes_back_unchanged(outputs, inputs, same_bytes):
    weight, scale = fp4_matrix(3, outputs, inputs)
    packed, packed_scale = pack_linear_fp4(weight, scale)
    assert packed.shape == (3, outputs // 16, inputs // 2, 16)
    codes, rows = unpack_linear_fp4(packed, packed_scale)
    same_bytes(codes, weight)
    same_bytes(rows, scale)
    assert unpack_linear_fp4(weight, scale)[0] is weight


def test_quantised_weights_that_do_not_fit_stay_plain():
    for outputs, inputs in ((40, 64), (48, 75)):
        weight, scale = fp8_matrix(1, outputs, inputs)
        assert pack_linear_fp8(weight, scale)[0] is weight
    weight, scale = fp4_matrix(2, 24, 64)
    assert pack_linear_fp4(weight, scale)[0] is weight


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (144, 608)])
def test_packed_and_plain_fp8_give_the_same_bytes(route, quantize, dtype, outputs, inputs, same_bytes):
    weight, scale = fp8_matrix(2, outputs, inputs)
    packed = pack_linear_fp8(weight, scale)
    run = getattr(linear_fp8, route)
    for rows in (1, 2, 3, 4, 7, 70):
        x = matrix(rows, 2 * inputs, dtype).reshape(rows, 2, inputs)
        same_bytes(run(x, *packed, quantize), run(x, weight, scale, quantize))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (144, 608)])
def test_packed_and_plain_fp4_give_the_same_bytes(route, quantize, dtype, outputs, inputs, same_bytes):
    weight, scale = fp4_matrix(3, outputs, inputs)
    packed = pack_linear_fp4(weight, scale)
    run = getattr(linear_fp4, route)
    for rows in (1, 2, 3, 4, 7, 70):
        x = matrix(rows, inputs, dtype).unsqueeze(1)
        ids = torch.randint(-1, 3, (rows, 2), generator=torch.Generator().manual_seed(rows))
        same_bytes(run(x, *packed, ids, quantize), run(x, weight, scale, ids, quantize))


def test_packed_products_keep_their_bytes_at_every_row_count_and_thread_count(same_bytes, set_threads):
    """Every tile height, the direct and the blocked form, several chunks of rows and of columns."""
    inputs, outputs = 544, 208
    dense = matrix(outputs, inputs, torch.float32)
    fp8, fp4 = (
        pack_linear_fp8(*fp8_matrix(1, outputs, inputs)),
        pack_linear_fp4(*fp4_matrix(1, outputs, inputs)),
    )
    x = matrix(400, inputs, torch.float32)
    runs = {
        "float32": lambda x: linear.native(x, pack_linear(dense), torch.float32),
        "bfloat16": lambda x: linear.native(x, pack_linear(dense.bfloat16()), torch.float32),
        "fp8": lambda x: linear_fp8.native(x.unsqueeze(1), *fp8, False),
        "fp4": lambda x: linear_fp4.native(
            x.unsqueeze(1), *fp4, torch.zeros(x.shape[0], 1, dtype=torch.int64), False
        ),
    }
    for run in runs.values():
        set_threads(1)
        whole = run(x)
        for rows in (1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 16, 64, 191, 192, 193, 199, 256):
            same_bytes(run(x[:rows]), whole[:rows])
            same_bytes(run(x[400 - rows :]), whole[400 - rows :])
        set_threads(2)
        for rows in (1, 3, 16, 64, 400):
            same_bytes(run(x[:rows]), whole[:rows])


def test_scales_at_both_ends_are_exact():
    """A unit vector reads the weights: also where a scale alone would overflow or is subnormal."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = torch.where(codes % 128 == 127, 0, codes)
    weight = codes.reshape(1, 16, 16).repeat(1, 1, 2)
    for byte in (0, 1, 8, 127, 246, 247, 254):
        scale = torch.full((1, 1, 1), byte, dtype=torch.uint8)
        want = e4m3_to_float(weight[0]) * e8m0_to_float(scale).reshape(())
        got = linear_fp8.native(torch.eye(FP8_GROUP).unsqueeze(1), *pack_linear_fp8(weight, scale), False)
        fine = want.isfinite().all(1)
        assert fine.any()
        assert torch.equal(got[:, 0].T[fine], want[fine])


def test_wrong_packed_scales_are_refused():
    x = torch.zeros(2, 1, 64)
    weight, scale = pack_linear_fp8(*fp8_matrix(1, 32, 64))
    with pytest.raises(RuntimeError, match=r"linear_fp8: scale must have shape \[1, 2, 2, 16\]"):
        linear_fp8.native(x, weight, scale[:, :1].contiguous(), True)
    with pytest.raises(UsageError, match="linear_fp8: scale: must have shape"):
        linear_fp8(x, weight, scale[:, :1].contiguous(), True)
    weight, scale = pack_linear_fp4(*fp4_matrix(2, 32, 64))
    ids = torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=r"linear_fp4: weight must have shape \[-1, -1, 32, 16\]"):
        linear_fp4.native(x, weight[:, :, :16].contiguous(), scale, ids, True)
    with pytest.raises(UsageError, match="linear_fp4: weight: must have shape"):
        linear_fp4(x, weight[:, :, :16].contiguous(), scale, ids, True)


def test_wrong_packed_shapes_are_refused():
    x = torch.zeros(2, 7)
    for weight, message in (
        (torch.zeros(1, 7, 8), r"weight must have shape \[-1, 7, 16\]"),
        (torch.zeros(1, 7, 16, dtype=torch.bfloat16), "weight is packed in pairs"),
    ):
        with pytest.raises(RuntimeError, match=message):
            linear.native(x, weight, torch.float32)
        with pytest.raises(UsageError, match="linear: "):
            linear(x, weight, torch.float32)
