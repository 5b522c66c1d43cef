"""Picking of compressed entries against plain definitions (spec 7.3-7.5, 18.8)."""

import math
import sys

import pytest
import torch
from graph_steps import Chunk, Request, ragged_inputs, step_context
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.graphs.indexer import pick_entries
from deepinfer.kernels.index_topk import best as top_entries
from deepinfer.kernels.index_topk import best_blocks, entries_of_blocks

# few distinct values, so that ties are the rule
SCORES = st.sampled_from([-math.inf, -1.0, 0.0, 0.0, 0.5, 2.0])
LOW = -math.inf


def best_entries(scores: list[float], count: int) -> list[int]:
    """The definition: higher score first, then lower index; ascending, padded with -1."""
    shown = [entry for entry in range(len(scores)) if scores[entry] > LOW]
    picks = sorted(sorted(shown, key=lambda entry: (-scores[entry], entry))[:count])
    return picks + [-1] * (count - len(picks))


def kept_entries(scores: list[float], visible: int, size: int, count: int) -> list[bool]:
    """The definition: best blocks by their best score, the newest visible entry's block first."""
    blocks = [scores[start : start + size] for start in range(0, len(scores), size)]
    value = [max(block) for block in blocks]
    if visible:
        value[(visible - 1) // size] = math.inf
    best = sorted(range(len(blocks)), key=lambda block: (-value[block], block))[:count]
    kept = {block for block in best if value[block] > LOW}
    return [entry // size in kept for entry in range(len(scores))]


def candidate_entries(scores: torch.Tensor, visible: torch.Tensor, size: int, count: int) -> torch.Tensor:
    """The entries of the best blocks, as a mask; blocks are ascending, -1 padded to `count`."""
    blocks = best_blocks(scores, visible, size, count)
    assert blocks.shape == (scores.shape[0], count)
    for row in blocks.tolist():
        used = [block for block in row if block >= 0]
        assert row == sorted(set(used)) + [-1] * (count - len(used))
    return entries_of_blocks(blocks, size, scores.shape[1])


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.lists(SCORES, min_size=7, max_size=7), min_size=1, max_size=4), count=st.integers(1, 9)
)
def test_picks_equal_their_definition(rows, count):
    picks = top_entries(torch.tensor(rows), count)
    assert picks.tolist() == [best_entries(row, count) for row in rows]


@settings(max_examples=200, deadline=None)
@given(
    scores=st.lists(SCORES, min_size=1, max_size=23),
    visible=st.integers(0, 23),
    size=st.integers(1, 6),
    count=st.integers(1, 6),
)
def test_candidates_equal_their_definition(scores, visible, size, count):
    visible = min(visible, len(scores))
    scores = scores[:visible] + [LOW] * (len(scores) - visible)
    kept = candidate_entries(torch.tensor([scores]), torch.tensor([visible]), size, count)
    assert kept[0].tolist() == kept_entries(scores, visible, size, count)


def test_equal_scores_go_to_the_lower_index():
    assert top_entries(torch.tensor([[1.0, 3.0, 1.0, 3.0, 1.0]]), 3).tolist() == [[0, 1, 3]]
    assert top_entries(torch.zeros(1, 300), 8).tolist() == [list(range(8))]
    assert top_entries(torch.tensor([[-0.0, 0.0, -0.0]]), 2).tolist() == [[0, 1]]


def test_all_entries_are_picked_when_there_are_no_more_than_asked_for():
    scores = torch.tensor([[0.0, -5.0, 2.0]])
    assert top_entries(scores, 3).tolist() == [[0, 1, 2]]
    assert top_entries(scores, 512).tolist() == [[0, 1, 2] + [-1] * 509]


def test_a_shortfall_is_padded_with_minus_one():
    assert top_entries(torch.tensor([[LOW, 1.0, LOW, 0.0]]), 3).tolist() == [[1, 3, -1]]
    assert top_entries(torch.full((1, 4), LOW), 3).tolist() == [[-1, -1, -1]]


@pytest.mark.parametrize("visible", [11, 12, 13])
def test_candidates_just_below_at_and_above_the_pool(visible):
    """Three blocks of four hold 12 entries; the thirteenth pushes the worst block out (7.5)."""
    scores = torch.tensor([[3.0] * 4 + [1.0] * 4 + [2.0] * 4 + [0.0] * 4])
    scores[:, visible:] = LOW
    kept = candidate_entries(scores, torch.tensor([visible]), 4, 3)[0].tolist()
    if visible <= 12:
        assert all(kept[:visible])
    else:
        assert kept == [True] * 4 + [False] * 4 + [True] * 8


def test_the_newest_block_is_kept_however_bad():
    scores = torch.tensor([[5.0, 4.0, 3.0, 2.0, -9.0, LOW]])
    assert candidate_entries(scores, torch.tensor([5]), 2, 1)[0].tolist() == [False] * 4 + [True] * 2


