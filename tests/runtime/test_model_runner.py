"""The runner: what it writes into the static inputs, what it refuses, and how it picks rows for logits."""

import numpy as np
import pytest
import torch
from fake_graphs import fake_limits, fake_runner

from deepinfer.runtime.model_runner import CpuModelRunner, sampled_rows
from deepinfer.runtime.request import Batch, Request, ScheduledRows
from deepinfer.runtime.sampling_params import SamplingParams


def request(number: int, length: int, blocks: tuple[int, ...], slot: int, output: tuple = ()) -> Request:
    prompt = tuple(10 * number + i for i in range(length))
    made = Request(number, prompt, SamplingParams(), seed=0, block_table=blocks, slot_id=slot)
    made.output_token_ids.extend(output)
    return made


def decode(*requests: Request, bucket: int = 4) -> Batch:
    return Batch("decode", bucket, tuple(ScheduledRows(r, r.num_tokens - 1, 1) for r in requests))


def tables(buffers) -> list[list[int]]:  # noqa: ANN001
    return buffers.block_table[:, :3].tolist()


def test_decode_inputs_follow_the_step_contract() -> None:
    buffers = fake_runner().fill_step(
        decode(request(1, 3, (7,), 2, (44,)), request(2, 9, (3, 5), 4, (41, 42)), bucket=4)
    )
    assert buffers.token_ids.tolist() == [44, 42, 0, 0]
    assert buffers.positions.tolist() == [3, 10, -1, -1]
    assert buffers.request_index.tolist() == [0, 1, 2, 3]
    assert tables(buffers) == [[7, 0, 0], [3, 5, 0], [0, 0, 0], [0, 0, 0]]
    assert buffers.slot_ids.tolist() == [2, 4, 0, 0]
    assert buffers.num_computed_tokens.tolist() == [3, 10, 0, 0]
    assert buffers.row_starts.tolist() == [0, 1, 0, 0]
    assert buffers.row_counts.tolist() == [1, 1, 0, 0]
    assert [tuple(t.shape) for t in buffers.tensors] == [(4,), (4,), (4,), (4, 8), (4,), (4,), (4,), (4,)]
    assert all(tensor.dtype == torch.int64 for tensor in buffers.tensors)


def test_prefill_inputs_hold_several_requests_one_after_another() -> None:
    long, short = request(1, 12, (7, 8), 2), request(2, 3, (3,), 4)
    rows = (ScheduledRows(long, 5, 7), ScheduledRows(short, 0, 2))
    buffers = fake_runner().fill_step(Batch("prefill", 16, rows))
    assert buffers.token_ids.tolist() == [15, 16, 17, 18, 19, 20, 21, 20, 21] + [0] * 7
    assert buffers.positions.tolist() == [5, 6, 7, 8, 9, 10, 11, 0, 1] + [-1] * 7
    assert buffers.request_index.tolist() == [0] * 7 + [1] * 2 + [0] * 7
    assert tables(buffers) == [[7, 8, 0], [3, 0, 0]]
    assert buffers.slot_ids.tolist() == [2, 4]
    assert buffers.num_computed_tokens.tolist() == [5, 0]
    assert buffers.row_starts.tolist() == [0, 7]
    assert buffers.row_counts.tolist() == [7, 2]


def test_recomputed_rows_cross_from_prompt_into_output() -> None:
    preempted = request(1, 3, (7,), 2, (40, 41, 42))
    buffers = fake_runner().fill_step(Batch("prefill", 16, (ScheduledRows(preempted, 1, 5),)))
    assert buffers.token_ids.tolist()[:6] == [11, 12, 40, 41, 42, 0]


def test_nothing_of_an_earlier_step_remains() -> None:
    runner = fake_runner()
    a, b, c = request(1, 3, (7, 9), 2, (44,)), request(2, 3, (5,), 4, (42,)), request(3, 3, (6,), 1, (43,))
    runner.fill_step(decode(a, b, c))
    expected = fake_runner().fill_step(decode(b))
    for found, wanted in zip(runner.fill_step(decode(b)).tensors, expected.tensors, strict=True):
        assert torch.equal(found, wanted)
    wide, narrow = (
        Batch("prefill", 4, (ScheduledRows(a, 0, 4),)),
        Batch("prefill", 4, (ScheduledRows(b, 0, 1),)),
    )
    runner.fill_step(wide)
    expected = fake_runner().fill_step(narrow)
    for found, wanted in zip(runner.fill_step(narrow).tensors, expected.tensors, strict=True):
        assert torch.equal(found, wanted)


def test_grown_table_is_written_again() -> None:
    runner = fake_runner()
    growing = request(1, 7, (7,), 2, (40,))
    runner.fill_step(decode(growing))
    growing.output_token_ids.append(41)
    growing.block_table = (7, 12)
    assert tables(runner.fill_step(decode(growing)))[0] == [7, 12, 0]


