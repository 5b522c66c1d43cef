"""Sampling: specified draws, order of the stages, log-probabilities, bad rows, large rows, distribution."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from routes import INTERPRETED
from routes import ROUTES as ROUTE_NAMES
from sampling_cases import rows_of

from deepinfer.errors import UsageError
from deepinfer.kernels import philox, sample, sampling
from deepinfer.kernels.sampling import Arguments

ROUTES = [pytest.param(getattr(sample, name), id=name) for name in ROUTE_NAMES]
INF = float("inf")


def compare_routes(a: Arguments, route: str = "native") -> tuple[torch.Tensor, ...]:
    """Tokens, status and ids equal, log-probabilities close to the reference's; the results of `route`."""
    native, reference = getattr(sample, route)(*a), sample.reference(*a)
    for got, want in zip(native[:3], reference[:3], strict=True):
        assert torch.equal(got, want)
    torch.testing.assert_close(native[3], reference[3], rtol=2e-6, atol=3e-6)
    return native


@pytest.mark.parametrize("route", ROUTES)
def test_single_draws_are_those_specified(route) -> None:
    draws = rows_of([[3, 2, 2, 0, -1]] * 4, seeds=[1, 1, 2, 7], positions=[16389, 16390, 16389, 0], top_p=0.8)
    assert route(*draws)[0].tolist() == [2, 1, 0, 2]


