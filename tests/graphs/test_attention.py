"""Softmax with a sink, and the window it runs over (spec 5.2, 5.3, 18.8)."""

import math

import pytest
import torch
from graph_steps import Chunk, Request, decode_inputs, ragged_inputs, step_context
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.graphs.attention import project
from deepinfer.graphs.rope import WINDOW_TABLE
from deepinfer.kernels import ring_write, window_record
from deepinfer.kernels.sparse_attention import softmax_with_sink, window_records


def attend(*args: torch.Tensor, **kwargs: object) -> torch.Tensor:
    """The attention output alone."""
    return softmax_with_sink(*args, **kwargs)[0]


def plain_softmax(query, keys, visible, sink, scale):
    """The definition in float64, one head of one row at a time; also the same sum over |values|."""
    output = torch.zeros(query.shape, dtype=torch.float64)
    absolute = torch.zeros(query.shape, dtype=torch.float64)
    for row in range(query.shape[0]):
        real = keys[row][visible[row]].double()
        if not len(real):
            continue
        for head in range(query.shape[1]):
            logits = real @ query[row, head].double() * scale
            top = logits.max()
            shares = (logits - top).exp()
            shares = shares / (shares.sum() + (sink[head].double() - top).exp())
            output[row, head], absolute[row, head] = shares @ real, shares @ real.abs()
    return output, absolute


def unit(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


ONE_KEY = {"keys": unit([[[4.0, 8.0]]]), "visible": torch.tensor([[True]]), "scale": 0.5}


def test_a_sink_of_ln_3_leaves_a_quarter_to_one_key():
    output = attend(unit([[[0.0, 0.0]]]), sink=unit([math.log(3)]), **ONE_KEY)
    assert output.flatten().tolist() == pytest.approx([1.0, 2.0])


def test_the_sink_is_not_scaled():
    """Logit 0.5 * 4 * 0.5 = 1 against a sink of 1: one half each, whatever the softmax scale."""
    output = attend(unit([[[0.5, 0.0]]]), sink=unit([1.0]), **ONE_KEY)
    assert output.flatten().tolist() == pytest.approx([2.0, 4.0])


@pytest.mark.parametrize("sink", [1e4, 3e38, math.inf])
def test_a_huge_sink_gives_zeros(sink):
    output = attend(unit([[[1.0, 1.0]]]), sink=unit([sink]), **ONE_KEY)
    assert output.flatten().tolist() == [0, 0]


@pytest.mark.parametrize("sink", [-3e38, -math.inf])
def test_a_sink_far_below_takes_nothing(sink):
    output = attend(unit([[[1.0, 1.0]]]), sink=unit([sink]), **ONE_KEY)
    assert output.flatten().tolist() == [4, 8]


@pytest.mark.parametrize("sink", [-50.0, 0.0, 50.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_that_sees_nothing_gives_zeros(sink, dtype):
    query, keys = torch.ones(2, 3, 4, dtype=dtype), torch.ones(2, 5, 4, dtype=dtype)
    visible = torch.zeros(2, 5, dtype=torch.bool)
    visible[1, 2] = True
    output = attend(query, keys, visible, torch.full((3,), sink), 0.5)
    assert output.dtype == dtype
    assert not output[0].any()
    assert sink > 40 or output[1].all()


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 3e38])
def test_keys_that_are_not_visible_may_hold_anything(garbage):
    keys = unit([[[4.0, 8.0], [garbage, garbage]]])
    query, sink = unit([[[1.0, 0.0]]]), unit([0.0])
    output = attend(query, keys, torch.tensor([[True, False]]), sink, 0.5)
    assert torch.equal(output, attend(query, sink=sink, **ONE_KEY))
    assert not attend(query, keys, torch.tensor([[False, False]]), sink, 0.5).any()


def test_an_entry_counts_once_per_listing():
    keys = unit([[[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]])
    query, sink = unit([[[0.0, 0.0]]]), unit([0.0])
    listed_twice = attend(query, keys, torch.tensor([[True, True, True]]), sink, 1.0)
    assert listed_twice.flatten().tolist() == pytest.approx([0.5, 0.25])
    once = attend(query, keys, torch.tensor([[True, True, False]]), sink, 1.0)
    assert once.flatten().tolist() == pytest.approx([1 / 3, 1 / 3])


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 4),
    heads=st.integers(1, 3),
    entries=st.integers(1, 40),
    spread=st.sampled_from([0.1, 1.0, 20.0]),
    shown=st.floats(0, 1),
    seed=st.integers(0, 2**31),
)
def test_float32_softmax_is_close_to_float64(rows, heads, entries, spread, shown, seed):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(rows, heads, 16, generator=generator) * spread
    keys = torch.randn(rows, entries, 16, generator=generator)
    visible = torch.rand(rows, entries, generator=generator) < shown
    sink = torch.randn(heads, generator=generator) * spread
    output = attend(query, keys, visible, sink, 0.25)
    expected, absolute = plain_softmax(query, keys, visible, sink, 0.25)
    logit_error = 4 * spread * 16 * 2**-23  # of a sum of 16 products of about that size
    assert ((output - expected).abs() <= (1e-5 + 4 * logit_error) * absolute + 1e-7).all()


