"""Gate of the n-gram memory: golden layers, hand values, float64, the order of roundings, extremes."""

import pytest
import torch
from routes import ROUTES

from deepinfer.errors import UsageError
from deepinfer.kernels import engram_gate
from deepinfer.kernels.engram_gate import memory_gate

EPS = 1e-20


def case(rows, streams, width, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    residual = torch.randn(rows, streams, width, generator=generator).to(dtype)
    key_and_value = torch.randn(rows, (streams + 1) * width, generator=generator).to(dtype)
    return residual, key_and_value, torch.randn(streams, width, generator=generator)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("layer", [1, 3])
def test_golden_layers(route, layer, golden_values, golden_weights):
    q, k = (golden_weights[f"layers.{layer}.engram.{name}_weight"].float() for name in ("q", "k"))
    residual, key_and_value = (golden_values[f"L{layer}.{name}"] for name in ("R_pre_engram", "engram_kv"))
    got = getattr(engram_gate, route)(residual, key_and_value, q * k, EPS)
    torch.testing.assert_close(got, golden_values[f"L{layer}.R_in"], rtol=2.0**-7, atol=1e-6)
    assert (got != golden_values[f"L{layer}.R_in"]).float().mean() < 1e-3


@pytest.mark.parametrize("route", ROUTES)
def test_hand_values(route):
    """Spec 18.8: unit vectors whose product with the weight is the dot; the value is one."""
    dots = torch.tensor([0.25, -0.25, 0.0, -0.0, 4.0])
    residual = torch.ones(5, 1, 16)
    key_and_value = torch.ones(5, 32)
    weight = (dots * 16**0.5 / 16).reshape(5, 1, 1) * torch.ones(16)
    wanted = [0.62245933, 0.37754067, 0.50025000, 0.49975000, 0.88079708]
    for row, want in enumerate(wanted):
        args = (residual[row : row + 1], key_and_value[row : row + 1], weight[row].contiguous(), 0.0)
        got = getattr(engram_gate, route)(*args)
        if dots[row] == 0:  # the sign of a sum of zeros is plus in any order
            want = wanted[2]
        torch.testing.assert_close(got, torch.full((1, 1, 16), 1 + want), rtol=0, atol=2e-6)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("streams", "width"), [(1, 1), (4, 40), (3, 33), (4, 1280)])
def test_close_to_float64(route, streams, width):
    residual, key_and_value, weight = case(6, streams, width, torch.float32)
    r, kv = residual.double(), key_and_value.double().unflatten(1, (streams + 1, width))
    dot = (r * weight.double() * kv[:, :-1]).sum(-1) * width**-0.5
    dot = dot / (r.pow(2).mean(-1) + EPS).sqrt() / (kv[:, :-1].pow(2).mean(-1) + EPS).sqrt()
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp(min=1e-6).sqrt(), dot))
    got = getattr(engram_gate, route)(residual, key_and_value, weight, EPS)
    torch.testing.assert_close(got.double(), r + gate.unsqueeze(-1) * kv[:, -1:], rtol=1e-4, atol=1e-5)


def plain_gate(residual, key, weight):
    """The gate as written in the spec, every operation in float32."""
    dot = (residual * weight * key).sum(-1)
    dot = dot * torch.rsqrt(residual.pow(2).mean(-1) + EPS) * torch.rsqrt(key.pow(2).mean(-1) + EPS)
    dot = dot * residual.shape[-1] ** -0.5
    return torch.sigmoid(torch.copysign(dot.abs().clamp(min=1e-6).sqrt(), dot))


def test_the_reference_computes_in_float32_and_rounds_once(same_bytes):
    residual, key_and_value, weight = case(8, 4, 128, torch.bfloat16)
    key = key_and_value[:, :-128].unflatten(1, (4, 128)).float()
    gate = plain_gate(residual.float(), key, weight)
    same_bytes(memory_gate(residual.float(), key, weight, EPS), gate)
    want = residual.float() + gate.unsqueeze(-1) * key_and_value[:, -128:].float().unsqueeze(1)
    same_bytes(engram_gate.reference(residual, key_and_value, weight, EPS), want.to(residual.dtype))


@pytest.mark.parametrize("route", ROUTES)
def test_zero_rows_are_finite_and_nan_keeps_to_its_stream_or_column(route):
    residual, key_and_value, weight = case(4, 4, 48, torch.float32)
    residual[0], key_and_value[0, : 4 * 48] = 0, 0
    residual[1, 2, 5] = float("nan")
    key_and_value[2, 48 + 3] = float("nan")
    key_and_value[3, 4 * 48 + 7] = float("nan")
    bad = getattr(engram_gate, route)(residual, key_and_value, weight, EPS).isnan()
    assert not bad[0].any()
    assert bad[1].all(-1).tolist() == [False, False, True, False]
    assert bad[2].all(-1).tolist() == [False, True, False, False]
    assert bad[3].all(0).tolist() == [d == 7 for d in range(48)]
    assert bad.sum() == 48 + 48 + 4


def test_wrong_arguments_are_refused():
    residual, key_and_value, weight = case(3, 4, 48, torch.bfloat16)
    for route, error in (("reference", UsageError), ("native", RuntimeError)):
        run = getattr(engram_gate, route)
        with pytest.raises(error, match="engram_gate: key_and_value:? must have shape"):
            run(residual, key_and_value[:, :-48].contiguous(), weight, EPS)
        with pytest.raises(error, match="engram_gate: key_and_value"):
            run(residual, key_and_value.float(), weight, EPS)
        with pytest.raises(error, match="engram_gate: qk_weight:? must have shape"):
            run(residual, key_and_value, weight[:3].contiguous(), EPS)
