"""What caches hold of a request: by positions, whatever the addresses, the chunks and the engine."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from eager_runner import eager_runner
from fake_graphs import fake_limits, fake_runner

from deepinfer.errors import RequestError
from deepinfer.runtime.engine import Engine
from deepinfer.runtime.model_runner import CpuModelRunner
from deepinfer.runtime.request import Batch, Request, ScheduledRows
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.scheduler_config import EngineType, SchedulerConfig
from deepinfer.runtime.table_runner import TableRunner


def params(max_tokens: int, **options: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": max_tokens, "seed": 2, "ignore_eos": True} | options)


def run_all(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
        engine.scheduler.check_integrity()


def compositions(total: int) -> Iterator[list[int]]:
    """Every way to write a number as a sum in order."""
    for cuts in itertools.product((False, True), repeat=total - 1):
        edges = [0, *(place for place, cut in enumerate(cuts, 1) if cut), total]
        yield [end - start for start, end in itertools.pairwise(edges)]


@pytest.fixture(scope="module")
def eager(golden_dir: Path) -> CpuModelRunner:
    return eager_runner(golden_dir, "native", 0x5A)


def test_every_way_to_cut_a_prompt_leaves_the_same_scores_and_contents(eager: CpuModelRunner) -> None:
    """POS-07, POS-08: all 64 ways for seven tokens, over unlike regions, by bytes; a last chunk of one row
    decodes."""
    prompt = (17, 4, 250, 31, 8, 99, 3)
    found = []
    for chunks in compositions(len(prompt)):
        request = Request("a", prompt, SamplingParams(), seed=0, block_table=(1,), slot_id=1)
        for region in eager._regions:
            region[1].fill_(0)
        start = 0
        for count in chunks:
            rows = (ScheduledRows(request, start, count),)
            last_alone = start + 1 == len(prompt)
            logits = eager.run(Batch("decode" if last_alone else "prefill", 1 if last_alone else 8, rows))
            start += count
        contents = b"".join(region[1].float().numpy().tobytes() for region in eager._regions)
        found.append((logits.numpy().tobytes(), contents))
    assert len(found) == 64
    assert len({scores for scores, _ in found}) == 1
    assert len({contents for _, contents in found}) == 1


def test_positions_are_written_into_the_caches_as_they_are() -> None:
    """POS-09: scores do not show a shift of all positions; the ring and the records do."""
    runner = fake_runner()
    engine = Engine(runner)
    request = engine.add_request([3] * 13, params(9))
    for _ in range(5):
        engine.step()
        window, records, _ = (region.numpy() for region in runner._regions)
        done = request.num_computed_tokens
        written = np.concatenate([records[block, :, 0] for block in request.block_table])
        assert written[:done].tolist() == [position + 1 for position in range(done)]
        newest = range(max(done - window.shape[1], 0), done)
        assert {int(entry) - 1 for entry in window[request.slot_id, :, 0]} >= set(newest)
    assert done == 17


@pytest.mark.parametrize("make", [TableRunner, fake_runner], ids=["table", "graphs"])
def test_addresses_of_blocks_and_slots_change_no_token(make: object) -> None:
    """CCH-12: the same request again and again, wherever the pools have got to."""
    engine = Engine(make(fake_limits()))  # type: ignore[operator]
    answers, addresses = set(), set()
    for other in range(6):
        filler = engine.add_request([5] * (3 + 7 * other), params(20))
        engine.step()
        request = engine.add_request([3] * 13, params(9))
        while not request.finished:
            engine.step()
            if request.block_table:
                address = (request.slot_id, request.block_table[0])
        engine.abort(filler)
        run_all(engine)
        answers.add(tuple(request.output_token_ids))
        addresses.add(address)
    assert len(answers) == 1 and len(addresses) > 3


def test_cache_contents_of_another_model_are_refused() -> None:
    """CCH-11: sizes may agree by chance; what computed the contents must be the same."""
    limits = fake_limits()
    first = Engine(TableRunner(limits, seed=1), SchedulerConfig(engine_type=EngineType.PROMPT))
    request = first.add_request([3] * 13, params(9))
    run_all(first)
    completion = SchedulerConfig(engine_type=EngineType.COMPLETION)
    other = Engine(TableRunner(limits, seed=2), completion)
    with pytest.raises(RequestError, match="same artifact"):
        other.add_prefilled(request)
    assert not other.has_work
    same = Engine(TableRunner(limits, seed=1), completion)
    resumed = same.add_prefilled(request)
    run_all(same)
    assert len(resumed.output_token_ids) == 9
