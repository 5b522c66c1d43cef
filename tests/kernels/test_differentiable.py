"""The training forms of ops: close to their references, roundings straight through."""

import pytest
import torch

from deepinfer.kernels import (
    dequantize_fp4,
    dequantize_fp8,
    engram_gate,
    engram_gather,
    linear,
    linear_fp8,
    mhc_collapse,
    mhc_expand,
    mhc_mix,
    moe_experts,
    moe_gate,
    quantize_fp4,
    quantize_fp8,
    rms_norm,
    rope,
    shared_expert,
    window_record,
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


PLAIN = [rms_norm, linear, mhc_mix, mhc_collapse, mhc_expand, rope, window_record, moe_gate, engram_gate]


def test_experts_without_rows_take_part_in_no_sum():
    """The weights of an unused expert get a zero gradient, even where they are not finite."""
    x, _, shares, w13, w13_scale, w2, w2_scale, limit, _ = moe_experts.make_inputs(9, torch.float32, 7)
    up, down = (dequantize_fp4_groups(w, s, "e8m0") for w, s in ((w13, w13_scale), (w2, w2_scale)))
    up[1], down[1] = torch.nan, torch.inf
    up, down = up.requires_grad_(), down.requires_grad_()
    ids = torch.tensor([[4, 0, 3]] * 8 + [[2, 5, 0]])
    with differentiable_ops():
        y = moe_experts(x, ids, shares, up, None, down, None, limit, True)
    y.square().sum().backward()
    for matrices in (up, down):
        used = matrices.grad.flatten(1).any(1).tolist()
        assert used == [True, False, True, True, True, True]
        assert matrices.grad.isfinite().all()


@pytest.mark.parametrize("op", PLAIN, ids=lambda op: op.name)
def test_training_form_equals_the_reference(op):
    arguments = op.make_inputs(24, torch.float32, 3)
    # training has no padding rows
    arguments = tuple(
        value.clamp(min=0) if isinstance(value, torch.Tensor) and value.dtype == torch.int64 else value
        for value in arguments
    )
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


def test_expert_training_forms_equal_the_references_on_unpacked_weights():
    """Every pick has an expert here: training has no padding rows."""
    x, ids, shares, w13, w13_scale, w2, w2_scale, limit, _ = moe_experts.make_inputs(24, torch.float32, 5)
    ids = ids.clamp(min=0)
    assert len(ids.unique(dim=0)) > 10  # rows differ in their experts and in the order of them
    up, down = (dequantize_fp4_groups(w, s, "e8m0") for w, s in ((w13, w13_scale), (w2, w2_scale)))
    for quantized in (False, True):
        expected = moe_experts.reference(x, ids, shares, w13, w13_scale, w2, w2_scale, limit, quantized)
        with differentiable_ops():
            actual = moe_experts(x, ids, shares, up, None, down, None, limit, quantized)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3)
    x, routed, w13, w13_scale, w2, w2_scale, limit, _ = shared_expert.make_inputs(24, torch.float32, 6)
    up, down = dequantize_tiles(w13, w13_scale), dequantize_tiles(w2, w2_scale)
    for quantized in (False, True):
        expected = shared_expert.reference(x, routed, w13, w13_scale, w2, w2_scale, limit, quantized)
        with differentiable_ops():
            actual = shared_expert(x, routed, up, None, down, None, limit, quantized)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3)


def test_gathered_memory_is_rounded_straight_through():
    embed = torch.randn(50, 64, generator=torch.Generator().manual_seed(8)).requires_grad_()
    ids = torch.tensor([[3, 7], [7, 0]])
    with differentiable_ops():
        gathered = engram_gather(embed, ids, torch.float32)
    assert torch.equal(gathered, engram_gather(quantize_fp8(embed.detach()), ids, torch.float32))
    gathered.sum().backward()
    assert embed.grad[7].eq(2).all()
    assert embed.grad[1].eq(0).all()


def test_routing_ends_with_the_block():
    arguments = rms_norm.make_inputs(8, torch.float32, 6)
    with pytest.raises(KeyError), differentiable_ops():
        quantize_fp8(arguments[0])
    assert torch.equal(rms_norm(*arguments), rms_norm.reference(*arguments))
