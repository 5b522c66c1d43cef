"""What the inputs of a step lead its rows to: earlier positions, rings and blocks (spec 5.5, 6.3, 6.4)."""

import pytest
import torch
from graph_steps import Chunk, Request, decode_inputs, ragged_inputs, step_context

from deepinfer.graphs.compressor import write_compressed
from deepinfer.graphs.rows import StepInputs
from deepinfer.kernels import ring_write
from deepinfer.kernels.sparse_attention import window_records

OLD = Request([7] * 300, slot=2, blocks=(5, 3))
NEW = Request([9] * 10, slot=1, blocks=(4,))
NUM_SEQS = 3


@pytest.fixture(scope="module")
def layout(new_model):
    return new_model(max_num_seqs=NUM_SEQS).layout


@pytest.fixture
def inputs(layout) -> StepInputs:
    """Three rows of a request at position 127, an unused line, two of a new request, two of padding."""
    return ragged_inputs([Chunk(OLD, 127, 3), None, Chunk(NEW, 0, 2)], layout, padding_rows=2)


def write(ring: torch.Tensor, inputs: StepInputs) -> None:
    """Keep the numbers of the rows in a ring."""
    rows = torch.arange(float(len(inputs.positions))).unsqueeze(1)
    lines = (inputs.slot_ids, inputs.num_computed_tokens, inputs.row_counts)
    ring_write(ring, rows, inputs.positions, inputs.request_index, *lines)


def seen(ring: torch.Tensor, inputs: StepInputs, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What rows see that carry 1000 and their number, and which of it is real."""
    record = 1000 + torch.arange(float(len(inputs.positions))).unsqueeze(1)
    slots, starts = inputs.slot_ids[inputs.request_index], inputs.num_computed_tokens[inputs.request_index]
    records, visible = window_records(record, ring, window, inputs.positions, slots, starts)
    return records.squeeze(-1), visible


def test_inputs_tell_the_request_of_every_row(inputs):
    line = inputs.request_index[:5]
    assert inputs.positions.tolist() == [127, 128, 129, 0, 1, -1, -1]
    assert inputs.token_ids.tolist() == [7, 7, 7, 9, 9, 0, 0]
    assert inputs.slot_ids.tolist() == [2, 0, 1]
    assert inputs.slot_ids[line].tolist() == [2, 2, 2, 1, 1]
    assert inputs.block_table[line].tolist() == [[5, 3]] * 3 + [[4, 0]] * 2
    assert inputs.num_computed_tokens[line].tolist() == [127] * 3 + [0] * 2
    assert (inputs.num_computed_tokens + inputs.row_counts)[line].tolist() == [130] * 3 + [2] * 2
    assert inputs.row_starts[line].tolist() == [0] * 3 + [3] * 2


def test_earlier_positions_are_rows_of_the_step_or_lie_before_it(inputs):
    ring = torch.full((3, 5, 1), torch.nan)
    ring[2, torch.arange(122, 127) % 5, 0] = torch.arange(122.0, 127.0)
    records, visible = seen(ring, inputs, 3)
    assert visible.tolist() == [
        *[[True] * 3] * 3,
        [False, False, True],
        [False, True, True],
        *[[False] * 3] * 2,
    ]
    assert records[:3].tolist() == [[125, 126, 1000], [126, 1000, 1001], [1000, 1001, 1002]]
    assert records[3:][visible[3:]].tolist() == [1003, 1003, 1004]


@pytest.mark.parametrize(
    ("length", "kept"), [(1, [4]), (3, [2, 3, 4]), (5, [0, 1, 2, 3, 4]), (9, [0, 1, 2, 3, 4])]
)
def test_only_the_last_rows_of_a_chunk_reach_a_ring(layout, length, kept):
    """No two rows of a step may write one entry: their order would not be defined."""
    ring = torch.full((3, length, 1), -1.0)
    write(ring, ragged_inputs([Chunk(OLD, 40, 5)], layout, padding_rows=1))
    assert sorted(ring[2][ring[2] >= 0].tolist()) == kept
    assert [ring[2, (40 + row) % length].item() for row in kept] == kept
    assert ring[1].eq(-1).all()


@pytest.mark.parametrize(
    ("layer", "ratio", "written"),
    [(4, 1, [[3, 0], [3, 1], [4, 0], [4, 1], [5, 127]]), (1, 2, [[3, 0], [4, 0], [5, 63]])],
)
def test_entries_go_to_the_blocks_of_their_request(new_model, config, inputs, layer, ratio, written):
    assert config.ratio(layer) == ratio
    model = new_model(max_num_seqs=NUM_SEQS)
    x = torch.randn(7, config.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    write_compressed(step_context(model, inputs), layer, x)
    for kind in ("compressed_kv", "index_key"):
        changed = model.caches[f"layers.{layer}.{kind}"].any(-1).nonzero().tolist()
        assert [place for place in changed if place[0]] == written, kind


def test_rows_of_decode_stand_for_their_own_line(layout):
    inputs = decode_inputs([Chunk(NEW, 3, 1), None, Chunk(OLD, 200, 1)], layout)
    assert inputs.request_index.tolist() == [0, 1, 2]
    assert inputs.positions.tolist() == [3, -1, 200]
    assert inputs.slot_ids.tolist() == [1, 0, 2]
    ring = torch.full((3, 7, 1), -1.0)
    records, visible = seen(ring, inputs, 1)
    assert visible.flatten().tolist() == [True, False, True]
    assert records[[0, 2]].flatten().tolist() == [1000, 1002]
    write(ring, inputs)
    assert (ring[1, 3].item(), ring[2, 200 % 7].item()) == (0, 2)
    assert (ring[1:] >= 0).sum() == 2
