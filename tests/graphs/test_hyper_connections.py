"""Residual streams: the golden chain of collapse, mix, expand, and hand-made cases (spec 3.3-3.5, 18.5)."""

import pytest
import torch
from graph_steps import bf16_ulps
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.graphs.context import Scope
from deepinfer.graphs.hyper_connections import first_stream, mix
from deepinfer.kernels import mhc_expand, rms_norm
from deepinfer.kernels.mhc_collapse import weigh_streams
from deepinfer.kernels.mhc_mix import mhc_coefficients

LAYERS = range(8)


@pytest.mark.parametrize("layer", LAYERS)
def test_collapse_and_norm_give_the_golden_sublayer_inputs(golden, config, weights, layer):
    """The attention collapses with the former sublayer's weights, the FFN with the attention's (3.4)."""
    stored = golden["intermediates"]
    for streams, pre, part in (("R_in", "pre_in", "attn"), ("R_mid", "attn_pre", "ffn")):
        collapsed = weigh_streams(stored[f"L{layer}.{streams}"], stored[f"L{layer}.{pre}"])
        x = rms_norm(collapsed, weights[f"layers.{layer}.{part}_norm"], config.rms_norm_eps)
        ulps = bf16_ulps(x, stored[f"L{layer}.{part}_x"])
        assert ulps.max() <= 1
        assert (ulps > 0).float().mean() <= 1e-4


@pytest.mark.parametrize("layer", LAYERS)
def test_expand_gives_the_golden_streams_exactly(golden, layer):
    stored = golden["intermediates"]
    for part, before, after in (("attn", "R_in", "R_mid"), ("ffn", "R_mid", "R_out")):
        residual = mhc_expand(
            stored[f"L{layer}.{part}_y"],
            stored[f"L{layer}.{before}"],
            stored[f"L{layer}.{part}_post"],
            stored[f"L{layer}.{part}_comb"],
        )
        assert torch.equal(residual, stored[f"L{layer}.{after}"])


@pytest.mark.parametrize("layer", LAYERS)
def test_mix_gives_the_golden_coefficients(golden, config, weights, layer):
    stored, scope = golden["intermediates"], Scope(weights, layer)
    for part, streams in (("attn", "R_in"), ("ffn", "R_mid")):
        coefficients = mix(stored[f"L{layer}.{streams}"], scope, part, config)
        for name, value in zip(("pre", "post", "comb"), coefficients, strict=True):
            assert torch.allclose(value, stored[f"L{layer}.{part}_{name}"], rtol=1e-5, atol=1e-6), name


def test_the_final_collapse_uses_the_last_ffn(golden, config, weights):
    stored = golden["intermediates"]
    collapsed = weigh_streams(stored["L7.R_out"], stored["L7.ffn_pre"])
    assert torch.equal(collapsed, stored["final_in"])
    assert bf16_ulps(rms_norm(collapsed, weights["norm"], config.rms_norm_eps), stored["final_h"]).max() <= 1


def test_coefficients_of_the_published_vector():
    index = torch.arange(24, dtype=torch.float64)
    mixes, base = torch.sin(index + 1).float(), (torch.cos(index) / 2).float()
    pre, post, comb = mhc_coefficients(mixes.unsqueeze(0), base, torch.tensor([0.7, 1.3, 2.0]), 20, 1e-6)
    assert pre[0].tolist() == pytest.approx([0.74819996, 0.71231708, 0.47270581, 0.26410264], abs=1e-6)
    assert post[0].tolist() == pytest.approx([0.34345782, 0.88974551, 1.58305838, 1.68131192], abs=1e-6)
    rows = [
        [0.39307679, 0.17460543, 0.16945023, 0.26286655],
        [0.03686883, 0.52513010, 0.42139753, 0.01660251],
        [0.00145295, 0.01372473, 0.30936820, 0.67545322],
        [0.56860044, 0.28653874, 0.09978304, 0.04507672],
    ]
    for got, want in zip(comb[0].tolist(), rows, strict=True):
        assert got == pytest.approx(want, abs=1e-6)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), spread=st.floats(0.1, 8))
def test_columns_of_the_mixing_matrix_sum_to_one(seed, spread):
    """The last pass is over columns; rows may be off, and are not touched up (3.3)."""
    mixes = torch.randn(5, 24, generator=torch.Generator().manual_seed(seed)) * spread
    _, post, comb = mhc_coefficients(mixes, torch.zeros(24), torch.ones(3), 20, 1e-6)
    assert torch.allclose(comb.sum(1), torch.ones(5, 4), atol=1e-5)
    assert ((post >= 0) & (post <= 2)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_output_and_identity_mixing_leave_the_streams_unchanged(dtype):
    residual = torch.randn(6, 4, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    comb = torch.eye(4).repeat(6, 1, 1)
    y = torch.full((6, 32), 3.0, dtype=dtype)
    assert torch.equal(mhc_expand(y, residual, torch.zeros(6, 4), comb), residual)


def test_the_first_index_of_the_mixing_matrix_is_the_source():
    residual = torch.tensor([[[1.0], [10.0]]])
    comb = torch.tensor([[[0.0, 1.0], [0.0, 0.0]]])  # stream 0 flows into stream 1, stream 1 nowhere
    out = mhc_expand(torch.zeros(1, 1), residual, torch.zeros(1, 2), comb)
    assert out.flatten().tolist() == [0.0, 1.0]
    out = mhc_expand(torch.tensor([[2.0]]), residual, torch.tensor([[0.5, 3.0]]), comb)
    assert out.flatten().tolist() == [1.0, 7.0]


def test_the_first_sublayer_takes_stream_zero_alone():
    pre = first_stream(3, 4)
    assert pre.tolist() == [[1, 0, 0, 0]] * 3
    residual = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(2)).bfloat16()
    assert torch.equal(weigh_streams(residual, pre), residual[:, 0])


def test_collapse_rounds_once():
    """256 + 1 + 1 is 258 in float32; rounding after each addition would stay at 256."""
    residual = torch.tensor([256.0, 1.0, 1.0, 0.0]).reshape(1, 4, 1).bfloat16()
    assert weigh_streams(residual, torch.ones(1, 4)).item() == 258.0


def test_sums_over_streams_run_first_to_last():
    terms = torch.tensor([2.0**24, 1.0, 1.0, -(2.0**24)]).reshape(1, 4, 1)
    assert weigh_streams(terms, torch.ones(1, 4)).item() == 0.0
    assert weigh_streams(terms.flip(1), torch.ones(1, 4)).item() == 2.0
    assert weigh_streams(torch.tensor([[[0.25], [0.5]]]), torch.ones(1, 2)).item() == 0.75
