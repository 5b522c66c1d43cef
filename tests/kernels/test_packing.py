"""Packed layouts: back and forth without a change, plain where they do not fit, same bits natively."""

import pytest
import torch

from deepinfer.errors import UsageError
from deepinfer.kernels import linear
from deepinfer.kernels.packing import pack_linear, unpack_linear

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
