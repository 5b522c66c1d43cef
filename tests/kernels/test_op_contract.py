"""What every operation promises: native agrees with the reference, and a row never depends on its company."""

from typing import Any

import pytest
import torch
from op_rows import NAN_STAYS_LOCAL, outputs, take_rows

from deepinfer.errors import UsageError
from deepinfer.kernels import OPS, Op

DTYPES = (torch.bfloat16, torch.float32)
# what only changes its arguments, or gives a result per request, has these checks in its own file
CHECKED_ELSEWHERE = {
    "index_key",
    "ring_write",
    "verify_drafts",
}
CASES = [
    pytest.param(op, dtype, id=f"{op.name}-{dtype}".replace("torch.", ""))
    for op in OPS
    for dtype in DTYPES
    if op.name not in CHECKED_ELSEWHERE
]
ROUTES = ("reference", "native")


def assert_rows_independent(op: Op, run: Any, inputs: tuple[Any, ...], same_bytes: Any) -> None:
    """Every row alone, and the rows in another order and number, give the bytes of the whole."""
    whole = outputs(run(*inputs))
    count = whole[0].shape[0]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    for rows in (*torch.arange(count).split(1), order, order[:5], order[:16], torch.arange(2, 11)):
        for part, full in zip(outputs(run(*take_rows(op, inputs, rows))), whole, strict=True):
            same_bytes(part, full[rows])


@pytest.mark.parametrize(("op", "dtype"), CASES)
@pytest.mark.parametrize("rows", [1, 7, 33])
def test_native_agrees_with_the_reference(op, dtype, rows):
    for seed in range(4):
        inputs = op.make_inputs(rows, dtype, seed)
        rtol, atol = op.tolerance[dtype]
        for got, want in zip(outputs(op.native(*inputs)), outputs(op.reference(*inputs)), strict=True):
            torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


@pytest.mark.parametrize(("op", "dtype"), CASES)
@pytest.mark.parametrize("route", ROUTES)
def test_a_row_does_not_depend_on_the_others(op, dtype, route, same_bytes, set_threads):
    set_threads(1)
    assert_rows_independent(op, getattr(op, route), op.make_inputs(19, dtype, 3), same_bytes)


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_a_row_with_nan_leaves_the_others_alone(op, dtype, same_bytes):
    inputs = op.make_inputs(9, dtype, 4)
    if not inputs[0].is_floating_point():
        pytest.skip("neither records nor ids carry a NaN between rows")
    poisoned = (inputs[0].clone(), *inputs[1:])
    poisoned[0][4].view(-1)[3] = float("nan")
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    for route in ROUTES:
        for bad, good in zip(
            outputs(getattr(op, route)(*poisoned)), outputs(getattr(op, route)(*inputs)), strict=True
        ):
            same_bytes(bad[others], good[others])
            if bad.is_floating_point() and op.name not in NAN_STAYS_LOCAL:
                assert bad[4].isnan().all()


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_the_number_of_threads_changes_no_byte(op, dtype, same_bytes, set_threads):
    inputs = op.make_inputs(300, dtype, 5)
    set_threads(1)
    single = outputs(op.native(*inputs))
    set_threads(2)
    for got, want in zip(outputs(op.native(*inputs)), single, strict=True):
        same_bytes(got, want)


@pytest.mark.parametrize(("op", "dtype"), CASES)
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_shape_rule_agrees_and_no_rows_are_fine(op, dtype, rows):
    inputs = op.make_inputs(rows, dtype, 6)
    fake = outputs(op.fake(*inputs))
    for route in ROUTES:
        for got, want in zip(outputs(getattr(op, route)(*inputs)), fake, strict=True):
            assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_a_strided_input_is_refused(op, dtype):
    first, *rest = op.make_inputs(4, dtype, 7)
    strided = torch.stack((first, first), dim=-1)[..., 0]
    for run in (op.reference, op.fake):
        with pytest.raises(UsageError, match=rf"{op.name}: \w+: must be contiguous"):
            run(strided, *rest)
    with pytest.raises(RuntimeError, match=rf"{op.name}: \w+ must be contiguous"):
        op.native(strided, *rest)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_a_wrong_dtype_is_refused(op):
    first, *rest = op.make_inputs(4, torch.float32, 8)
    for run in (op.reference, op.fake):
        with pytest.raises(UsageError, match=op.name):
            run(first.to(torch.float16), *rest)
    with pytest.raises(RuntimeError, match=f"{op.name}: .* unsupported dtype"):
        op.native(first.to(torch.float16), *rest)


def test_the_row_check_finds_a_kernel_that_depends_on_the_batch(same_bytes):
    """Without this the checks above could be blind."""

    def batch_dependent(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        half = x.shape[1] // 2 if x.shape[0] > 4 else x.shape[1]  # another order of sums for larger batches
        return (x[:, :half] @ weight[:, :half].T + x[:, half:] @ weight[:, half:].T).to(out_dtype)

    linear = next(op for op in OPS if op.name == "linear")
    with pytest.raises(pytest.fail.Exception, match="elements differ"):
        assert_rows_independent(linear, batch_dependent, linear.make_inputs(19, torch.float32, 3), same_bytes)