def test_inputs_stay_at_the_same_addresses() -> None:
    runner = fake_runner()
    first = [t.data_ptr() for t in runner.fill_step(decode(request(1, 3, (7,), 2, (44,)))).tensors]
    second = [t.data_ptr() for t in runner.fill_step(decode(request(2, 4, (8,), 3, (44,)))).tensors]
    assert first == second


GOOD = request(1, 3, (7,), 2, (44,))


@pytest.mark.parametrize(
    ("batch", "fault"),
    [
        (decode(request(2, 3, (7,), 0, (4,))), "slots"),
        (decode(request(2, 3, (7,), 5, (4,))), "slots"),
        (decode(request(2, 3, (7,), -1, (4,))), "slots"),
        (decode(GOOD, request(2, 3, (8,), 2, (4,))), "slots"),
        (decode(request(2, 3, (), 1, (4,))), "table length"),
        (decode(request(2, 8, (7,), 1, (4,))), "table length"),
        (decode(request(2, 3, tuple(range(1, 10)), 1, (4,))), "table length"),
        (decode(request(2, 3, (0,), 1, (4,))), "block ids"),
        (decode(request(2, 3, (33,), 1, (4,))), "block ids"),
        (decode(request(2, 3, (-1,), 1, (4,))), "block ids"),
        (decode(request(2, 3, (4, 0), 1, (4,))), "block ids"),
        (decode(GOOD, request(2, 3, (7,), 1, (4,))), "shared blocks"),
        (decode(request(2, 3, (7, 7), 1, (4,))), "shared blocks"),
        (decode(request(2, 3, (7,), 1, (50,))), "token ids"),
        (decode(request(2, 3, (7,), 1, (-1,))), "token ids"),
        (Batch("prefill", 4, (ScheduledRows(GOOD, 0, 0),)), "counts"),
        (Batch("decode", 4, (ScheduledRows(GOOD, 0, 2),)), "decode rows"),
        (Batch("decode", 4, (ScheduledRows(request(2, 65, tuple(range(1, 10)), 1), 64, 1),)), "positions"),
    ],
)
def test_index_out_of_range_is_refused_before_the_launch(batch: Batch, fault: str) -> None:
    runner = fake_runner()
    with pytest.raises(AssertionError, match=fault):
        runner.run(batch)
    assert all(graph.calls == 0 for graph in runner._graphs.values())


def test_block_shared_with_a_line_written_earlier_is_seen() -> None:
    runner = fake_runner()
    runner.fill_step(decode(GOOD, request(2, 3, (8,), 1, (4,))))
    with pytest.raises(AssertionError, match="shared blocks"):
        runner.fill_step(decode(GOOD, request(3, 3, (7,), 3, (4,))))


def test_sampled_rows_are_the_newest_of_each_request_that_is_reached() -> None:
    whole, part, last = request(1, 4, (7,), 2), request(2, 9, (3, 5), 4), request(3, 6, (9,), 1)
    batch = Batch(
        "prefill", 16, (ScheduledRows(whole, 0, 4), ScheduledRows(part, 0, 5), ScheduledRows(last, 4, 2))
    )
    assert sampled_rows(batch).tolist() == [3, 10]
    assert batch.sampled_requests == [whole, last]


@pytest.mark.parametrize("buckets", [(1,), (2,), (1, 2), (4,), (3, 8)])
def test_logits_come_in_pieces_without_padding_rows(buckets: tuple[int, ...]) -> None:
    class Doubling:
        def __init__(self, bucket: int) -> None:
            self.bucket = bucket

        def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            (hidden,) = inputs
            assert hidden.shape == (self.bucket, 2)
            return [hidden * 2]

    limits = fake_limits(logits_buckets=buckets, vocab_size=2)
    runner = CpuModelRunner(limits, {f"logits-{bucket}": Doubling(bucket) for bucket in buckets}, {})
    hidden = torch.arange(20.0).reshape(10, 2)
    for rows in ([], [4], [9, 0, 3, 3, 5], list(range(10))):
        logits = runner._logits_of(hidden, np.array(rows, dtype=np.int64))
        if rows:
            assert torch.equal(logits, hidden[rows] * 2)
            last = len(rows) % buckets[-1] or buckets[-1]  # rows of the last call
            static = runner._hidden[min(bucket for bucket in buckets if bucket >= last)]
            assert not static[last:].any(), "padding rows of an earlier call remain"
        else:
            assert logits.shape == (0, limits.vocab_size)


def test_results_of_one_step_are_not_overwritten_by_its_own_pieces() -> None:
    """A graph may return the same output buffer at every call."""

    class Static:
        def __init__(self) -> None:
            self.output = torch.empty(1, 2)

        def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            self.output.copy_(inputs[0])
            return [self.output]

    runner = CpuModelRunner(fake_limits(logits_buckets=(1,), vocab_size=2), {"logits-1": Static()}, {})
    hidden = torch.arange(6.0).reshape(3, 2)
    assert torch.equal(runner._logits_of(hidden, np.array([0, 1, 2])), hidden)
