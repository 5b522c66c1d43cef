"""FP8 linear: golden vectors, every code and scale, groups, float64."""

import pytest
import torch
import torch.nn.functional as F
from routes import ROUTES

from deepinfer.errors import UsageError
from deepinfer.kernels import linear_fp8
from deepinfer.kernels.formats import dequantize_fp8_groups, e4m3_to_float, e8m0_to_float, quantize_fp8_groups
from deepinfer.kernels.linear_fp8 import dequantize_tiles


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("route", ROUTES)
def test_golden_vectors(route, golden_kernels, same_bytes):
    x = golden_kernels["fp8_gemm.x"].unsqueeze(1)
    weight = as_bytes(golden_kernels["fp8_gemm.w"]).unsqueeze(0)
    scale = as_bytes(golden_kernels["fp8_gemm.w_scale"]).unsqueeze(0)
    same_bytes(getattr(linear_fp8, route)(x, weight, scale, True).squeeze(1), golden_kernels["fp8_gemm.y"])


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("weighted", [False, True])
def test_golden_expert(route, weighted, golden_kernels):
    run = getattr(linear_fp8, route)

    def apply(name: str, x: torch.Tensor) -> torch.Tensor:
        weight = as_bytes(golden_kernels[f"expert.{name}"]).unsqueeze(0)
        scale = as_bytes(golden_kernels[f"expert.{name}_scale"]).unsqueeze(0)
        return run(x.unsqueeze(1), weight, scale, True).squeeze(1)

    x = golden_kernels["expert.x"]
    gate, up = apply("w1", x).float().clamp(max=1.0), apply("w3", x).float().clamp(-1.0, 1.0)
    middle = F.silu(gate) * up
    if weighted:
        middle = golden_kernels["expert.route_weight"].float() * middle
    want = golden_kernels["expert.y" if weighted else "expert.y_shared"]
    torch.testing.assert_close(apply("w2", middle.bfloat16()), want, rtol=2.0**-7, atol=2.0**-9)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_close_to_float64(route, quantize, dtype):
    x, weight, scale, _ = linear_fp8.make_inputs(9, dtype, 1)
    operand = dequantize_fp8_groups(*quantize_fp8_groups(x)) if quantize else x.float()
    matrix = dequantize_tiles(weight, scale)[0].double()
    exact = (operand[:, 0].double() @ matrix.T).unsqueeze(1)
    size = (operand[:, 0].abs().double() @ matrix.abs().T).unsqueeze(1)
    got = getattr(linear_fp8, route)(x, weight, scale, quantize).double()
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 0.0
    assert ((got - exact).abs() <= 1e-6 * size + rounding * exact.abs()).all()


def test_every_code_and_scale_is_decoded_exactly():
    """One input at a time: with x a unit vector, y is the decoded weight."""
    codes = torch.arange(256, dtype=torch.uint8)
    weight = codes.repeat_interleave(32).reshape(1, 256, 32)
    x = torch.eye(32).reshape(32, 1, 32)
    for byte in (0, 1, 3, 100, 127, 200, 245, 246, 247, 250, 254):
        scale = torch.full((1, 8, 1), byte, dtype=torch.uint8)
        finite = torch.where(weight % 128 == 127, 0, weight)  # NaN codes are tested apart
        want = (e4m3_to_float(finite) * e8m0_to_float(scale[0, 0])).squeeze(0).T.unsqueeze(1)
        representable = want.isfinite().all(0).squeeze(0)
        got = linear_fp8.native(x, finite, scale, False)
        assert torch.equal(got[..., representable], want[..., representable])
        assert representable.any()


@pytest.mark.parametrize("route", ROUTES)
def test_nan_codes_and_nan_scales_reach_their_outputs_only(route):
    x, weight, scale, _ = linear_fp8.make_inputs(3, torch.float32, 2)
    weight[weight % 128 == 127] = 0
    weight[0, 5, 40] = 0xFF
    scale[0, 1, 2] = 255
    y = getattr(linear_fp8, route)(x, weight, scale, True)
    bad = y.isnan().all(0).squeeze(0)
    assert bad.nonzero().flatten().tolist() == [5, *range(32, 64)]
    assert not y[:, :, ~bad].isnan().any()


@pytest.mark.parametrize("route", ROUTES)
def test_groups_do_not_mix(route, same_bytes):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(7, 3, 64, generator=generator).bfloat16()
    weight = torch.randint(0, 120, (3, 40, 64), generator=generator, dtype=torch.uint8)
    scale = torch.randint(115, 119, (3, 2, 2), generator=generator, dtype=torch.uint8)
    run = getattr(linear_fp8, route)
    whole = run(x, weight, scale, False)
    for group in range(3):
        one = slice(group, group + 1)
        same_bytes(run(x[:, one].contiguous(), weight[one], scale[one], False), whole[:, one])


@pytest.mark.parametrize("route", ROUTES)
def test_inputs_need_not_fill_the_last_tile_when_not_quantised(route):
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(4, 1, 75, generator=generator)
    weight = torch.randint(0, 120, (1, 33, 75), generator=generator, dtype=torch.uint8)
    scale = torch.randint(118, 122, (1, 2, 3), generator=generator, dtype=torch.uint8)
    exact = x[:, 0].double() @ dequantize_tiles(weight, scale)[0].double().T
    got = getattr(linear_fp8, route)(x, weight, scale, False)[:, 0].double()
    torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-6 * exact.abs().max().item())


def test_wrong_shapes_are_refused():
    x, weight, scale, _ = linear_fp8.make_inputs(2, torch.bfloat16, 0)
    transposed = scale.transpose(1, 2).contiguous()
    with pytest.raises(UsageError, match=r"linear_fp8: scale: must have shape \[1, 3, 5\], got \[1, 5, 3\]"):
        linear_fp8(x, weight, transposed, True)
    with pytest.raises(RuntimeError, match=r"linear_fp8: scale must have shape \[1, 3, 5\].*got \[1, 5, 3\]"):
        linear_fp8.native(x, weight, transposed, True)
    narrow = (x[..., :80].contiguous(), weight[..., :80].contiguous(), scale[..., :3].contiguous())
    with pytest.raises(UsageError, match="multiple of 32, got 80"):
        linear_fp8(*narrow, True)
    with pytest.raises(RuntimeError, match="multiple of 32, got 80"):
        linear_fp8.native(*narrow, True)
