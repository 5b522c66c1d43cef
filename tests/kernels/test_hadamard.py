"""The rotation before FP4: the Sylvester matrix, its own inverse."""

import pytest
import torch
from routes import ROUTES

from deepinfer.errors import UsageError
from deepinfer.kernels import hadamard


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("size", [1, 2, 64, 128])
def test_hadamard_is_the_sylvester_matrix_and_its_own_inverse(route, size):
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    x = torch.randn(5, 3, size, generator=torch.Generator().manual_seed(1))
    rotated = getattr(hadamard, route)(x)
    torch.testing.assert_close(rotated.double(), x.double() @ matrix * size**-0.5, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(getattr(hadamard, route)(rotated), x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_routes_have_the_same_bits_also_of_odd_values(dtype, same_bytes):
    x = torch.randn(6, 128, generator=torch.Generator().manual_seed(2)).to(dtype)
    x[1], x[2, 5], x[3, 7], x[4] = 0, float("nan"), float("inf"), 3e38
    for route in ROUTES:
        got, want = getattr(hadamard, route)(x), hadamard.reference(x)
        assert got[2].isnan().all() and not got[3].isfinite().any()
        assert torch.equal(got[4].isnan(), want[4].isnan())
        same_bytes(got[[0, 1, 5]], want[[0, 1, 5]])
        assert getattr(hadamard, route)(x[:0]).shape == (0, 128)


def test_a_size_that_is_no_power_of_two_is_refused():
    for run in (hadamard.reference, hadamard.fake):
        with pytest.raises(UsageError, match="power of two"):
            run(torch.zeros(2, 96))
    with pytest.raises(RuntimeError, match="power of two"):
        hadamard.native(torch.zeros(2, 96))
