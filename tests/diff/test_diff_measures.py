"""How measurements become verdicts: what is not finite, what is left out, and what limits allow."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer import tolerances as limits
from deepinfer.artifacts import GraphEntry
from deepinfer.comparison import GROUP_ROWS, Ratio, RowMeasures
from deepinfer.diff import judge_graph

ENTRY = GraphEntry(name="decode-4", phase="decode", bucket=4, request_rows=4)
FLOAT32, NATIVE = limits.TOLERANCES["float32"], limits.TOLERANCES["native"]


def measures(errors: Sequence[float], margins: Sequence[float]) -> RowMeasures:
    """Rows whose first logit is off by `errors`, with decisions as narrow as `margins`."""
    eager = torch.randn(len(errors), 32, generator=torch.Generator().manual_seed(1))
    compiled = eager.clone()
    compiled[:, 0] += torch.tensor(errors)
    rows = RowMeasures()
    rows.add(list(range(len(errors))), compiled, eager, torch.tensor(margins))
    return rows


def judge(errors: Sequence[float], margins: Sequence[float], precision: str = "float32") -> dict:
    return judge_graph(ENTRY, measures(errors, margins), precision, limits.TOLERANCES[precision])


def test_errors_are_held_to_the_limit() -> None:
    assert judge([0.0] * 10, [1.0] * 10)["passed"]
    assert judge([9e-5] * 10, [1.0] * 10)["passed"]
    assert not judge([0.0] * 9 + [2e-4], [1.0] * 10)["passed"]


def test_rows_with_narrow_decisions_are_left_out_but_counted() -> None:
    judged = judge([3.0, 3.0] + [0.0] * 8, [1e-5, 9e-5] + [1.0] * 8)
    assert judged["passed"] and judged["excluded_rows"] == 2 and judged["rows"] == 10
    assert judged["max_abs_error"] == 0.0
    assert judged["min_margin"] == pytest.approx(1e-5)
    assert [entry["position"] for entry in judged["positions"]] == list(range(2, 10))


def test_too_many_rows_left_out_fail_even_without_an_error() -> None:
    assert judge([0.0] * 10, [1e-5] * 2 + [1.0] * 8)["passed"]
    assert not judge([0.0] * 10, [1e-5] * 3 + [1.0] * 7)["passed"]
    assert not judge([0.0] * 10, [1e-5] * 10)["passed"]


def test_no_rows_is_no_proof() -> None:
    assert not judge_graph(ENTRY, RowMeasures(), "float32", FLOAT32)["passed"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 5, 9])
@pytest.mark.parametrize("precision", ["float32", "native"])
def test_what_is_not_finite_fails_wherever_it_is(bad: float, where: int, precision: str) -> None:
    errors = [0.0] * 10
    errors[where] = bad
    margins = [1e-5] + [1.0] * 9  # also on a row that is left out
    judged = judge(errors, margins, precision)
    assert not judged["passed"] and judged["max_abs_error"] is None
    shown = [entry["position"] for entry in judged["positions"] if entry["max_abs_error"] is None]
    assert shown == ([where] if where else [])


def test_a_position_with_one_finite_row_is_not_finite() -> None:
    rows = measures([0.0, math.nan, 0.0], [1.0] * 3)
    rows.positions = [4, 4, 4]
    judged = judge_graph(ENTRY, rows, "float32", FLOAT32)
    assert judged["positions"][0]["max_abs_error"] is None


def test_native_rows_are_held_to_coarse_limits() -> None:
    eager = torch.randn(20, 64, generator=torch.Generator().manual_seed(2))
    noise = torch.randn(20, 64, generator=torch.Generator().manual_seed(3))
    for scale, passed in ((0.1, True), (0.3, True), (0.5, False)):
        rows = RowMeasures()
        rows.add(list(range(20)), eager + scale * noise, eager, torch.ones(20))
        assert judge_graph(ENTRY, rows, "native", NATIVE)["passed"] is passed
    rows = RowMeasures()
    rows.add(list(range(20)), eager.roll(1, 0), eager, torch.ones(20))
    assert not judge_graph(ENTRY, rows, "native", NATIVE)["passed"]


def test_the_head_is_sharp_in_native_precision_too() -> None:
    entry = GraphEntry(name="logits-4", phase="logits", bucket=4, request_rows=0)
    rows = measures([0.0] * 9 + [2e-4], [math.inf] * 10)
    assert not judge_graph(entry, rows, "native", NATIVE)["passed"]


def test_a_manifest_tightens_limits_and_never_loosens_them() -> None:
    loose = {name: (-1.0 if name == limits.LOGITS_COSINE else 1e9) for name in NATIVE}
    assert limits.strictest(loose, "native") == NATIVE
    assert limits.strictest({}, "float32") == FLOAT32
    tight = {limits.LOGITS_MAX_ABS: 1e-6, limits.LOGITS_COSINE: 0.99}
    assert limits.strictest(tight, "native") == {**NATIVE, **tight}


@given(st.lists(st.integers(1, 150), min_size=1, max_size=8), st.floats(0.01, 2.0))
def test_a_ratio_does_not_depend_on_how_rows_arrive(sizes: list[int], scale: float) -> None:
    rows = sum(sizes)
    expected = torch.ones(rows, 3, dtype=torch.float64)
    ratio = Ratio()
    for part in (expected * (1 + scale)).split(sizes):
        ratio.add(part, torch.ones(len(part), 3, dtype=torch.float64))
    assert ratio.value == pytest.approx(scale, rel=1e-9)


def test_a_few_wrong_rows_are_not_lost_among_many() -> None:
    for where in (0, 5000, 9999):
        actual = torch.ones(10_000, 4)
        actual[where] = 1.5
        ratio = Ratio()
        for part in actual.split(16):
            ratio.add(part, torch.ones(len(part), 4))
        assert ratio.value >= 0.5 / (2 * GROUP_ROWS) ** 0.5


def test_a_ratio_of_nothing_of_zeros_and_of_nan() -> None:
    assert Ratio().value == 0.0
    zeros = Ratio()
    zeros.add(torch.zeros(3, 2), torch.zeros(3, 2))
    assert zeros.value == 0.0
    zeros.add(torch.ones(1, 2), torch.zeros(1, 2))
    assert zeros.value == math.inf
    for order in ((math.nan, 1.0), (1.0, math.nan)):
        ratio = Ratio()
        for value in order:
            ratio.add(torch.full((GROUP_ROWS, 1), value), torch.ones(GROUP_ROWS, 1))
        assert math.isnan(ratio.value)
