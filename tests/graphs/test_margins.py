"""Decision margins against brute force (README of the golden model: margins in units of the row's spread)."""

import math
import statistics

import pytest
import torch
from graph_steps import Chunk, Request, ragged_inputs
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.graphs.margins import MarginTap, margin

LOW = -math.inf
SCORES = st.one_of(st.just(LOW), st.sampled_from([0.0, 1.0]), st.floats(-4, 4, width=32))


def plain_margin(scores: list[float], count: int) -> float:
    """The definition: last chosen minus first rejected over the spread of what competes; inf in a tie."""
    competing = sorted((score for score in scores if score > LOW), reverse=True)
    if count < 1 or len(competing) <= count or competing[count - 1] == competing[count]:
        return math.inf
    return (competing[count - 1] - competing[count]) / statistics.pstdev(competing)


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.lists(SCORES, min_size=6, max_size=6), min_size=1, max_size=3), count=st.integers(0, 8)
)
def test_margins_equal_their_definition(rows, count):
    expected = [plain_margin(row, count) for row in rows]
    assert margin(torch.tensor(rows), count).tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_margins_of_single_rows():
    scores = torch.tensor([[3.0, 1.0, 0.0, LOW], [1.0, 1.0, 0.0, 0.0], [2.0, LOW, LOW, LOW], [LOW] * 4])
    spread = statistics.pstdev([3, 1, 0])
    assert margin(scores, 1).tolist() == pytest.approx([2 / spread, math.inf, math.inf, math.inf])
    assert margin(scores, 2).tolist() == pytest.approx([1 / spread, 2.0, math.inf, math.inf])
    assert margin(scores, 4).tolist() == [math.inf] * 4


@pytest.fixture
def biases(config, weights) -> dict[int, torch.Tensor]:
    return {layer: weights[f"layers.{layer}.ffn.gate.bias"] for layer in range(config.num_hidden_layers)}


def test_the_tap_keeps_the_smallest_margin_of_a_row(config, biases):
    tap = MarginTap(config, biases)
    assert tap(0, "attn_y", torch.zeros(2, 4)) is not None
    assert tap.smallest is None  # not a decision
    wide, narrow = torch.zeros(2, 9), torch.zeros(2, 9)
    wide[:, 8], narrow[:, 8] = -1, -1
    narrow[1, 7], narrow[1, 8] = -0.5, -0.50001
    tap(1, "index_score", wide)
    first = tap.smallest.clone()
    tap(3, "index_score", narrow)
    assert first.tolist() == [pytest.approx(plain_margin(wide[0].tolist(), 8))] * 2
    assert tap.smallest[0] == first[0]
    assert tap.smallest[1].item() == pytest.approx(plain_margin(narrow[1].tolist(), 8), rel=1e-2)


def test_the_newest_candidate_block_does_not_compete(config, biases):
    """Four blocks of four are kept; the newest in any case, so three places are decided by scores."""
    scores = torch.full((1, 24), LOW)
    scores[0, :20] = torch.tensor([9.0, 7.0, 5.0, 4.75, -3.0]).repeat_interleave(4)
    tap = MarginTap(config, biases)
    tap(config.candidate_source_layer_id, "index_score", scores)
    blocks = plain_margin([9.0, 7.0, 5.0, 4.75], 3)
    assert tap.smallest.item() == pytest.approx(min(blocks, plain_margin(scores[0].tolist(), 8)))
    assert blocks < 1


def test_router_margins_are_those_of_the_biased_scores(config, biases):
    logits = torch.randn(5, config.n_routed_experts, generator=torch.Generator().manual_seed(0))
    tap = MarginTap(config, biases)
    tap(2, "router_logits", logits)
    ranks = torch.nn.functional.softplus(logits).sqrt() + biases[2]
    expected = [plain_margin(row, config.num_experts_per_tok) for row in ranks.tolist()]
    assert tap.smallest.tolist() == pytest.approx(expected, rel=1e-4)


def test_margins_of_a_float32_run_agree_with_the_reference(golden, new_model, config, biases):
    """The smallest of the three stored margins; the reference takes the sample's spread over 16 experts."""
    tokens = golden.tokens("n40")
    model, tap = new_model("float32", max_model_len=128), MarginTap(config, biases)
    model.step("prefill", ragged_inputs([Chunk(Request(tokens), 0, 40)], model.layout), tap)
    stored = golden["fp32"]["n40.margins"]
    clear = (stored > 0).all(dim=1)  # a stored 0 is an exact tie
    assert clear.sum() >= 35
    ours, expected = tap.smallest[:40][clear], stored.amin(dim=1)[clear]
    assert torch.allclose(ours, expected, rtol=(16 / 15) ** 0.5 - 1 + 2e-3, atol=1e-5)