@pytest.mark.parametrize("route", ROUTES)
def test_greedy_takes_the_lowest_id_among_equal_logits_whatever_the_filters(route) -> None:
    a = rows_of([[0, 3, -1, 3, 3], [-0.0, 0.0, -1, -1, -1]], temperatures=0, top_k=1, top_p=0.1, min_p=1.0)
    assert route(*a)[0].tolist() == [1, 0]
    long = torch.full((1, 5000), -1.0)
    long[0, [4000, 4444]] = 7.0
    assert route(*rows_of(long, temperatures=0))[0].item() == 4000


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("row", "status"),
    [
        ([0.0, float("nan"), 1.0], sampling.NOT_A_NUMBER),
        ([0.0, INF, 1.0], sampling.NOT_A_NUMBER),
        ([-INF, float("nan"), -INF], sampling.NOT_A_NUMBER),
        ([-INF] * 3, sampling.NOTHING_ALLOWED),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bad_row_gets_a_status_and_nothing_else(route, row, status, temperature) -> None:
    a = rows_of([[1, 2, 3], row], temperatures=temperature, num_logprobs=2)
    token_ids, statuses, ids, logprobs = route(*a)
    assert statuses.tolist() == [sampling.OK, status]
    assert token_ids[0] >= 0 and token_ids[1] == sampling.NO_TOKEN
    assert ids[1].tolist() == [-1] * 3 and logprobs[1].tolist() == [-INF] * 3


@pytest.mark.parametrize("route", ROUTES)
def test_a_bad_logit_counts_even_where_it_is_banned(route) -> None:
    a = rows_of([[0.0, float("nan"), 1.0], [0.0, INF, 1.0]], bias=[{1: -INF}, {}], allowed=[None, [0, 2]])
    assert route(*a)[1].tolist() == [sampling.NOT_A_NUMBER] * 2


@pytest.mark.parametrize("route", ROUTES)
def test_bans_and_mask_together_may_leave_nothing(route) -> None:
    a = rows_of([[1.0, 2.0, 3.0]] * 2, bias=[{0: -INF}, {}], allowed=[[0], [0]])
    assert route(*a)[1].tolist() == [sampling.NOTHING_ALLOWED, sampling.OK]


@pytest.mark.parametrize("route", ROUTES)
def test_a_bias_beyond_float32_is_no_number(route) -> None:
    assert route(*rows_of([[3e38, 0.0]], bias=[{0: 3e38}]))[1].item() == sampling.NOT_A_NUMBER


@pytest.mark.parametrize("route", ROUTES)
def test_penalties_follow_the_history(route) -> None:
    logits = [[2.0, -2.0, 2.0, 2.0, 0.5]]
    history = [{0: 0, 1: 0, 2: 3}]  # 0 and 1 in the prompt, 2 generated three times
    a = rows_of(logits, penalties=[2.0, 0.25, 0.5], history=history, temperatures=0, num_logprobs=5)
    token_ids, _, ids, logprobs = route(*a)
    adjusted = torch.tensor([1.0, -4.0, 1.0 - 0.75 - 0.5, 2.0, 0.5])
    assert token_ids.item() == 3
    want = adjusted.log_softmax(0)
    assert ids[0].tolist() == [3, 3, 0, 4, 2, 1]
    torch.testing.assert_close(logprobs[0], want[ids[0]])


@pytest.mark.parametrize("route", ROUTES)
def test_bias_comes_before_the_mask_and_bans_are_never_drawn(route) -> None:
    a = rows_of(
        torch.zeros(400, 6),
        positions=range(400),
        bias=[{1: -INF, 2: 50.0}] * 400,
        allowed=[[0, 1, 5]] * 400,
        num_logprobs=6,
    )
    token_ids, _, ids, logprobs = route(*a)
    assert set(token_ids.tolist()) == {0, 5}
    assert ids[0, 1:].tolist() == [0, 5, -1, -1, -1, -1]
    torch.testing.assert_close(logprobs[0, 1:3], torch.full((2,), -math.log(2)))
    assert logprobs[0, 3:].tolist() == [-INF] * 4


@pytest.mark.parametrize("route", ROUTES)
def test_processed_logprobs_describe_what_is_drawn_and_raw_ones_what_came(route) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)) * 2
    a = rows_of(logits, temperatures=[0.5, 2.0, 0.0], top_k=10, bias=[{7: 3.0}] * 3, num_logprobs=3)
    for raw in (False, True):
        token_ids, _, ids, logprobs = route(*a._replace(raw_logprobs=raw))
        for row, temperature in enumerate((0.5, 2.0, 1.0)):
            want = logits[row].double().clone()
            if not raw:
                want[7] += 3.0
                want /= temperature
                if row < 2:
                    want[want < want.topk(10).values[-1]] = -INF
            want = want.log_softmax(0)
            assert ids[row].tolist() == [token_ids[row].item(), *want.topk(3).indices.tolist()]
            torch.testing.assert_close(logprobs[row].double(), want[ids[row]], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("route", ROUTES)
def test_equal_logits_are_listed_by_lower_id(route) -> None:
    a = rows_of([[1.0, 5.0, 5.0, 5.0, 0.0]], num_logprobs=2)
    for raw in (False, True):
        assert route(*a._replace(raw_logprobs=raw))[2][0, 1:].tolist() == [1, 2]


@pytest.mark.parametrize("route", ROUTES)
def test_no_logprobs_and_the_token_s_alone(route) -> None:
    a = rows_of([[1.0, 5.0]])
    assert route(*a)[3].shape == (1, 0)
    for raw in (False, True):
        ids, logprobs = route(*a._replace(num_logprobs=0, raw_logprobs=raw))[2:]
        assert ids.shape == (1, 1)
        torch.testing.assert_close(logprobs[0], torch.tensor([1.0, 5.0]).log_softmax(0)[ids[0]])


def test_huge_logits_and_temperatures_give_no_nan() -> None:
    logits = torch.tensor([[-3e38, 3e38, -INF, 0.0]] * 3)
    for raw in (False, True):
        a = rows_of(logits, temperatures=[1.7e308, 1e-300, 1.0], num_logprobs=4, raw_logprobs=raw)
        token_ids, status, _, logprobs = compare_routes(a)
        assert not status.any() and not logprobs.isnan().any()
        assert token_ids[1:].tolist() == [1, 1]


def any_case(rng: np.random.Generator, rows: int, vocab: int, kind: str) -> Arguments:
    """Every argument used, values drawn by `rng`."""
    logits = rng.normal(size=(rows, vocab)) * 3
    if kind == "ties":
        logits = np.round(logits)
    elif kind == "flat":
        logits = np.zeros((rows, vocab))
    elif kind == "peaked":
        logits[:, rng.integers(vocab)] += 40
    elif kind == "holes":
        logits[rng.random(logits.shape) < 0.9] = -np.inf
    chosen = [rng.choice(vocab, min(vocab, 4), replace=False).tolist() for _ in range(2 * rows)]
    allowed = [np.flatnonzero(rng.random(vocab) < 0.5) if row % 2 else None for row in range(rows)]
    return rows_of(
        logits,
        seeds=rng.integers(-(2**63), 2**63, rows),
        positions=rng.integers(0, 2**31, rows),
        temperatures=rng.choice([0.0, 1e-5, 0.3, 1.0, 9.0], rows),
        top_k=rng.choice([-1, 0, 1, 3, 50, 4095, 4096, 10**9], rows),
        top_p=rng.choice([0.0, 0.1, 0.5, 0.9, 0.999, 1.0], rows),
        min_p=rng.choice([0.0, 0.0, 0.01, 0.3, 1.0], rows),
        penalties=[1.3, 0.2, 0.1],
        history=[{i: int(rng.integers(0, 5)) for i in ids} for ids in chosen[:rows]],
        bias=[{i: float(rng.choice([-np.inf, -2.0, 3.0])) for i in ids} for ids in chosen[rows:]],
        **({"allowed": allowed} if rows > 1 else {}),
        forced_top_k=int(rng.choice([4096, 4096, 0, 1, 7, 300])),
        num_logprobs=int(rng.choice([-1, 0, 1, 20])),
        raw_logprobs=bool(rng.integers(2)),
    )


def one_row(a: Arguments, row: int) -> Arguments:
    """That row alone, with its own lists."""
    parts = {}
    for name, values in (("history", "history_counts"), ("bias", "bias")):
        offsets = getattr(a, f"{name}_offsets")
        first, end = int(offsets[row]), int(offsets[row + 1])
        parts[f"{name}_offsets"] = torch.tensor([0, end - first])
        parts[f"{name}_ids"] = getattr(a, f"{name}_ids")[first:end]
        parts[values] = getattr(a, values)[first:end]
    for name in ("logits", "seeds", "positions", "temperatures", "top_k", "top_p", "min_p", "penalties"):
        parts[name] = getattr(a, name)[row : row + 1]
    if a.mask_index.numel():
        parts["mask_index"] = a.mask_index[row : row + 1]
    return a._replace(**parts)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 5),
    st.sampled_from([1, 2, 15, 16, 17, 255, 256, 257, 1000, 5003, 9001]),
    st.sampled_from(["normal", "ties", "flat", "peaked", "holes"]),
)
def test_native_equals_the_reference_and_the_row_alone(seed, rows, vocab, kind) -> None:
    a = any_case(np.random.default_rng(seed), rows, vocab, kind)
    whole = compare_routes(a)
    for row in range(rows):
        for part, full in zip(sample.native(*one_row(a, row)), whole, strict=True):
            assert torch.equal(part[0], full[row])


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    st.integers(0, 10**6),
    st.integers(0, 4),
    st.sampled_from([1, 2, 255, 257, 1024, 5003]),
    st.sampled_from(["normal", "ties", "flat", "peaked", "holes"]),
)
def test_triton_equals_the_reference_and_the_row_alone(seed, rows, vocab, kind) -> None:
    a = any_case(np.random.default_rng(seed), rows, vocab, kind)
    a = a._replace(forced_top_k=min(a.forced_top_k or 4096, 4096))
    whole = compare_routes(a, "triton")
    for row in range(min(rows, 2)):
        for part, full in zip(sample.triton(*one_row(a, row)), whole, strict=True):
            assert torch.equal(part[0], full[row])


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_triton_refuses_rows_that_may_keep_more_than_a_program_holds() -> None:
    a = rows_of(torch.zeros(1, 4097), forced_top_k=0)
    with pytest.raises(UsageError, match=r"sample: forced_top_k: must lie in 1 \.\. 4096 on a GPU"):
        sample.triton(*a)
    assert sample.triton(*rows_of(torch.zeros(1, 4096), forced_top_k=0))[1].item() == sampling.OK