def test_equal_blocks_go_to_the_lower_index():
    kept = candidate_entries(torch.zeros(1, 12), torch.tensor([12]), 2, 3)[0]
    assert kept.nonzero().flatten().tolist() == [0, 1, 2, 3, 10, 11]


def test_nothing_visible_keeps_nothing():
    assert not candidate_entries(torch.full((1, 9), LOW), torch.tensor([0]), 4, 3).any()


@pytest.mark.parametrize(("count", "size"), [(3, 8), (4, 4)])
def test_candidates_agree_with_the_vendor(golden, count, size):
    stored = golden["kernels"]
    visible = stored["cand.visible"].long()
    scores = stored["cand.scores"].float()
    scores = torch.where(torch.arange(scores.shape[1]) < visible.unsqueeze(1), scores, LOW)
    expected = stored[f"cand.k{count}_b{size}"].bool()
    assert torch.equal(candidate_entries(scores, visible, size, count), expected)


class Names:
    """A tap that keeps every value by layer and name."""

    def __init__(self) -> None:
        self.values: dict[tuple[int, str], torch.Tensor] = {}

    def __call__(self, layer: int, name: str, value: torch.Tensor) -> torch.Tensor:
        self.values[layer, name] = value
        return value


@pytest.fixture
def pick(new_model, monkeypatch):
    """A function that runs the picks of layers over given scores, rows standing at given positions."""

    def run(layers, scores, start, count):
        model, tap = new_model("float32", max_model_len=128), Names()
        request = Request([0] * (start + count))
        inputs = ragged_inputs([Chunk(request, start, count)], model.layout, padding_rows=1)
        context = step_context(model, inputs, tap=tap)
        rows, config = count + 1, model.config
        x, latent_query = torch.zeros(rows, config.hidden_size), torch.zeros(rows, config.q_lora_rank)
        for layer in layers:

            def given(query, head_weights, keys, layer=layer):
                return scores[layer][:, : keys.shape[1]]

            monkeypatch.setattr(sys.modules["deepinfer.kernels.index_topk"], "_scores", given)
            pick_entries(context, layer, x, latent_query)
        return context, tap.values

    return run


@pytest.mark.parametrize(
    ("layer", "counts"), [(1, [0, 1, 1, 2, 2, 3]), (3, [0, 1, 1, 2, 2, 3]), (4, [1, 2, 3, 4, 5, 6])]
)
def test_a_row_sees_the_entries_closed_at_its_position(pick, layer, counts):
    """Ratio 2: none at position 0, one at 1; ratio 1: itself included (5.2). Padding sees nothing."""
    context, _ = pick([layer], {layer: torch.zeros(7, 128)}, 0, len(counts))
    expected = [list(range(count)) + [-1] * (8 - count) for count in counts]
    assert context.picks[layer].tolist() == [*expected, [-1] * 8]


def test_invisible_scores_are_never_read(pick):
    """What lies beyond a row's visible entries may be anything, a NaN of a stale record included."""
    scores = torch.full((3, 128), torch.nan)
    scores[:, :3] = torch.tensor([1.0, 2.0, 3.0])
    context, tap = pick([4], {4: scores}, 1, 2)
    assert context.picks[4][:2].tolist() == [[0, 1] + [-1] * 6, [0, 1, 2] + [-1] * 5]
    assert not tap[4, "index_score"].isnan().any()


def test_the_source_of_candidates_picks_unmasked_and_later_sources_masked(pick, config):
    """17 or more visible entries exceed four blocks of four; layer 6 may only pick from the kept ones."""
    source = torch.zeros(2, 128)
    source[:, :4], source[:, 4:8], source[:, 8:12], source[:, 12:16] = 9, 1, 8, 7
    source[:, 16:20] = -1  # the newest block, kept although it is the worst
    source[:, 4] = 1.5
    later = torch.zeros(2, 128)
    later[:, 4:8] = 50  # best of all, but in the block that was not kept
    context, tap = pick([4, 6], {4: source, 6: later}, 19, 1)
    kept = [*range(4), *range(8, 20)]
    assert tap[4, "candidates"].tolist() == [[0, 2, 3, 4], [-1] * 4]
    assert (4, "index_score") in tap
    assert (6, "candidates") not in tap
    assert context.picks[4][0].tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
    assert context.picks[6][0].tolist() == kept[:8]
    assert config.candidate_topk_blocks * config.candidate_block_size == 16


def test_sources_before_the_candidate_source_are_not_masked(pick):
    scores = torch.zeros(2, 128)
    scores[:, 5] = 1
    context, _ = pick([3, 4], {3: scores, 4: torch.zeros(2, 128)}, 60, 1)
    assert context.picks[3][0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
