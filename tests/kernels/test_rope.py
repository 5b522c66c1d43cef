"""Rotation: golden vectors, complex numbers in float64, padding rows, refusals."""

import pytest
import torch
from routes import ROUTES

from deepinfer.errors import UsageError
from deepinfer.graphs.rope import rope_table
from deepinfer.kernels import rope


def apply_rope(x: torch.Tensor, cos_sin: torch.Tensor, *, inverse: bool) -> torch.Tensor:
    """The plain form: interleaved pairs of the tail, float32 inside."""
    rope_dim = cos_sin.shape[-1]
    for _ in range(x.dim() - 2):
        cos_sin = cos_sin.unsqueeze(1)
    cos, sin = cos_sin.chunk(2, dim=-1)
    sin = -sin if inverse else sin
    fixed, tail = x[..., :-rope_dim], x[..., -rope_dim:]
    u, v = tail.float()[..., 0::2], tail.float()[..., 1::2]
    turned = torch.stack((u * cos - v * sin, u * sin + v * cos), dim=-1).flatten(-2)
    return torch.cat((fixed, turned.to(x.dtype)), dim=-1)


def run(route, *args):
    return getattr(rope, route)(*args)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("size", [2, 16, 30, 64])
def test_close_to_complex_multiplication_in_float64(route, inverse, size):
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(7, 5, size + 6, generator=generator)
    table = rope_table(size, 10000.0, None, 300)
    positions = torch.tensor([0, 1, 2, 77, 150, 298, 299])
    y = run(route, x, table, positions, inverse)
    cos, sin = table[positions].double().unsqueeze(1).chunk(2, dim=-1)
    turn = torch.complex(cos, -sin if inverse else sin)
    tail = torch.view_as_complex(x[..., 6:].double().unflatten(-1, (-1, 2)).contiguous())
    want = torch.view_as_real(tail * turn).flatten(-2)
    torch.testing.assert_close(y[..., 6:].double(), want, rtol=0, atol=1e-6)
    assert (y[..., :6] == x[..., :6]).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("shape", [(9, 64), (9, 4, 128), (1, 1, 64)])
def test_both_routes_give_the_bits_of_the_step_functions(dtype, inverse, shape, same_bytes):
    generator = torch.Generator().manual_seed(len(shape))
    x = torch.randn(shape, generator=generator).to(dtype)
    table = rope_table(64, 160000.0, None, 50)
    positions = torch.randint(0, 50, shape[:1], generator=generator)
    want = apply_rope(x, table[positions], inverse=inverse)
    for route in ROUTES:
        same_bytes(run(route, x, table, positions, inverse), want)


def test_position_zero_and_padding_rows_do_not_turn(same_bytes):
    x = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    table = rope_table(32, 10000.0, None, 4)
    for route in ROUTES:
        same_bytes(run(route, x, table, torch.tensor([0, -1]), False), x)


@pytest.mark.parametrize("route", ROUTES)
def test_nan_and_infinity_stay_within_their_pair(route):
    x = torch.ones(1, 12)
    x[0, 4], x[0, 9], x[0, 1] = float("nan"), float("inf"), float("nan")
    y = run(route, x, rope_table(8, 10000.0, None, 10), torch.tensor([5]), False)
    assert y.isnan()[0].tolist() == [i in (1, 4, 5) for i in range(12)]
    assert y.isinf()[0].tolist() == [i in (8, 9) for i in range(12)]


@pytest.mark.parametrize("route", ROUTES)
def test_there_and_back_is_close(route):
    x, table, positions, _ = rope.make_inputs(20, torch.float32, 3)
    back = run(route, run(route, x, table, positions, False), table, positions, True)
    torch.testing.assert_close(back, x, rtol=0, atol=2e-6)


def test_wrong_arguments_are_refused():
    x, table, positions, _ = rope.make_inputs(3, torch.bfloat16, 0)
    for route, error in (("reference", UsageError), ("native", RuntimeError)):
        with pytest.raises(error, match="rope: positions:? must have shape"):
            run(route, x, table, positions[:2], False)
        with pytest.raises(error, match="rope: positions"):
            run(route, x, table, positions.int(), False)
        with pytest.raises(error, match="rope: table:? (must have an even|has 42)"):
            run(route, x, torch.ones(9, 42), positions, False)
        with pytest.raises(error, match="rope: table:? must have an even number of columns"):
            run(route, x, torch.ones(9, 5), positions, False)
        with pytest.raises(error, match="rope: x:? must have two or three axes"):
            run(route, x[0, 0].contiguous(), table, positions, False)
    with pytest.raises(RuntimeError, match="rope: positions must lie below 50, got 50"):
        rope.native(x, table, torch.tensor([0, 50, 1]), False)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kind", ["main", "compress"])
def test_golden_vectors(route, kind, golden_kernels, same_bytes):
    x, cos, sin = (golden_kernels[f"rope.{kind}.{name}"] for name in ("x", "cos", "sin"))
    table, lines = torch.cat((cos, sin), dim=1), torch.arange(len(x))
    same_bytes(run(route, x, table, lines, False), golden_kernels[f"rope.{kind}.y"])
    same_bytes(run(route, x, table, lines, True), golden_kernels[f"rope.{kind}.y_inverse"])