@pytest.mark.parametrize("kind", ["normal", "ties", "flat", "peaked", "holes"])
def test_the_released_vocabulary(kind, set_threads) -> None:
    a = any_case(np.random.default_rng(9), 6, 129_280, kind)._replace(forced_top_k=4096, num_logprobs=5)
    set_threads(1)
    single = compare_routes(a)
    set_threads(2)
    for got, want in zip(sample.native(*a), single, strict=True):
        assert torch.equal(got, want)


def test_selection_is_that_of_a_sort_for_hostile_rows() -> None:
    vocab = 129_280
    ramp = torch.arange(vocab, dtype=torch.float32)
    rows = torch.stack(
        [
            ramp,
            ramp.flip(0),
            torch.where(ramp % 31 == 0, 1.0, 0.0),
            torch.where(ramp < 4096, 1.0, torch.where(ramp == 70_000, 1.0, 0.0)),
            torch.full((vocab,), -3.4028234663852886e38),
            torch.where(ramp % 2 == 0, -0.0, 0.0),
            torch.where(ramp == 5, 3e38, 1e-45),
            torch.where(ramp < 129_000, -INF, ramp),
        ]
    )
    for forced in (4096, 1, 50):
        a = rows_of(rows, positions=range(8), temperatures=1e6, forced_top_k=forced, num_logprobs=20)
        compare_routes(a)
        if INTERPRETED:
            compare_routes(a, "triton")


