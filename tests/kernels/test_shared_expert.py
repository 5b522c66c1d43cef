"""Shared expert: the plain definition, the vendor's expert, float64, packed weights, rows in any company."""

import pytest
import torch
from routes import ROUTES

from deepinfer.errors import UsageError
from deepinfer.kernels import linear_fp8, shared_expert
from deepinfer.kernels.linear_fp8 import dequantize_tiles
from deepinfer.kernels.packing import pack_linear_fp8


def plain_swiglu(gate_and_up: torch.Tensor, limit: float) -> torch.Tensor:
    """The plain form, float32."""
    gate, up = gate_and_up.float().chunk(2, dim=-1)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate) * up


def packed_inputs(rows: int, dtype: torch.dtype, seed: int) -> tuple:
    x, routed, w13, w13_scale, w2, w2_scale, *rest = shared_expert.make_inputs(rows, dtype, seed)
    return (x, routed, *pack_linear_fp8(w13, w13_scale), *pack_linear_fp8(w2, w2_scale), *rest)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_reference_is_the_plain_definition(dtype, same_bytes):
    inputs = shared_expert.make_inputs(16, dtype, 0)
    x, routed, w13, w13_scale, w2, w2_scale, limit, quantize = inputs
    hidden = linear_fp8.reference(x.unsqueeze(1), w13, w13_scale, quantize).squeeze(1)
    hidden = plain_swiglu(hidden, limit).to(x.dtype)
    shared = linear_fp8.reference(hidden.unsqueeze(1), w2, w2_scale, quantize).squeeze(1)
    same_bytes(shared_expert(*inputs), (routed + shared.float()).to(x.dtype))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("packed", [False, True])
def test_golden_expert(route, packed, golden_kernels):
    def weight(name: str) -> torch.Tensor:
        return golden_kernels[f"expert.{name}"].view(torch.uint8).unsqueeze(0)

    w13, w13_scale = (torch.cat((weight("w1" + end), weight("w3" + end)), dim=1) for end in ("", "_scale"))
    matrices = (w13, w13_scale, weight("w2"), weight("w2_scale"))
    if packed:
        matrices = (*pack_linear_fp8(*matrices[:2]), *pack_linear_fp8(*matrices[2:]))
    x = golden_kernels["expert.x"]
    y = getattr(shared_expert, route)(x, torch.zeros(x.shape), *matrices, 1.0, True)
    torch.testing.assert_close(y, golden_kernels["expert.y_shared"], rtol=2.0**-7, atol=2.0**-9)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("limit", [0.0, 0.7])
def test_close_to_float64(route, limit):
    x, routed, w13, w13_scale, w2, w2_scale, _, _ = shared_expert.make_inputs(9, torch.float32, 1)
    gate, up = (x.double() @ dequantize_tiles(w13, w13_scale)[0].double().T).chunk(2, dim=1)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    hidden = gate * torch.sigmoid(gate) * up
    want = routed.double() + hidden @ dequantize_tiles(w2, w2_scale)[0].double().T
    got = getattr(shared_expert, route)(x, routed, w13, w13_scale, w2, w2_scale, limit, False)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("route", ROUTES)
def test_packed_weights_give_the_same_bytes(route, dtype, same_bytes):
    run = getattr(shared_expert, route)
    for rows in (1, 4, 40):
        want = run(*shared_expert.make_inputs(rows, dtype, rows))
        same_bytes(run(*packed_inputs(rows, dtype, rows)), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_alone_has_the_bytes_it_has_among_many(dtype, same_bytes, set_threads):
    set_threads(1)
    x, routed, *matrices = packed_inputs(600, dtype, 2)
    whole = shared_expert.native(x, routed, *matrices)
    for row in (0, 1, 511, 512, 599):
        one = slice(row, row + 1)
        same_bytes(shared_expert.native(x[one], routed[one], *matrices), whole[one])
    set_threads(2)
    same_bytes(shared_expert.native(x, routed, *matrices), whole)


def test_wrong_shapes_are_refused():
    x, routed, w13, w13_scale, w2, w2_scale, *rest = shared_expert.make_inputs(3, torch.bfloat16, 3)
    narrow = (w2[:, :128].contiguous(), w2_scale[:, :4].contiguous())
    with pytest.raises(UsageError, match="shared_expert: w2: must have 160 outputs, got 128"):
        shared_expert(x, routed, w13, w13_scale, *narrow, *rest)
    with pytest.raises(RuntimeError, match="shared_expert: w2 must have 1 experts with 160 outputs"):
        shared_expert.native(x, routed, w13, w13_scale, *narrow, *rest)
    with pytest.raises(UsageError, match="shared_expert: routed: must have shape"):
        shared_expert(x, routed[:2], w13, w13_scale, w2, w2_scale, *rest)
    with pytest.raises(RuntimeError, match="shared_expert: routed must have shape"):
        shared_expert.native(x, routed[:2], w13, w13_scale, w2, w2_scale, *rest)
