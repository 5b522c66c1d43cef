"""Routed experts: the plain definition, float64, packed weights, order of experts, rows in any company."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from routes import ROUTES

from deepinfer.errors import UsageError
from deepinfer.kernels import linear_fp4, moe_experts
from deepinfer.kernels.formats import dequantize_fp4_groups
from deepinfer.kernels.packing import pack_linear_fp4


def plain_swiglu(gate_and_up: torch.Tensor, limit: float) -> torch.Tensor:
    """The plain form, float32."""
    gate, up = gate_and_up.float().chunk(2, dim=-1)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate) * up


def packed_inputs(rows: int, dtype: torch.dtype, seed: int) -> tuple:
    x, ids, weights, w13, w13_scale, w2, w2_scale, *rest = moe_experts.make_inputs(rows, dtype, seed)
    return (x, ids, weights, *pack_linear_fp4(w13, w13_scale), *pack_linear_fp4(w2, w2_scale), *rest)


def plain_definition(x, ids, weights, w13, w13_scale, w2, w2_scale, limit, quantize):
    """As the layers computed it from single ops: sorted by id, weighted, rounded, summed in order."""
    ids, order = torch.sort(ids, dim=1)
    hidden = plain_swiglu(linear_fp4.reference(x.unsqueeze(1), w13, w13_scale, ids, quantize), limit)
    hidden = (weights.gather(1, order).unsqueeze(-1) * hidden).to(x.dtype)
    first, *others = linear_fp4.reference(hidden, w2, w2_scale, ids, quantize).float().unbind(1)
    for other in others:
        first = first + other
    return first


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_reference_is_the_plain_definition(dtype, same_bytes):
    for rows in (8, 16):
        inputs = moe_experts.make_inputs(rows, dtype, rows)
        same_bytes(moe_experts(*inputs), plain_definition(*inputs))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("limit", [0.0, 0.7])
def test_close_to_float64(route, limit):
    x, ids, weights, w13, w13_scale, w2, w2_scale, _, _ = moe_experts.make_inputs(9, torch.float32, 1)
    first = dequantize_fp4_groups(w13, w13_scale, "e8m0").double()
    second = dequantize_fp4_groups(w2, w2_scale, "e8m0").double()
    want = torch.zeros(9, 160, dtype=torch.float64)
    for row in range(9):
        for expert, weight in zip(ids[row].tolist(), weights[row].tolist(), strict=True):
            if expert >= 0:
                hidden = plain_swiglu_double(first[expert] @ x[row].double(), limit)
                want[row] += second[expert] @ (weight * hidden)
    got = getattr(moe_experts, route)(x, ids, weights, w13, w13_scale, w2, w2_scale, limit, False)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def plain_swiglu_double(gate_and_up: torch.Tensor, limit: float) -> torch.Tensor:
    gate, up = gate_and_up.chunk(2)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate) * up


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("route", ROUTES)
def test_packed_weights_give_the_same_bytes(route, dtype, same_bytes):
    run = getattr(moe_experts, route)
    for rows in (1, 4, 40):
        same_bytes(run(*packed_inputs(rows, dtype, rows)), run(*moe_experts.make_inputs(rows, dtype, rows)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_alone_has_the_bytes_it_has_among_many(dtype, same_bytes, set_threads):
    """More rows than are kept at once, so that a row also falls into another block."""
    set_threads(1)
    x, ids, weights, *matrices = packed_inputs(600, dtype, 2)
    whole = moe_experts.native(x, ids, weights, *matrices)
    for row in (0, 1, 300, 511, 512, 599):
        one = slice(row, row + 1)
        same_bytes(moe_experts.native(x[one], ids[one], weights[one], *matrices), whole[one])
    same_bytes(moe_experts.native(x[90:], ids[90:], weights[90:], *matrices), whole[90:])
    set_threads(2)
    same_bytes(moe_experts.native(x, ids, weights, *matrices), whole)


@pytest.mark.parametrize("route", ROUTES)
def test_the_order_of_picks_changes_nothing(route, same_bytes):
    x, ids, weights, *matrices = moe_experts.make_inputs(12, torch.bfloat16, 3)
    run = getattr(moe_experts, route)
    flipped = (ids.flip(1).contiguous(), weights.flip(1).contiguous())
    same_bytes(run(x, *flipped, *matrices), run(x, ids, weights, *matrices))


@pytest.mark.parametrize("route", ROUTES)
def test_rows_without_experts_are_zero_whatever_they_hold(route):
    x, ids, weights, *matrices = moe_experts.make_inputs(5, torch.bfloat16, 4)
    x[1], weights[1], ids[1] = float("nan"), float("nan"), -1
    y = getattr(moe_experts, route)(x, ids, weights, *matrices)
    assert (y[1] == 0).all()
    assert y.isfinite().all()


@pytest.mark.parametrize("route", ROUTES)
def test_infinite_and_nan_rows_stay_in_their_rows(route, same_bytes):
    x, ids, weights, *matrices = moe_experts.make_inputs(6, torch.float32, 5)
    run = getattr(moe_experts, route)
    good = run(x, ids, weights, *matrices)
    x[2, 3], x[4, 0] = float("nan"), float("inf")
    bad = run(x, ids, weights, *matrices)
    same_bytes(bad[[0, 1, 3, 5]], good[[0, 1, 3, 5]])
    assert bad[2].isnan().all()


@pytest.mark.parametrize("quantize", [False, True])
def test_largest_activations_saturate_alike(quantize):
    x, ids, weights, *matrices, _, _ = moe_experts.make_inputs(4, torch.float32, 6)
    x *= 1e30
    inputs = (x, ids, weights, *matrices, 10.0, quantize)
    torch.testing.assert_close(
        moe_experts.native(*inputs), moe_experts.reference(*inputs), rtol=1e-2, atol=1e-2
    )


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 30), rows=st.integers(1, 30))
def test_any_routing_agrees_and_rows_stand_alone(seed, rows, same_bytes):
    x, _, _, *matrices = packed_inputs(rows, torch.float32, seed)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, 6, (rows, 4), generator=generator)  # repeated experts as well
    weights = torch.rand(rows, 4, generator=generator)
    got = moe_experts.native(x, ids, weights, *matrices)
    want = moe_experts.reference(x, ids, weights, *matrices)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5)
    last = slice(rows - 1, rows)
    same_bytes(moe_experts.native(x[last], ids[last], weights[last], *matrices), got[last])


@pytest.mark.parametrize("bad_id", [-2, 6, 1 << 40])
def test_an_unknown_expert_is_refused(bad_id):
    inputs = list(moe_experts.make_inputs(3, torch.bfloat16, 7))
    inputs[1][1, 1] = bad_id
    with pytest.raises(UsageError, match=r"expert_ids: must lie in -1 \.\. 5"):
        moe_experts(*inputs)
    with pytest.raises(RuntimeError, match=r"moe_experts: expert_ids must lie in -1 \.\. 5"):
        moe_experts.native(*inputs)


def test_wrong_shapes_are_refused():
    x, ids, weights, w13, w13_scale, w2, w2_scale, limit, quantize = moe_experts.make_inputs(
        3, torch.bfloat16, 8
    )
    for inputs, plain, native in (
        (
            (x, ids, weights, w13, w13_scale, w2[:5].contiguous(), w2_scale[:5].contiguous()),
            "moe_experts: w2: must have 6 experts with 160 outputs, got 5",
            "moe_experts: w2 must have 6 experts with 160 outputs, got 5",
        ),
        (
            (x, ids, weights, w13[:, :96].contiguous(), w13_scale[:, :96].contiguous(), w2, w2_scale),
            "outputs of w13: must be a positive multiple of 64, got 96",
            "outputs of w13 must be a positive multiple of 64, got 96",
        ),
        (
            (x, ids, weights[:, :2].contiguous(), w13, w13_scale, w2, w2_scale),
            "expert_weights: must have shape",
            "expert_weights must have shape",
        ),
        (
            (x, ids[:, :0].contiguous(), weights[:, :0].contiguous(), w13, w13_scale, w2, w2_scale),
            "number of experts per row: must be a positive multiple of 1, got 0",
            "at least one expert",
        ),
    ):
        with pytest.raises(UsageError, match=plain):
            moe_experts(*inputs, limit, quantize)
        with pytest.raises(RuntimeError, match=native):
            moe_experts.native(*inputs, limit, quantize)
