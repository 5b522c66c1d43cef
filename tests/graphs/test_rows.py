"""What a step knows of its rows: owners, predecessors, and where records go (spec 5.5, 6.3, 6.4)."""

import pytest
import torch
from graph_steps import Chunk, Request, decode_inputs, ragged_inputs

from deepinfer.graphs.rows import Rows

OLD = Request([7] * 300, slot=2, blocks=(5, 3))
NEW = Request([9] * 10, slot=1, blocks=(4,))


@pytest.fixture(scope="module")
def layout(new_model):
    return new_model(max_num_seqs=2).layout


@pytest.fixture
def rows(layout) -> Rows:
    """Three rows of a request at position 127, an unused line, two of a new request, two of padding."""
    return Rows.from_inputs(
        ragged_inputs([Chunk(OLD, 127, 3), None, Chunk(NEW, 0, 2)], layout, padding_rows=2)
    )


def test_rows_know_their_request(rows):
    assert rows.valid.tolist() == [True] * 5 + [False] * 2
    assert rows.positions.tolist() == [127, 128, 129, 0, 1, 0, 0]
    assert rows.token_ids.tolist() == [7, 7, 7, 9, 9, 0, 0]
    assert rows.slots.tolist() == [2, 2, 2, 1, 1, 0, 0]
    assert rows.request_slots.tolist() == [2, 0, 1]
    assert rows.blocks.tolist() == [[5, 3]] * 3 + [[4, 0]] * 2 + [[0, 0]] * 2
    assert rows.chunk_starts[:5].tolist() == [127] * 3 + [0] * 2
    assert rows.chunk_ends[:5].tolist() == [130] * 3 + [2] * 2


def test_earlier_positions_are_rows_of_the_step_or_lie_before_it(rows):
    earlier = (rows.positions.unsqueeze(1) - torch.tensor([2, 1, 0]))[:3]
    inside = rows.in_chunk(torch.nn.functional.pad(earlier, (0, 0, 0, 4)))[:3]
    assert inside.tolist() == [[False, False, True], [False, True, True], [True, True, True]]
    index = rows.row_at(torch.nn.functional.pad(earlier, (0, 0, 0, 4)))[:3]
    assert index[inside].tolist() == [0, 0, 1, 0, 1, 2]
    assert (index >= 0).all()


@pytest.mark.parametrize(
    ("length", "kept"), [(1, [4]), (3, [2, 3, 4]), (5, [0, 1, 2, 3, 4]), (9, [0, 1, 2, 3, 4])]
)
def test_only_the_last_rows_of_a_chunk_reach_a_ring(layout, length, kept):
    """No two rows of a step may write one entry: their order would not be defined."""
    rows = Rows.from_inputs(ragged_inputs([Chunk(OLD, 40, 5)], layout, padding_rows=1))
    slots = rows.ring_write_slots(length)
    assert slots.nonzero().flatten().tolist() == kept
    assert set(slots[kept].tolist()) == {2}
    entries = (rows.positions % length)[kept]
    assert len(entries.unique()) == len(kept)


def test_entries_go_to_the_blocks_of_their_request(rows):
    emitted = torch.tensor([True, True, False, False, True, False, False])
    for ratio in (1, 2):
        blocks, offsets = rows.paged_address(rows.positions // ratio, emitted, 128 // ratio)
        assert blocks.tolist() == [5, 3, 0, 0, 4, 0, 0]
        assert offsets[:2].tolist() == [128 // ratio - 1, 0]
        assert offsets[4] == 1 // ratio


def test_rows_of_decode_stand_for_their_own_line(layout):
    rows = Rows.from_inputs(decode_inputs([Chunk(NEW, 3, 1), None, Chunk(OLD, 200, 1)], layout))
    assert rows.request_index.tolist() == [0, 1, 2]
    assert rows.valid.tolist() == [True, False, True]
    assert rows.slots.tolist() == [1, 0, 2]
    assert rows.ring_write_slots(7).tolist() == [1, 0, 2]
    assert rows.row_at(rows.positions.unsqueeze(1)).flatten().tolist()[::2] == [0, 2]
