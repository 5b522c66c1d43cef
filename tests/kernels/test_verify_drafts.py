"""Verification of drafts: the specified chains, the law of what comes out, greedy, bad rows, refusals."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from routes import INTERPRETED
from routes import ROUTES as ROUTE_NAMES
from sampling_cases import rows_of

from deepinfer.errors import UsageError
from deepinfer.kernels import philox, sample, sampling, verify_drafts
from deepinfer.kernels.verify_drafts import leftover_masses

ROUTES = [pytest.param(getattr(verify_drafts, name), id=name) for name in ROUTE_NAMES]
TARGET = [[3, 2, 2, 0, -1], [0, 1, 2, 3, 4], [1, 1, 1, 1, 1]]
DRAFT = [[2, 3, 2, 0, 0], [0, 0, 2, 3, 3]]
DRAFT_SEED = 1_000_000_007
INF = float("inf")


def arguments(
    logits: Any, offsets: Any, drafts: Any, log_q: Any, index: Any, **columns: Any
) -> tuple[Any, ...]:
    a = rows_of(logits, **columns)
    return (
        a.logits,
        torch.as_tensor(offsets, dtype=torch.int64),
        torch.as_tensor(drafts, dtype=torch.int64),
        torch.as_tensor(log_q, dtype=torch.float32).contiguous(),
        torch.as_tensor(index, dtype=torch.int64),
        *a[1:],
    )


def integer_log_q(logits: Any) -> torch.Tensor:
    """What a draft pool holds: the logarithms of the integer distribution that drafts are drawn from."""
    rows = []
    for row in np.asarray(logits, np.float32):
        masses = sampling.weigh(row, row.max(), np.float32(1))[1].astype(np.float64)
        with np.errstate(divide="ignore"):
            rows.append(np.log(masses) - np.log(masses.sum()))
    return torch.from_numpy(np.stack(rows).astype(np.float32))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("seed", "drafts", "emitted"),
    [(1, [2, 3], [2, 3, 2]), (2, [2, 4], [2, 4, 0]), (5, [1, 4], [0]), (10, [1, 3], [1, 4])],
)
def test_chains_are_those_specified(route, seed, drafts, emitted) -> None:
    place = 16390
    drawn = rows_of(
        DRAFT, seeds=seed + DRAFT_SEED, positions=[place, place + philox.ROW_STRIDE], forced_top_k=0
    )
    assert sample.native(*drawn)[0].tolist() == drafts
    case = arguments(
        TARGET, [0, 3], [*drafts, -1], integer_log_q(DRAFT), [0, 1, -1], seeds=seed, positions=place
    )
    token_ids, counts, status, _, _ = route(*case)
    assert counts.tolist() == [len(emitted)] and status.tolist() == [sampling.OK]
    assert token_ids.tolist() == emitted + [sampling.NO_TOKEN] * (3 - len(emitted))


def test_leftovers_are_those_specified() -> None:
    a = rows_of(TARGET)
    log_q = integer_log_q(DRAFT).numpy()
    for row, want in [(0, [760066187, 0, 7531418, 1019267, 0]), (1, [0, 24714143, 0, 0, 496396856])]:
        got = leftover_masses(sampling.distribution(a, row), log_q[row]).astype(np.int64)
        assert np.abs(got - want).max() <= 600  # float32 shares, of 2**31


@pytest.mark.parametrize("route", ROUTES)
def test_a_draft_outside_the_kept_set_fails_and_one_that_q_excludes_passes(route) -> None:
    log_q = [[-INF, -INF, -INF, -INF, 0.0]]
    for seed in range(20):
        case = arguments(TARGET[:2], [0, 2], [4, -1], log_q, [0, -1], seeds=seed, top_k=1)
        assert route(*case)[1].tolist() == [1]
        case = arguments(TARGET[:2], [0, 2], [0, -1], log_q, [0, -1], seeds=seed)
        assert route(*case)[1].tolist() == [2]


@pytest.mark.parametrize("route", ROUTES)
def test_a_placeholder_draft_leaves_the_target_itself_by_the_stream_of_a_rejection(route) -> None:
    log_q = torch.full((1, 5), -INF)
    log_q[0, 4] = 0.0  # all of it on the placeholder, which top-k excludes
    case = arguments(
        TARGET[:1] * 40,
        range(0, 41, 2),
        [4, -1] * 20,
        log_q,
        [0, -1] * 20,
        top_k=4,
        positions=np.repeat(range(20), 2),
    )
    token_ids, counts, _, _, _ = route(*case)
    assert counts.tolist() == [1] * 20
    a = rows_of(TARGET[:1] * 20, top_k=4, positions=range(20))
    for request in range(20):
        found = sampling.distribution(a, request)
        want = sampling.draw_token(a, request, found, philox.RESAMPLE)
        assert token_ids[2 * request] == want


@pytest.mark.parametrize("route", ROUTES)
def test_greedy_accepts_the_largest_logit_alone(route) -> None:
    log_q = [[0.0, -INF, -INF, -INF, -INF]]
    case = arguments(TARGET + TARGET, [0, 3, 6], [0, 4, -1, 0, 3, -1], log_q, [0, 0, -1] * 2, temperatures=0)
    token_ids, counts, _, _, _ = route(*case)
    assert counts.tolist() == [3, 2]
    assert token_ids.tolist() == [0, 4, 0, 0, 4, -1]


@pytest.mark.parametrize("route", ROUTES)
def test_without_drafts_it_is_sample(route) -> None:
    logits = torch.randn(30, 200, generator=torch.Generator().manual_seed(3))
    columns = {"positions": range(30), "seeds": range(30), "top_p": 0.9, "num_logprobs": 3}
    case = arguments(logits, range(31), [-1] * 30, torch.zeros(0, 200), [-1] * 30, **columns)
    token_ids, counts, status, ids, logprobs = route(*case)
    want = sample.native(*rows_of(logits, **columns))
    assert counts.tolist() == [1] * 30
    assert torch.equal(token_ids, want[0]) and torch.equal(status, want[1]) and torch.equal(ids, want[2])
    torch.testing.assert_close(logprobs, want[3], rtol=2e-6, atol=3e-6)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("bad_row", [0, 1, 2])
def test_a_bad_row_ends_its_request_only_where_it_is_reached(route, bad_row) -> None:
    logits = torch.tensor(TARGET * 2, dtype=torch.float32)
    logits[bad_row, 3] = float("nan")
    log_q = integer_log_q(TARGET[:2])  # equal to the target: every draft passes
    case = arguments(logits, [0, 3, 6], [0, 4, -1] * 2, log_q, [0, 1, -1] * 2, num_logprobs=1)
    token_ids, counts, status, ids, logprobs = route(*case)
    assert counts.tolist() == [bad_row, 3]
    assert status.tolist() == [sampling.NOT_A_NUMBER, sampling.OK]
    assert (token_ids[:3] >= 0).tolist() == [row < bad_row for row in range(3)]
    assert ids[bad_row].tolist() == [-1, -1] and logprobs[bad_row].tolist() == [-INF, -INF]
    logits[0] = torch.tensor([9.0, -INF, -INF, -INF, -INF])  # the first draft fails: later rows do not matter
    case = arguments(logits, [0, 3, 6], [1, 4, -1] * 2, log_q, [0, 1, -1] * 2)
    assert route(*case)[2][0] == sampling.OK


@pytest.mark.parametrize("route", ROUTES)
def test_a_nan_in_the_proposal_fails_the_draft(route) -> None:
    log_q = torch.full((1, 5), float("nan"))
    case = arguments(TARGET[:2], [0, 2], [0, -1], log_q, [0, -1])
    token_ids, counts, status, _, _ = route(*case)
    assert counts.tolist() == [1] and status.tolist() == [sampling.OK] and 0 <= token_ids[0] < 5


def test_log_probabilities_are_the_target_s() -> None:
    log_q = integer_log_q(DRAFT)
    case = arguments(TARGET, [0, 3], [1, 3, -1], log_q, [0, 1, -1], seeds=10, positions=16390, num_logprobs=0)
    token_ids, _, _, ids, logprobs = verify_drafts.native(*case)
    assert ids[:, 0].tolist() == token_ids.tolist() == [1, 4, -1]
    want = torch.tensor(TARGET, dtype=torch.float32).log_softmax(-1)
    torch.testing.assert_close(logprobs[:2, 0], torch.stack((want[0, 1], want[1, 4])))


def test_what_comes_out_follows_the_target() -> None:
    """Drafts from another distribution, a million draws: chi-square of the first and the second token."""
    count = 500_000
    target = torch.tensor([[1.0, 0.2, -0.5, 2.0], [0.0, 1.0, 0.5, -1.0]])
    log_q = integer_log_q([[0.0, 1.5, 0.0, 0.5]])
    seeds = np.arange(count)
    drafts = sample.native(
        *rows_of(torch.tensor([[0.0, 1.5, 0.0, 0.5]]).expand(count, 4), seeds=seeds + DRAFT_SEED, positions=9)
    )[0]
    case = arguments(
        target.repeat(count, 1),
        np.arange(count + 1) * 2,
        torch.stack((drafts, torch.full_like(drafts, -1)), 1).flatten(),
        log_q,
        np.tile([0, -1], count),
        seeds=np.repeat(seeds, 2),
        positions=9,
    )
    token_ids, counts, _, _, _ = verify_drafts.native(*case)
    pairs = token_ids.view(count, 2)
    for row, drawn in ((0, pairs[:, 0]), (1, pairs[counts == 2, 1])):
        want = target[row].double().softmax(0) * len(drawn)
        got = torch.bincount(drawn, minlength=4)
        assert (
            (got - want) ** 2 / want
        ).sum() < 16.3  # p = 0.001 at 3 degrees of freedom; the draws are fixed
    assert 0.3 < (counts == 2).double().mean() < 0.9


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_the_law_of_one_step_is_within_5e_5_of_the_target(seed) -> None:
    """By exact enumeration of accept and redraw (spec engine B-T4)."""
    rng = np.random.default_rng(seed)
    a = rows_of(rng.normal(size=(1, 12)) * rng.choice([0.5, 3]))
    log_q = integer_log_q(rng.normal(size=(1, 12)) * rng.choice([0.5, 3]))[0].numpy()
    found = sampling.distribution(a, 0)
    p, q = found.masses / found.masses.sum(), np.exp(log_q.astype(np.float64))
    passes = np.minimum(p / q, 1)
    rest = leftover_masses(found, log_q).astype(np.float64)
    law = q * passes + (q * (1 - passes)).sum() * rest / rest.sum()
    assert np.abs(law / law.sum() - p).sum() / 2 <= 5e-5


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12))
def test_native_equals_the_reference_and_the_request_alone(seed, rows) -> None:
    compare_with_the_reference("native", seed, rows)


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(0, 8))
def test_triton_equals_the_reference_and_the_request_alone(seed, rows) -> None:
    compare_with_the_reference("triton", seed, rows)


def compare_with_the_reference(route: str, seed: int, rows: int) -> None:
    run = getattr(verify_drafts, route)
    case = verify_drafts.make_inputs(rows, torch.float32, seed)
    native, reference = run(*case), verify_drafts.reference(*case)
    for got, want in zip(native[:4], reference[:4], strict=True):
        assert torch.equal(got, want)
    torch.testing.assert_close(native[4], reference[4], rtol=2e-6, atol=3e-6)
    offsets = case[1].tolist()
    for request, (first, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        rows_ = slice(first, end)
        per_row = {0, 2, 4, 5, 6, 7, 8, 9, 10, 19}
        alone = [value[rows_] if i in per_row else value for i, value in enumerate(case)]
        alone[1] = torch.tensor([0, end - first])
        token_ids, counts, status, ids, logprobs = run(*alone)
        assert torch.equal(token_ids, native[0][rows_]) and torch.equal(logprobs, native[4][rows_])
        assert counts == native[1][request] and status == native[2][request]
        assert torch.equal(ids, native[3][rows_])


def test_threads_change_nothing(set_threads) -> None:
    case = verify_drafts.make_inputs(900, torch.float32, 8)
    set_threads(1)
    single = verify_drafts.native(*case)
    set_threads(2)
    for got, want in zip(verify_drafts.native(*case), single, strict=True):
        assert torch.equal(got, want)


def test_a_pool_beyond_two_to_the_31_values_is_addressed(tmp_path) -> None:
    lines = 2**31 // 500_000 + 2
    file = tmp_path / "pool"
    with file.open("wb") as opened:
        opened.truncate(lines * 500_000 * 4)  # sparse: takes no room
    pool = torch.from_file(str(file), shared=True, size=lines * 500_000).view(lines, 500_000)
    pool[-1, 9] = -INF  # q is 0 there, so the draft always passes; everywhere else q is 1
    logits = torch.zeros(2, 500_000)
    logits[0, [7, 9]] = 40.0
    for line, all_pass in ((lines - 1, True), (0, False)):
        counts = [
            verify_drafts.native(
                *arguments(logits, [0, 2], [9, -1], pool, [line, -1], seeds=seed, temperatures=1.0)
            )[1].item()
            for seed in range(12)
        ]
        assert (counts == [2] * 12) is all_pass


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"offsets": [0, 2]}, "row_offsets"),
        ({"offsets": [0, 3, 3]}, "row_offsets"),
        ({"offsets": [1, 3]}, "row_offsets"),
        ({"offsets": [0, 9, 3]}, "row_offsets"),
        ({"offsets": []}, "row_offsets"),
        ({"drafts": [5, 0, -1]}, "draft_ids"),
        ({"drafts": [0, -1, -1]}, "draft_ids"),
        ({"index": [0, 2, -1]}, "draft_index"),
        ({"index": [-1, 0, -1]}, "draft_index"),
        ({"positions": philox.ROW_STRIDE}, "positions"),
        ({"log_q": torch.zeros(2, 4)}, "draft_log_probs"),
    ],
)
def test_arguments_out_of_range_are_refused(change, words) -> None:
    plain = {
        "offsets": [0, 3],
        "drafts": [0, 0, -1],
        "log_q": integer_log_q(DRAFT),
        "index": [0, 1, -1],
    }
    case = arguments(TARGET, **{**plain, **change})
    with pytest.raises(UsageError, match=words):
        verify_drafts.reference(*case)
    with pytest.raises(RuntimeError, match=f"verify_drafts: .*{words}"):
        verify_drafts.native(*case)
