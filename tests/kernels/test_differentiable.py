"""The training forms of ops: close to their references, roundings straight through."""

import pytest
import torch

from deepinfer.kernels import (
    dequantize_fp4,
    dequantize_fp8,
    linear,
    linear_fp4,
    linear_fp8,
    mhc_mix,
    quantize_fp4,
    quantize_fp8,
    rms_norm,
)
from deepinfer.kernels.differentiable import (
    differentiable_ops,
    round_bf16,
    round_fp4,
    round_fp8,
    round_tiles,
)
from deepinfer.kernels.formats import dequantize_fp4_groups
from deepinfer.kernels.linear_fp8 import dequantize_tiles


def test_rounding_is_idempotent_and_straight_through():
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(5), requires_grad=True)
    for rounding in (round_fp8, round_tiles, lambda value: round_fp4(value, "e8m0")):
        rounded = rounding(x)
        assert not torch.equal(rounded, x)
        assert torch.equal(rounding(rounded.detach()), rounded)
        x.grad = None
        (3 * rounding(x)).sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 3))


def test_rounding_gives_what_the_quantisers_store():
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(6))
    assert torch.equal(round_fp8(x), dequantize_fp8(quantize_fp8(x), torch.float32))
    for scale_format in ("e8m0", "e4m3"):
        stored = dequantize_fp4(quantize_fp4(x, scale_format), scale_format, torch.float32)
        assert torch.equal(round_fp4(x, scale_format), stored)


def test_bf16_rounding_keeps_bf16_values():
    x = torch.randn(64, generator=torch.Generator().manual_seed(7))
    assert torch.equal(round_bf16(x), x.bfloat16().float())


@pytest.mark.parametrize("op", [rms_norm, linear, mhc_mix], ids=lambda op: op.name)
def test_training_form_equals_the_reference(op):
    arguments = op.make_inputs(24, torch.float32, 3)
    expected = op.reference(*arguments)
    with differentiable_ops():
        actual = op(*arguments)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_fp8_training_form_equals_the_reference_on_unpacked_weights():
    x, weight, scale, _ = linear_fp8.make_inputs(24, torch.float32, 4)
    for quantized in (False, True):
        expected = linear_fp8.reference(x, weight, scale, quantized)
        with differentiable_ops():
            actual = linear_fp8(x, dequantize_tiles(weight, scale), None, quantized)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_fp4_training_form_equals_the_reference_on_unpacked_weights():
    """Every pick has an expert here: training has no padding rows."""
    x, weight, scale, expert_ids, _ = linear_fp4.make_inputs(24, torch.float32, 5)
    expert_ids = expert_ids.clamp(min=0)
    for quantized in (False, True):
        expected = linear_fp4.reference(x, weight, scale, expert_ids, quantized)
        with differentiable_ops():
            matrices = dequantize_fp4_groups(weight, scale, "e8m0")
            actual = linear_fp4(x, matrices, None, expert_ids, quantized)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_routing_ends_with_the_block():
    arguments = rms_norm.make_inputs(8, torch.float32, 6)
    with pytest.raises(KeyError), differentiable_ops():
        quantize_fp8(arguments[0])
    assert torch.equal(rms_norm(*arguments), rms_norm.reference(*arguments))
