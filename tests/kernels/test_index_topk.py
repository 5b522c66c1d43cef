"""Index scores, picks and candidate blocks: plain definitions, float64, golden vectors, what is read."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from routes import ROUTES

from deepinfer.errors import UsageError
from deepinfer.kernels import index_topk
from deepinfer.kernels.index_topk import entries_of_blocks
from deepinfer.kernels.quantize_fp4 import dequantize_fp4_reference, quantize_fp4_reference

LOW, NAN = -math.inf, math.nan
# few distinct values, so that ties are the rule
SCORES = st.sampled_from([LOW, NAN, math.inf, -1.0, -0.0, 0.0, 0.5, 2.0])
NO_LIMIT = torch.empty(1, 0, dtype=torch.int64)


def paged(keys: torch.Tensor, entries: int, columns: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A region with one request's `keys [n, record]` in blocks of descending number, and its block table."""
    used = -(-keys.shape[0] // entries)
    region = keys.new_zeros(used + 1, entries, keys.shape[1])
    table = torch.zeros(1, max(columns, used), dtype=torch.int64)
    table[0, :used] = torch.arange(used, 0, -1)
    for entry, key in enumerate(keys):
        region[table[0, entry // entries], entry % entries] = key
    return region, table


def given_scores(route, scores, top_k, block_size=4, topk_blocks=0, candidates=NO_LIMIT, entries=3):
    """The op on one row whose scores are `scores`: relu(s) - relu(-s) of keys of one element."""
    region, table = paged(torch.tensor(scores).reshape(-1, 1), entries, 1)
    query, weights = torch.tensor([[[1.0], [-1.0]]]), torch.tensor([[1.0, -1.0]])
    picks, blocks, got = getattr(index_topk, route)(
        *(query, weights, region, candidates, torch.tensor([len(scores) - 1]), torch.tensor([0]), table),
        *(1, top_k, block_size, topk_blocks, False, True),
    )
    if not candidates.shape[1]:
        want = torch.tensor(scores)
        torch.testing.assert_close(got[0, : len(scores)], want, rtol=0, atol=0, equal_nan=True)
    return picks[0].tolist(), blocks[0].tolist()


def best_of(values: list[float], count: int) -> list[int]:
    """The definition: the higher value first, then the lower index; ascending, padded with -1."""
    shown = [index for index, value in enumerate(values) if value > LOW]
    found = sorted(sorted(shown, key=lambda index: (-values[index], index))[:count])
    return found + [-1] * (count - len(found))


def block_values(scores: list[float], size: int) -> list[float]:
    numbers = [LOW if math.isnan(score) else score for score in scores]
    values = [max(numbers[start : start + size]) for start in range(0, len(scores), size)]
    return [*values[:-1], math.inf]


@settings(max_examples=150, deadline=None)
@given(scores=st.lists(SCORES, min_size=1, max_size=70), count=st.integers(0, 40))
def test_picks_equal_their_definition(scores, count):
    for route in ROUTES:
        assert given_scores(route, scores, count)[0] == best_of(scores, count)


@settings(max_examples=100, deadline=None)
@given(scores=st.lists(SCORES, min_size=1, max_size=70), size=st.integers(1, 9), count=st.integers(1, 9))
def test_candidate_blocks_equal_their_definition(scores, size, count):
    want = best_of(block_values(scores, size), count)
    for route in ROUTES:
        picks, blocks = given_scores(route, scores, 5, size, count)
        assert blocks == want
        assert picks == best_of(scores, 5)  # the source itself picks from all


@settings(max_examples=100, deadline=None)
@given(
    scores=st.lists(SCORES, min_size=1, max_size=70),
    size=st.integers(1, 9),
    kept=st.sets(st.integers(0, 80), max_size=9),
)
def test_candidates_limit_the_picks(scores, size, kept):
    """Blocks beyond the visible entries are no fault: they hold nothing."""
    limited = [score if entry // size in kept else LOW for entry, score in enumerate(scores)]
    candidates = torch.tensor([sorted(kept) + [-1] * (10 - len(kept))])
    for route in ROUTES:
        assert given_scores(route, scores, 6, size, candidates=candidates)[0] == best_of(limited, 6)


@pytest.mark.parametrize("order", ["random", "ascending", "descending", "equal", "few"])
@pytest.mark.parametrize("count", [1, 31, 512])
def test_long_contexts_are_selected_exactly(order, count):
    """The orders that fill and empty the running selection in every way."""
    generator = torch.Generator().manual_seed(count)
    scores = torch.rand(5000, generator=generator)
    if order in ("ascending", "descending"):
        scores = scores.sort(descending=order == "descending").values
    elif order != "random":
        scores = (scores * (1 if order == "equal" else 3)).floor()
    picks, blocks = given_scores("native", scores.tolist(), count, 8, count, entries=64)
    assert picks == best_of(scores.tolist(), count)
    assert blocks == best_of(block_values(scores.tolist(), 8), count)


@pytest.mark.parametrize("route", ROUTES)
def test_nothing_visible_picks_nothing(route):
    query, weights, region, *_ = index_topk.make_inputs(3, torch.bfloat16, 1)
    positions = torch.tensor([-1, 0, 1])  # padding, an open group, a closed one
    picks, blocks, scores = getattr(index_topk, route)(
        *(query, weights, region, NO_LIMIT.repeat(3, 1), positions, torch.zeros(3, dtype=torch.int64)),
        *(torch.tensor([[1, 2]]), 2, 4, 4, 3, True, True),
    )
    assert picks.tolist() == [[-1] * 4, [-1] * 4, [0, -1, -1, -1]]
    assert blocks.tolist() == [[-1] * 3, [-1] * 3, [0, -1, -1]]
    assert (scores > LOW).sum(1).tolist() == [0, 0, 1]


@pytest.mark.parametrize(("count", "size"), [(3, 8), (4, 4)])
@pytest.mark.parametrize("route", ROUTES)
def test_candidates_agree_with_the_vendor(route, count, size, golden_kernels):
    scores = golden_kernels["cand.scores"].float()
    for row, visible in enumerate(golden_kernels["cand.visible"].tolist()):
        want = golden_kernels[f"cand.k{count}_b{size}"][row].bool()
        if visible:
            blocks = given_scores(route, scores[row, :visible].tolist(), 1, size, count)[1]
            want = want.nonzero().flatten().tolist()
            kept = entries_of_blocks(torch.tensor([blocks]), size, scores.shape[1])
            assert kept[0].nonzero().flatten().tolist() == want


@pytest.mark.parametrize("layer", [1, 3, 4])
@pytest.mark.parametrize("route", ROUTES)
def test_golden_queries_and_keys(route, layer, golden_values):
    """The vendor rounds its scores to bf16, so picks may differ where scores are as close as that (7.3)."""
    query, weights, keys = (golden_values[f"L{layer}.index_{name}"] for name in "qwk")
    ratio, rows = 40 // len(keys), len(query)
    region, table = paged(quantize_fp4_reference(keys, "e8m0"), 32)
    picks, blocks, scores = getattr(index_topk, route)(
        *(query, weights, region, NO_LIMIT.repeat(rows, 1), torch.arange(rows)),
        *(torch.zeros(rows, dtype=torch.int64), table, ratio, 8, 4, 4 * (layer == 4), True, True),
    )
    stored = golden_values[f"L{layer}.index_score"].float()
    shown = stored > LOW
    assert torch.equal(shown, scores[:, : len(keys)] > LOW)
    torch.testing.assert_close(scores[:, : len(keys)][shown], stored[shown], rtol=2**-6, atol=2**-7)
    assert (picks == golden_values[f"L{layer}.topk"].long()).all(1).float().mean() >= 0.75
    if layer == 4:
        kept = entries_of_blocks(blocks, 4, 40) & shown
        assert (kept == (golden_values["L4.candidates"].bool() & shown)).float().mean() >= 0.95


def long_inputs(quantize: bool, contexts=(300, 41, 1), heads=5, dim=96, columns=40, entries=10):
    """Chunks of several requests with many visible entries, `contexts` being where they end."""
    generator = torch.Generator().manual_seed(len(contexts))
    region = torch.randn(len(contexts) * columns + 1, entries, dim, generator=generator)
    region = quantize_fp4_reference(region, "e8m0") if quantize else region
    table = 1 + torch.randperm(len(contexts) * columns, generator=generator).reshape(len(contexts), columns)
    counts = [min(end, 19) for end in contexts]
    positions = torch.cat(
        [torch.arange(end - count, end) for end, count in zip(contexts, counts, strict=True)]
    )
    lines = torch.arange(len(contexts)).repeat_interleave(torch.tensor(counts))
    query = torch.randn(len(positions), heads, dim, generator=generator)
    query = query.bfloat16() if quantize else query
    weights = torch.randn(len(positions), heads, generator=generator)
    return [
        *(query, weights, region, NO_LIMIT.repeat(len(positions), 1), positions, lines, table),
        *(1, 37, 8, 0, quantize, True),
    ]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("quantize", [True, False])
def test_scores_are_close_to_float64(route, quantize):
    inputs = long_inputs(quantize)
    query, weights, region, _, positions, lines, table = inputs[:7]
    keys = region[table[lines]].flatten(1, 2)
    if quantize:
        keys = dequantize_fp4_reference(keys, "e8m0", torch.float32)
        query = dequantize_fp4_reference(quantize_fp4_reference(query, "e8m0"), "e8m0", torch.float32)
    dots = torch.einsum("thd,tnd->thn", query.double(), keys.double())
    exact = (dots.relu() * weights.double().unsqueeze(-1)).sum(1)
    scores = getattr(index_topk, route)(*inputs)[2]
    shown = torch.arange(scores.shape[1]) <= positions.unsqueeze(1)
    torch.testing.assert_close(scores[shown].double(), exact[shown], rtol=1e-5, atol=1e-5)
    assert (scores[~shown] == LOW).all()


def test_fp4_scores_are_those_of_the_reference_to_the_bit(same_bytes):
    """Products of 4-bit values with a common scale are exact, whatever their order."""
    inputs = long_inputs(True)
    for got, want in zip(index_topk.native(*inputs), index_topk.reference(*inputs), strict=True):
        same_bytes(got, want)


@pytest.mark.parametrize("quantize", [True, False])
def test_native_sums_in_the_documented_order(quantize):
    """One row and entry, operation by operation: fused chains in float64 rounded once per step."""
    inputs = long_inputs(quantize, contexts=(50,))
    query, weights, region, _, _, _, table = inputs[:7]
    scores = index_topk.native(*inputs)[2]
    keys = region[table[0]].flatten(0, 1)
    if quantize:
        keys = dequantize_fp4_reference(keys, "e8m0", torch.float32)
        query = dequantize_fp4_reference(quantize_fp4_reference(query, "e8m0"), "e8m0", torch.float32)
    for row, entry in ((0, 3), (5, 36), (18, 49)):
        total = None
        for head in range(query.shape[1]):
            dot = torch.zeros((), dtype=torch.float32)
            if quantize:
                for start in range(0, 96, 32):
                    part = slice(start, start + 32)
                    dot = dot + (query[row, head, part].double() @ keys[entry, part].double()).float()
            else:
                for a, b in zip(query[row, head], keys[entry], strict=True):
                    dot = (a.double() * b.double() + dot.double()).float()
            term = dot.relu() * weights[row, head]
            total = term if total is None else total + term
        assert scores[row, entry] == total


@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize("limited", [False, True])
def test_a_row_alone_equals_itself_in_a_chunk_and_among_padding(quantize, limited, same_bytes, set_threads):
    inputs = long_inputs(quantize)
    inputs[10] = 0 if limited else 6
    if limited:
        generator = torch.Generator().manual_seed(0)
        chosen = torch.rand(len(inputs[0]), 40, generator=generator).argsort(1)[:, :9].sort(1).values
        inputs[3] = torch.cat((chosen, torch.full((len(chosen), 2), -1)), dim=1)
    per_row = (0, 1, 3, 4, 5)
    for route in ROUTES:
        run = getattr(index_topk, route)
        set_threads(1)
        whole = run(*inputs)
        for row in (0, 7, 18, 19, 30, 38):
            alone = [
                value[row : row + 1] if index in per_row else value for index, value in enumerate(inputs)
            ]
            for got, want in zip(run(*alone), whole, strict=True):
                same_bytes(got, want[row : row + 1])
        set_threads(2)
        padded = [
            torch.cat((value, value[:5])) if index in per_row else value for index, value in enumerate(inputs)
        ]
        padded[4] = torch.cat((inputs[4], torch.full((5,), -1)))
        picks, _, scores = run(*padded)
        same_bytes(picks[:-5], whole[0])
        same_bytes(scores[:-5], whole[2])
        assert (picks[-5:] == -1).all()
        assert (scores[-5:] == LOW).all()


@pytest.mark.parametrize("quantize", [True, False])
def test_a_context_shared_out_over_threads_changes_no_byte(quantize, same_bytes, set_threads):
    inputs = long_inputs(quantize, contexts=(6000, 5), heads=8, dim=64, columns=64, entries=96)
    inputs[10] = 20
    set_threads(1)
    whole = index_topk.native(*inputs)
    set_threads(2)
    for got, want in zip(index_topk.native(*inputs), whole, strict=True):
        same_bytes(got, want)


@pytest.mark.parametrize("quantize", [True, False])
def test_only_visible_entries_are_read(quantize, same_bytes):
    """Beyond them the block table may hold anything, and what lies in the region may be NaN."""
    inputs = long_inputs(quantize, contexts=(133,))
    whole = index_topk.native(*inputs)
    poisoned = list(inputs)
    poisoned[6] = torch.cat((inputs[6], torch.full((1, 4000), 1 << 60)), dim=1)
    poisoned[6][0, 14:] = 1 << 60
    poisoned[2] = inputs[2].clone()
    unseen = torch.ones(inputs[2].shape[:2], dtype=torch.bool)
    for entry in range(133):
        unseen[inputs[6][0, entry // 10], entry % 10] = False
    poisoned[2][unseen] = 255 if quantize else NAN
    picks, _, scores = index_topk.native(*poisoned)
    same_bytes(picks, whole[0])
    same_bytes(scores[:, : whole[2].shape[1]].contiguous(), whole[2])


@pytest.mark.parametrize("quantize", [True, False])
def test_with_candidates_only_their_entries_are_read(quantize, same_bytes):
    inputs = long_inputs(quantize, contexts=(133,))
    inputs[3] = torch.tensor([[1, 3, 11, -1]]).repeat(19, 1)
    whole = index_topk.native(*inputs)
    poisoned = list(inputs)
    poisoned[2] = torch.full_like(inputs[2], 255 if quantize else NAN)
    for entry in (*range(8, 16), *range(24, 32), *range(88, 96)):
        place = (inputs[6][0, entry // 10], entry % 10)
        poisoned[2][place] = inputs[2][place]
    for got, want in zip(index_topk.native(*poisoned), whole, strict=True):
        same_bytes(got, want)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("quantize", [True, False])
def test_a_key_that_is_nan_is_passed_over_and_a_query_that_is_nan_picks_nothing(route, quantize):
    inputs = long_inputs(quantize, contexts=(90,))
    healthy, _, scores = getattr(index_topk, route)(*inputs)
    worst = int(healthy[-1, 0])
    inputs[2][inputs[6][0, worst // 10], worst % 10] = 255 if quantize else NAN
    picks, _, scores = getattr(index_topk, route)(*inputs)
    assert scores[-1, worst].isnan()
    assert worst not in picks[-1].tolist()
    assert (picks[-1] >= 0).all()
    inputs[0][4] = NAN
    picks, _, _ = getattr(index_topk, route)(*inputs)
    assert (picks[4] == -1).all()
    assert (picks[5] >= 0).all()


@pytest.mark.parametrize("value", [3e38, math.inf, -math.inf])
@pytest.mark.parametrize("quantize", [True, False])
def test_the_largest_values_stay_in_range(value, quantize):
    inputs = long_inputs(quantize, contexts=(90,))
    inputs[0][3] = value
    inputs[0][6, 0, 5] = value
    if not quantize:
        inputs[2][inputs[6][0, 2], 3] = value
    inputs[10] = 5
    picks, blocks, _ = index_topk.native(*inputs)
    assert ((picks >= -1) & (picks <= inputs[4].unsqueeze(1))).all()
    assert ((blocks >= -1) & (blocks <= inputs[4].unsqueeze(1) // 8)).all()


@pytest.mark.parametrize("quantize", [True, False])
def test_a_region_inside_an_arena_and_beyond_32_bits(quantize, tmp_path, same_bytes):
    """Blocks lie three billion items apart, in a file that is nearly all hole."""
    inputs = long_inputs(quantize, contexts=(15,), columns=2)
    whole = index_topk.native(*inputs)
    small, far = inputs[2], 3_000_000_000
    size = 2 * far + small[0].numel()
    arena = torch.from_file(str(tmp_path / "arena"), shared=True, size=size, dtype=small.dtype)
    inputs[2] = arena.as_strided(small.shape, (far, small.shape[2], 1))
    for block in range(3):
        inputs[2][block] = small[block]
    for got, want in zip(index_topk.native(*inputs), whole, strict=True):
        same_bytes(got, want)


def test_wrong_arguments_are_refused():
    good = long_inputs(True, contexts=(30,))

    def refused(match, *, native_only=False, **changes):
        inputs = list(good)
        for index, value in changes.items():
            inputs[int(index[1:])] = value
        routes = (("reference", UsageError), ("fake", UsageError), ("native", RuntimeError))
        for route, error in routes[2:] if native_only else routes:
            with pytest.raises(error, match=match):
                getattr(index_topk, route)(*inputs)

    query, weights, region, candidates, positions, lines, table = good[:7]
    refused("head_weights:? must have shape", _1=weights[:, :-1].contiguous())
    refused("region.*(uint8|unsupported dtype)", _2=region.float())
    refused("region:? must have shape", _2=region[..., :-1])
    refused("region:? must have dense records", _2=region.transpose(0, 2).contiguous().transpose(0, 2))
    refused("last axis of query.* multiple of 32", _0=query[..., :-16].contiguous())
    refused("candidates:? cannot limit", _3=torch.zeros(19, 1, dtype=torch.int64), _10=3)
    refused("ratio:? must be at least 1, got 0", _7=0)
    refused("must not be negative", _8=-1)
    refused("candidate_block_size:? must be at least 1, got 0", _9=0)
    refused("request_index must lie in 0 .. 0, got 1", native_only=True, _5=lines + 1)
    refused("block_table must lie in 0 .. 40, got 41", native_only=True, _6=table + 41 - table[0, 0])
    refused("lies beyond the 40 blocks", native_only=True, _4=positions + 400)
    refused("lies beyond the 40 blocks", native_only=True, _4=positions.clamp(min=(1 << 63) - 1))
    for bad in ([2, 1], [1, 1], [-1, 3], [-2, -1]):
        refused("candidates must", native_only=True, _3=torch.tensor([bad]).repeat(19, 1))