def test_order_of_entries_carries_no_meaning():
    generator = torch.Generator().manual_seed(5)
    query, keys = torch.randn(1, 2, 8, generator=generator), torch.randn(1, 9, 8, generator=generator)
    visible = torch.rand(1, 9, generator=generator) < 0.6
    order = torch.randperm(9, generator=generator)
    sink = unit([0.3, -0.4])
    first = attend(query, keys, visible, sink, 0.3)
    assert torch.allclose(first, attend(query, keys[:, order], visible[:, order], sink, 0.3))


def test_sparse_attention_agrees_with_the_vendor(golden):
    """Index lists beyond 64 entries with gaps, duplicates and an empty row.

    The vendor rounds probabilities to bf16 before they meet the values, here they stay float32. A rounded
    probability is off by at most 2^-8 of itself, so the outputs may differ by 2^-8 of the sum of |p v| beside
    the rounding of both outputs: that is checked element by element, the README's rms limit for probabilities
    kept in float32 on top.
    """
    stored = golden["kernels"]
    index = stored["sparse_attn.idx"].long()
    keys, visible = stored["sparse_attn.kv"][index.clamp(min=0)], index >= 0
    sink, scale = stored["sparse_attn.sink"].float(), stored["sparse_attn.scale"].item()
    output = attend(stored["sparse_attn.q"], keys, visible, sink, scale)
    expected = stored["sparse_attn.o"].float()
    assert output.dtype == torch.bfloat16
    assert not visible[0].any()
    assert not output[0].any()
    exact, absolute = plain_softmax(stored["sparse_attn.q"], keys, visible, sink, scale)
    assert ((output - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all()
    error = (output.float() - expected).abs()
    assert (error <= 2**-8 * (absolute + 2 * exact.abs()) + 1e-6).all()
    assert error.pow(2).mean().sqrt() <= 2.2e-3 * expected.pow(2).mean().sqrt()


def window_of(model, inputs, x):
    """The records that the rows of a step see, and which of them are real; keeps those of the rows."""
    context, ring = step_context(model, inputs), model.caches["layers.0.window"]
    weights, config = context.layer_weights(0), model.config
    kv = project(context, weights, "attn.wkv", x)
    settings = (weights["attn.kv_norm"], config.rms_norm_eps, context.weights[WINDOW_TABLE])
    record = window_record(kv, *settings, inputs.positions, model.precision.quantized)
    line = inputs.request_index
    slots, starts = inputs.slot_ids[line], inputs.num_computed_tokens[line]
    seen = window_records(record, ring, config.sliding_window, inputs.positions, slots, starts)
    lines = (inputs.slot_ids, inputs.num_computed_tokens, inputs.row_counts)
    ring_write(ring, record, inputs.positions, line, *lines)
    return seen


@pytest.mark.parametrize("precision", ["native", "float32"])
@pytest.mark.parametrize("cuts", [[60], [1, 59], [15, 16, 29], [16, 17, 27], [40, 20], [23, 22, 15]])
def test_the_window_holds_the_last_positions_and_no_other(new_model, config, precision, cuts):
    """Every chunking lists the records of positions p-W+1 to p, oldest first (5.2, 5.5)."""
    size = config.sliding_window
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    x = torch.randn(60, config.hidden_size, generator=torch.Generator().manual_seed(3)).to(dtype)
    request = Request([0] * 60)

    def run(phase, chunks):
        model, keys, visible, start = new_model(precision), [], [], 0
        for count in chunks:
            make = decode_inputs if phase == "decode" else ragged_inputs
            inputs = make([Chunk(request, start, count)], model.layout)
            step_keys, step_visible = window_of(model, inputs, x[start : start + count])
            keys.append(step_keys)
            visible.append(step_visible)
            start += count
        return torch.cat(keys), torch.cat(visible)

    keys, visible = run("prefill", cuts)
    own = keys[:, -1]  # a row's own record is the newest of its window
    for position in range(60):
        first = max(0, position - size + 1)
        assert visible[position].tolist() == [False] * (size - position - 1 + first) + [True] * (
            position + 1 - first
        )
        assert torch.equal(keys[position][visible[position]], own[first : position + 1])
    decoded, decoded_visible = run("decode", [1] * 60)
    assert torch.equal(decoded_visible, visible)
    assert torch.equal(decoded[visible], keys[visible])