def test_draws_follow_the_distribution() -> None:
    logits = np.array([2.0, 1.0, 0.5, -1.0, 0.0, 1.5, -2.0, 0.25])
    count = 200_000
    expected = np.exp(logits / 0.8) / np.exp(logits / 0.8).sum()
    kept = {"plain": np.arange(8), "top_p": np.array([0, 1, 2, 5, 7]), "top_k": np.array([0, 1, 5])}
    filters = {"plain": {}, "top_p": {"top_p": 0.9}, "top_k": {"top_k": 3}}
    batch = torch.from_numpy(np.tile(logits, (count, 1)).astype(np.float32))
    for name, ids in kept.items():
        a = rows_of(batch, seeds=np.arange(count), positions=3, temperatures=0.8, **filters[name])
        counts = np.bincount(sample.native(*a)[0], minlength=8)
        assert counts.sum() == counts[ids].sum() == count
        want = expected[ids] / expected[ids].sum() * count
        chi_square = ((counts[ids] - want) ** 2 / want).sum()
        assert chi_square < 24.3  # p = 0.001 at 7 degrees of freedom; the draws are fixed


@pytest.mark.parametrize("route", ROUTES)
def test_a_word_that_meets_the_edge_of_a_token_gives_the_next_one(route) -> None:
    """4,096 equal logits have masses of 2^19: of two million seeds a few have a word at an edge or before."""
    words = philox.random_word(np.arange(1 << 21), philox.stream(7, philox.FRESH))
    targets = words >> np.uint64(1)  # word * 2^31 / 2^32
    seeds = np.flatnonzero((targets + np.uint64(1)) % np.uint64(1 << 19) <= 1)
    expected = (targets[seeds] >> np.uint64(19)).tolist()
    assert len(seeds) >= 4 and (targets[seeds] % np.uint64(1 << 19) == 0).any()
    a = rows_of(torch.zeros(len(seeds), 4096), seeds=seeds, positions=7)
    assert route(*a)[0].tolist() == expected


def test_forced_top_k_changes_nothing_where_the_tail_weighs_nothing() -> None:
    logits = torch.randn(50, 6000, generator=torch.Generator().manual_seed(2))
    logits[:, 4000:] -= 60
    a = rows_of(logits, positions=range(50))
    assert torch.equal(sample.native(*a)[0], sample.native(*a._replace(forced_top_k=0))[0])


def lists(ids: list[int]) -> dict[str, torch.Tensor]:
    return {"bias_ids": torch.tensor(ids), "bias": torch.zeros(len(ids))}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"temperatures": -1.0}, "temperatures"),
        ({"temperatures": float("nan")}, "temperatures"),
        ({"positions": -1}, "positions"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": float("nan")}, "min_p"),
        ({"penalties": [0.0, 0, 0]}, "penalties"),
        ({"penalties": [1.0, INF, 0]}, "penalties"),
        ({"history": [{0: -1}, {}]}, "history_counts"),
        ({"history": [{3: 1}, {}]}, "history_ids"),
        ({"bias": [{}, {0: INF}]}, "bias"),
        ({"bias": [{}, {0: float("nan")}]}, "bias"),
        ({"bias": [{-1: 0.0}, {}]}, "bias_ids"),
        ({"bias_offsets": torch.tensor([0, 1, 3]), **lists([0])}, "bias_"),
        ({"bias_offsets": torch.tensor([0, 2, 2]), **lists([1, 1])}, "bias_ids"),
        ({"mask_index": torch.tensor([0, -1])}, "mask_index"),
        ({"masks": torch.zeros(1, 2, dtype=torch.int32)}, "masks"),
        ({"num_logprobs": -2}, "num_logprobs"),
        ({"forced_top_k": -1}, "forced_top_k"),
        ({"logits": torch.zeros(2, 0)}, "logits"),
        ({"seeds": torch.zeros(3, dtype=torch.int64)}, "seeds"),
        ({"top_k": torch.zeros(3, dtype=torch.int64)}, "top_k"),
    ],
)
def test_arguments_out_of_range_are_refused(change, words) -> None:
    fields = {name: change.pop(name) for name in list(change) if isinstance(change[name], torch.Tensor)}
    a = rows_of([[1.0, 2.0, 3.0]] * 2, **change)._replace(**fields)
    with pytest.raises(UsageError, match=words):
        sample.reference(*a)
    with pytest.raises(RuntimeError, match=f"sample: .*{words}"):
        sample.native(*a)
