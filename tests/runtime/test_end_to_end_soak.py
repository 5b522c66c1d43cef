"""Thousands of steps through one engine over the real graphs: nothing is lost, nothing grows."""

import gc
from pathlib import Path

import numpy as np
from end_to_end import make_prompt, resident_bytes

from deepinfer.runtime.engine import Engine
from deepinfer.runtime.llm import LLM
from deepinfer.runtime.request import Request
from deepinfer.runtime.sampling_params import SamplingParams

NUM_REQUESTS = 40
MIN_STEPS = 2000
ALLOWED_GROWTH_BYTES = 4 << 20  # what an allocator may keep; a leak of one row of logits a step is as much


def add_round(engine: Engine, seed: int) -> list[Request]:
    """Requests of 1 to 150 prompt tokens and 1 to 120 output tokens; greedy and sampled."""
    numbers = np.random.default_rng(seed)
    requests = []
    for index in range(NUM_REQUESTS):
        params = SamplingParams(
            max_tokens=int(numbers.integers(1, 120)),
            temperature=0.8 * (index % 2),
            seed=index,
            ignore_eos=True,
        )
        requests.append(engine.add_request(make_prompt(int(numbers.integers(1, 150)), seed=index), params))
    return requests


def run(engine: Engine, *, abort: tuple[Request, ...] = ()) -> int:
    """Steps until all is done, aborting the given requests on the way; returns the number of steps."""
    steps, left = 0, list(abort)
    while engine.has_work:
        engine.step()
        steps += 1
        if steps % 50 == 0:
            engine.scheduler.check_integrity()
            if left:
                engine.abort(left.pop())
    return steps


def test_two_thousand_steps_leak_neither_blocks_nor_memory(float32_artifact: Path) -> None:
    engine = LLM(float32_artifact, num_threads=1)._engine
    scheduler = engine.scheduler
    first = add_round(engine, seed=1)
    steps = run(engine)
    gc.collect()
    before = resident_bytes()
    again = add_round(engine, seed=1)
    steps += run(engine)
    crowd = add_round(engine, seed=2)
    steps += run(engine, abort=tuple(crowd[::5]))
    gc.collect()
    growth = resident_bytes() - before
    assert steps >= MIN_STEPS
    assert [request.output_token_ids for request in again] == [request.output_token_ids for request in first]
    assert all(request.finish_reason == "length" for request in first)
    assert {request.finish_reason for request in crowd} == {"length", "abort"}
    scheduler.check_integrity()
    assert scheduler.blocks.num_free == scheduler.blocks.capacity
    assert scheduler.slots.num_free == scheduler.slots.capacity
    assert growth < ALLOWED_GROWTH_BYTES, f"{growth} bytes more after {steps} steps"
