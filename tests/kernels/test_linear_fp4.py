"""FP4 expert linear: golden vectors, every code, routing, experts that must not be read."""

import pytest
import torch
from routes import ROUTES

from deepinfer.errors import UsageError
from deepinfer.kernels import linear_fp4
from deepinfer.kernels.formats import dequantize_fp4_groups


@pytest.mark.parametrize("route", ROUTES)
def test_golden_vectors(route, golden_kernels, same_bytes):
    x = golden_kernels["fp4_gemm.x"].unsqueeze(1)
    weight = golden_kernels["fp4_gemm.w_packed"].view(torch.uint8).unsqueeze(0)
    scale = golden_kernels["fp4_gemm.w_scale"].view(torch.uint8).unsqueeze(0)
    ids = torch.zeros(5, 1, dtype=torch.int64)
    y = getattr(linear_fp4, route)(x, weight, scale, ids, True)
    same_bytes(y.squeeze(1), golden_kernels["fp4_gemm.y"])


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("shared_vector", [True, False])
def test_close_to_float64(route, shared_vector):
    x, weight, scale, ids, _ = linear_fp4.make_inputs(11, torch.float32, 1)
    if not shared_vector:
        x = torch.randn(11, 3, 160, generator=torch.Generator().manual_seed(2))
    matrices = dequantize_fp4_groups(weight, scale, "e8m0").double()
    chosen = matrices[ids.clamp_min(0)] * (ids >= 0)[..., None, None]
    exact = torch.einsum("rpnk,rpk->rpn", chosen, x.double().expand(11, 3, 160))
    got = getattr(linear_fp4, route)(x, weight, scale, ids, False)
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)
    assert (got[ids == -1] == 0).all()


@pytest.mark.parametrize("scale_byte", [0, 1, 2, 64, 127, 200, 252])
def test_every_code_is_decoded_exactly(scale_byte):
    pairs = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16)
    scale = torch.full((1, 16, 1), scale_byte, dtype=torch.uint8)
    want = dequantize_fp4_groups(pairs, scale, "e8m0")[0]
    ids = torch.zeros(32, 1, dtype=torch.int64)
    got = linear_fp4.native(torch.eye(32).unsqueeze(1), pairs, scale, ids, False)
    assert want.isfinite().all()
    assert torch.equal(got.squeeze(1).T, want)


@pytest.mark.parametrize("route", ROUTES)
def test_a_nan_scale_reaches_its_outputs_only(route):
    x, weight, scale, _, _ = linear_fp4.make_inputs(2, torch.float32, 3)
    scale[2, 7, 1] = 255
    y = getattr(linear_fp4, route)(x, weight, scale, torch.tensor([[2, 1], [3, 2]]), True)
    assert y.isnan().nonzero().tolist() == [[0, 0, 7], [1, 1, 7]]


@pytest.mark.parametrize("route", ROUTES)
def test_a_repeated_expert_and_the_order_of_picks_change_nothing(route, same_bytes):
    x, weight, scale, _, quantize = linear_fp4.make_inputs(4, torch.bfloat16, 4)
    ids = torch.tensor([[5, 0, 5], [0, 5, -1], [-1, -1, -1], [3, 3, 3]])
    run = getattr(linear_fp4, route)
    y, flipped = (
        run(x, weight, scale, ids, quantize),
        run(x, weight, scale, ids.flip(1).contiguous(), quantize),
    )
    same_bytes(flipped.flip(1), y)
    same_bytes(y[0, 0], y[0, 2])
    same_bytes(y[3, 1], y[3, 2])
    assert (y[2] == 0).all()


def test_experts_that_no_row_uses_are_not_read():
    """The weights of experts 0 and 2 lie in pages without access: reading them would end the process."""
    import ctypes
    import mmap

    page, libc = mmap.PAGESIZE, ctypes.CDLL(None, use_errno=True)
    buffer = mmap.mmap(-1, 3 * page)
    weight = torch.frombuffer(buffer, dtype=torch.uint8).reshape(3, page // 16, 16)
    address = ctypes.c_void_p(weight.data_ptr())
    for expert in (0, 2):
        location = ctypes.c_void_p(address.value + expert * page)
        assert libc.mprotect(location, ctypes.c_size_t(page), 0) == 0
    try:
        scale = torch.full((3, page // 16, 1), 127, dtype=torch.uint8)
        y = linear_fp4.native(torch.ones(2, 1, 32), weight, scale, torch.tensor([[1, -1], [-1, 1]]), False)
        assert (y == 0).all()
    finally:
        assert libc.mprotect(address, ctypes.c_size_t(3 * page), 3) == 0


@pytest.mark.parametrize("bad_id", [-2, 6, 1 << 40])
def test_an_unknown_expert_is_refused(bad_id):
    inputs = list(linear_fp4.make_inputs(3, torch.bfloat16, 5))
    inputs[3][1, 1] = bad_id
    with pytest.raises(UsageError, match=r"linear_fp4: expert_ids: must lie in -1 \.\. 5"):
        linear_fp4(*inputs)
    with pytest.raises(RuntimeError, match=r"linear_fp4: expert_ids must lie in -1 \.\. 5"):
        linear_fp4.native(*inputs)


def test_wrong_shapes_are_refused():
    x, weight, scale, ids, quantize = linear_fp4.make_inputs(3, torch.bfloat16, 0)
    with pytest.raises(UsageError, match="linear_fp4: x: must have 1 or 3 vectors per row, got 2"):
        linear_fp4(x.repeat(1, 2, 1), weight, scale, ids, quantize)
    with pytest.raises(RuntimeError, match="linear_fp4: x must have 1 or 3 vectors per row, got 2"):
        linear_fp4.native(x.repeat(1, 2, 1), weight, scale, ids, quantize)
    with pytest.raises(UsageError, match=r"linear_fp4: expert_ids: must have shape \[3, any\]"):
        linear_fp4(x, weight, scale, ids[:2], quantize)
    with pytest.raises(RuntimeError, match="linear_fp4: expert_ids must have shape"):
        linear_fp4.native(x, weight, scale, ids[:2], quantize)
