"""What the eager entry point accepts and refuses, and how steps are padded."""

import numpy as np
import pytest
import torch
from graph_steps import Chunk, Request, decode_inputs, ragged_inputs, random_tokens, same_bytes

from deepinfer.errors import ModelError, RequestError
from deepinfer.graphs.eager import allocate_caches, eager_logits, pad_rows


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        ([], {}, "prompt is empty"),
        ([], {"chunk_sizes": [1]}, "prompt is empty"),
        ([3, 512], {}, r"token id 512 at index 1 is not in \[0, 512\)"),
        ([3, 4, -1], {}, "token id -1 at index 2"),
        ([True], {}, "token id True at index 0"),
        ([3, 4.0], {}, "token id 4.0 at index 1"),
        (["w1"], {}, "token id 'w1' at index 0"),
        ([3, 4], {"chunk_sizes": [0, 2]}, "positive integers"),
        ([3, 4], {"chunk_sizes": [2, -1]}, "positive integers"),
        ([3, 4], {"chunk_sizes": [True]}, "positive integers"),
        ([3, 4], {"chunk_sizes": [1.0]}, "positive integers"),
        ([3, 4], {"chunk_sizes": [2, 1]}, "more than the 2 tokens"),
        ([3, 4], {"precision": "bfloat16"}, "precision must be native or float32"),
        ([3, 4], {"precision": ""}, "precision must be native or float32"),
    ],
)
def test_unusable_requests_are_refused(golden_dir, tokens, options, message):
    with pytest.raises(RequestError, match=message):
        eager_logits(golden_dir, tokens, **options)


def test_a_directory_that_is_no_checkpoint_is_named(tmp_path):
    with pytest.raises(ModelError, match="config.json"):
        eager_logits(tmp_path, [3, 4])


@pytest.mark.parametrize("precision", ["native", "float32"])
def test_logits_are_a_float32_array_of_every_position(golden_dir, precision):
    logits = eager_logits(str(golden_dir), np.array([3, 511, 0]), precision)
    assert isinstance(logits, np.ndarray)
    assert (logits.shape, logits.dtype) == ((3, 512), np.float32)
    assert np.isfinite(logits).all()
    assert np.array_equal(logits, eager_logits(golden_dir, (3, 511, 0), precision, chunk_sizes=[2]))


def test_a_step_leaves_the_number_of_threads_alone(new_model):
    """It runs on one thread, and gives back the former number also when it fails."""
    model, seen = new_model(), []

    def fail(layer: int, name: str, value: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        raise KeyError(name)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(KeyError):
            model.step("prefill", ragged_inputs([Chunk(Request([5]), 0, 1)], model.layout), fail)
        after = torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
    assert (seen, after) == ([1], 2)


def test_padding_adds_rows_and_in_decode_table_lines(new_model):
    model = new_model(max_num_seqs=2)
    request = Request(random_tokens(20, seed=1))
    prefill = pad_rows(ragged_inputs([Chunk(request, 0, 3)], model.layout), 5, pad_table=False)
    assert prefill.positions.tolist() == [0, 1, 2] + [-1] * 5
    assert prefill.request_index.tolist() == [0] * 8
    assert prefill.block_table.shape == (1, model.layout.max_blocks_per_request)
    chunks = [Chunk(request, 19, 1), None, Chunk(Request(request.token_ids, slot=2), 7, 1)]
    decode = pad_rows(decode_inputs(chunks, model.layout), 5, pad_table=True)
    assert decode.positions.tolist() == [19, -1, 7] + [-1] * 5
    assert decode.request_index.tolist() == list(range(8))
    assert decode.slot_ids.tolist() == [1, 0, 2] + [0] * 5
    assert decode.row_counts.tolist() == [1, 0, 1] + [0] * 5
    assert {len(lines) for lines in decode} == {8}
    assert pad_rows(decode, 0, pad_table=True) is decode


def test_caches_start_as_zeros_of_the_declared_shapes(new_model):
    layout = new_model("float32", max_num_seqs=3).layout
    caches = allocate_caches(layout)
    assert list(caches) == [region.name for region in layout.regions]
    for region in layout.regions:
        count = layout.num_blocks if region.kind == "paged" else layout.num_slots
        assert caches[region.name].shape == (count, region.entries, *region.record_shape)
        assert str(caches[region.name].dtype) == f"torch.{region.dtype}"
        assert not caches[region.name].any()


def test_logits_of_a_row_do_not_depend_on_the_others(new_model, config):
    model = new_model()
    hidden = torch.randn(11, config.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    together = model.logits(hidden)
    assert together.shape == (11, config.vocab_size)
    for row in range(11):
        assert same_bytes(model.logits(hidden[row : row + 1]), together[row : row + 1])
