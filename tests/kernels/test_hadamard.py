"""The rotation before FP4: the Sylvester matrix, its own inverse."""

import pytest
import torch

from deepinfer.errors import UsageError
from deepinfer.kernels import hadamard

ROUTES = ("reference", "native")


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


def test_a_size_that_is_no_power_of_two_is_refused():
    for run in (hadamard.reference, hadamard.fake):
        with pytest.raises(UsageError, match="power of two"):
            run(torch.zeros(2, 96))
    with pytest.raises(RuntimeError, match="power of two"):
        hadamard.native(torch.zeros(2, 96))
