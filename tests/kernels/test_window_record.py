"""Window records: the three ops they are made of, float64, padding, extremes, refusals."""

import pytest
import torch
from routes import ROUTES

from deepinfer.errors import UsageError
from deepinfer.kernels import dequantize_fp8, quantize_fp8, rms_norm, rope, window_record

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("quantize", [True, False])
def test_the_bits_are_those_of_norm_rotation_and_quantiser(route, dtype, quantize, same_bytes):
    kv, weight, eps, table, positions, _ = window_record.make_inputs(24, dtype, 1)
    normed = getattr(rms_norm, route)(kv, weight, eps)
    rotated = getattr(rope, route)(normed, table, positions, False)
    want = getattr(quantize_fp8, route)(rotated) if quantize else rotated.float()
    same_bytes(getattr(window_record, route)(kv, weight, eps, table, positions, quantize), want)


@pytest.mark.parametrize("route", ROUTES)
def test_float32_is_close_to_float64(route):
    kv, weight, eps, table, positions, _ = window_record.make_inputs(20, torch.float32, 2)
    exact = weight.double() * kv.double() / (kv.double().pow(2).mean(-1, keepdim=True) + eps).sqrt()
    pairs = exact[:, -32:].reshape(20, 16, 2)
    turn = torch.complex(table[positions, :16].double(), table[positions, 16:].double())
    turned = torch.view_as_real(torch.complex(pairs[..., 0], pairs[..., 1]) * turn).reshape(20, 32)
    exact = torch.cat((exact[:, :-32], turned), dim=1)
    got = getattr(window_record, route)(kv, weight, eps, table, positions, False)
    torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=1e-6)
    record = getattr(window_record, route)(kv, weight, eps, table, positions, True)
    decoded = dequantize_fp8(record, torch.float32).double()
    largest = exact.reshape(20, 3, 32).abs().amax(-1).repeat_interleave(32, 1)
    assert ((decoded - exact).abs() <= 2**-4 * exact.abs() + 2**-9 * largest + 1e-6).all()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("quantize", [True, False])
def test_padding_rows_give_zeros(route, quantize, same_bytes):
    arguments = window_record.make_inputs(9, torch.bfloat16, 3)
    kv, weight, eps, table, positions, _ = arguments
    run = getattr(window_record, route)
    whole = run(kv, weight, eps, table, positions, quantize)
    kv[[2, 8]] = NAN
    positions[[2, 8]] = -1
    padded = run(kv, weight, eps, table, positions, quantize)
    others = [0, 1, 3, 4, 5, 6, 7]
    same_bytes(padded[others], whole[others])
    assert not padded[[2, 8]].any()


@pytest.mark.parametrize("width", [32, 64, 512])
@pytest.mark.parametrize("rotated", [0, 2, 32])
def test_widths(width, rotated, same_bytes):
    generator = torch.Generator().manual_seed(width)
    kv = torch.randn(8, width, generator=generator).to(torch.bfloat16)
    weight, table = torch.ones(width), torch.randn(5, rotated, generator=generator)
    positions = torch.randint(0, 5, (8,), generator=generator)
    got = window_record.native(kv, weight, 1e-6, table, positions, True)
    normed = rms_norm.native(kv, weight, 1e-6)
    turned = rope.native(normed, table, positions, False) if rotated else normed
    same_bytes(got, quantize_fp8.native(turned))


@pytest.mark.parametrize("route", ROUTES)
def test_zeros_stay_and_what_is_not_finite_keeps_to_its_row(route, same_bytes):
    kv, weight, eps, table, positions, _ = window_record.make_inputs(8, torch.float32, 5)
    run = getattr(window_record, route)
    whole = run(kv, weight, eps, table, positions, False)
    kv[1], kv[2, 3], kv[3, 7] = 0, NAN, INF
    got = run(kv, weight, eps, table, positions, False)
    assert not got[1].any()
    assert got[2].isnan().all()
    assert got[3].isnan().any()
    same_bytes(got[[0, 4, 5, 6, 7]], whole[[0, 4, 5, 6, 7]])


def test_wrong_arguments_are_refused():
    kv, weight, eps, table, positions, _ = window_record.make_inputs(3, torch.bfloat16, 0)
    for route, error in (("reference", UsageError), ("native", RuntimeError)):
        run = getattr(window_record, route)
        for wrong in (50, -2, 2**62):
            moved = positions.clone()
            moved[1] = wrong
            with pytest.raises(error, match=r"window_record: positions:? must lie in -1 \.\. 49"):
                run(kv, weight, eps, table, moved, True)
        with pytest.raises(error, match="window_record: table:? must have an even width of at most 96"):
            run(kv, weight, eps, torch.zeros(50, 98), positions, True)
        with pytest.raises(error, match=r"last axis of kv:? must be a positive multiple of 32, got 40"):
            run(kv[:, :40].contiguous(), weight[:40].clone(), eps, table, positions, True)
        with pytest.raises(error, match=r"window_record: norm_weight:? must have shape \[96\]"):
            run(kv, weight[:-1].clone(), eps, table, positions, True)
