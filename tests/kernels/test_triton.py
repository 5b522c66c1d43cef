"""Triton kernels, interpreted: every operation agrees with its reference, and rows do not know each other.

The edge cases of each operation run with `TRITON_INTERPRET=1` in the operation's own test file.
"""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from op_rows import NAN_STAYS_LOCAL, outputs, take_rows
from routes import INTERPRETED

from deepinfer.errors import UsageError
from deepinfer.kernels import OPS, linear, linear_fp8, rms_norm

pytest.importorskip("triton")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="set TRITON_INTERPRET=1, as `make triton` does")

DTYPES = (torch.bfloat16, torch.float32)
# what only changes its arguments, or has rows of a request together, has its checks of rows in its own file
WITHOUT_ROWS = {"index_key", "ring_write", "verify_drafts"}
CASES = [
    pytest.param(op, dtype, id=f"{op.name}-{dtype}".replace("torch.", "")) for op in OPS for dtype in DTYPES
]
ROW_CASES = [case for case in CASES if case.values[0].name not in WITHOUT_ROWS]


def copies(arguments):
    return tuple(value.clone() if isinstance(value, torch.Tensor) else value for value in arguments)


@interpreted
@pytest.mark.parametrize(("op", "dtype"), CASES)
@pytest.mark.parametrize("rows", [1, 6])
def test_results_and_effects_agree_with_the_reference(op, dtype, rows):
    rtol, atol = op.tolerance[dtype]
    for seed in range(3):
        ours, theirs = copies(op.make_inputs(rows, dtype, seed)), op.make_inputs(rows, dtype, seed)
        got, want = outputs(op.triton(*ours)), outputs(op.reference(*theirs))
        for left, right in zip((*got, *ours), (*want, *theirs), strict=True):
            if isinstance(left, torch.Tensor):
                torch.testing.assert_close(left, right, rtol=rtol, atol=atol, equal_nan=True)


@interpreted
@pytest.mark.parametrize(("op", "dtype"), ROW_CASES)
def test_a_row_does_not_depend_on_the_others(op, dtype, same_bytes):
    inputs = op.make_inputs(7, dtype, 3)
    whole = outputs(op.triton(*copies(inputs)))
    for rows in (torch.tensor([0]), torch.tensor([4]), torch.tensor([6, 1, 3, 0, 2, 5, 4])):
        for part, full in zip(outputs(op.triton(*copies(take_rows(op, inputs, rows)))), whole, strict=True):
            same_bytes(part, full[rows])


@interpreted
@pytest.mark.parametrize(("op", "dtype"), ROW_CASES)
def test_a_row_with_nan_leaves_the_others_alone(op, dtype, same_bytes):
    inputs = op.make_inputs(4, dtype, 4)
    if not inputs[0].is_floating_point():
        pytest.skip("neither records nor ids carry a NaN between rows")
    poisoned = copies(inputs)
    poisoned[0][1].view(-1)[3] = float("nan")
    for bad, good in zip(outputs(op.triton(*poisoned)), outputs(op.triton(*copies(inputs))), strict=True):
        same_bytes(bad[[0, 2, 3]], good[[0, 2, 3]])
        if bad.is_floating_point() and op.name not in NAN_STAYS_LOCAL:
            assert bad[1].isnan().all()


@interpreted
@pytest.mark.parametrize(("op", "dtype"), ROW_CASES)
@pytest.mark.parametrize("rows", [0, 2])
def test_layouts_are_those_of_the_shape_rule_and_no_rows_are_fine(op, dtype, rows):
    inputs = op.make_inputs(rows, dtype, 6)
    for got, want in zip(outputs(op.triton(*copies(inputs))), outputs(op.fake(*inputs)), strict=True):
        assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())


@interpreted
def test_a_kernel_that_contracts_rows_would_be_found(same_bytes):
    """The row check bites: a sum over the batch leaks into every row."""
    x, weight, out_dtype = linear.make_inputs(7, torch.float32, 3)
    whole = linear.triton(x, weight, out_dtype) + x.sum()
    with pytest.raises(pytest.fail.Exception, match="elements differ"):
        same_bytes(linear.triton(x[:1], weight, out_dtype) + x[:1].sum(), whole[:1])


@interpreted
def test_activations_are_quantised_by_the_group_that_is_asked_for():
    x, weight, scale, _ = linear_fp8.make_inputs(3, torch.bfloat16, 0)
    x, weight, scale = (
        value[..., :size].contiguous() for value, size in ((x, 128), (weight, 128), (scale, 4))
    )
    x[:, :, 5] *= 40000  # makes its neighbours subnormal codes
    got, want = (run(x, weight, scale, True, 128) for run in (linear_fp8.triton, linear_fp8.reference))
    torch.testing.assert_close(got, want, rtol=2.0**-7, atol=2e-6)
    assert not torch.equal(got, linear_fp8.triton(x, weight, scale, True, 32))


def test_every_operation_has_a_kernel():
    """One without needs a reason, which this test would name; none has one today."""
    missing = [
        op.name for op in OPS if importlib.util.find_spec(f"deepinfer.kernels.triton.{op.name}") is None
    ]
    assert missing == []


def test_an_operation_without_kernel_says_so():
    stranger = replace(rms_norm, name="stranger")
    with pytest.raises(UsageError, match="stranger: triton: the operation has no Triton kernel"):
        stranger.triton()


def test_a_form_without_kernel_says_so():
    parts = [
        (part[..., :size].contiguous())
        for part, size in zip(linear_fp8.make_inputs(2, torch.bfloat16, 0)[:3], (96, 96, 3), strict=True)
    ]
    with pytest.raises(UsageError, match="linear: triton: no Triton kernel for groups of 96 activations"):
        linear_fp8.triton(*parts, True, 96)


def test_wrong_arguments_are_refused_before_a_kernel_starts():
    x, _, eps = rms_norm.make_inputs(2, torch.bfloat16, 0)
    with pytest.raises(UsageError, match=r"rms_norm: weight: must have shape \[128\], got \[7\]"):
        rms_norm.triton(x, torch.ones(7), eps)


def test_tensors_of_the_cpu_are_refused_without_the_interpreter():
    code = (
        "import torch; from deepinfer.kernels import rms_norm\n"
        "rms_norm.triton(*rms_norm.make_inputs(2, torch.float32, 0))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "DI100" in done.stderr and "TRITON_INTERPRET=1" in done.stderr


def test_the_package_is_imported_without_triton():
    code = "import sys, deepinfer, deepinfer.kernels; sys.exit('triton' in sys.modules)"
    assert importlib.util.find_spec("triton") is not None
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
