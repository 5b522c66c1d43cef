"""Random workloads over a real artifact: every request gives, by bytes, what it gives alone.

The artifact in float32, with pools cut so small that requests give their memory up; then against the naive
loop over the eager model, which has no cache.
"""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from end_to_end import make_prompt, resident_bytes

from deepinfer.graphs.eager import eager_logits
from deepinfer.runtime.engine import Engine
from deepinfer.runtime.llm import LLM
from deepinfer.runtime.request import Request
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.scheduler_config import SchedulerConfig
from deepinfer.runtime.seeds import derived_seed

MARGIN = 1e-3  # of the two best logits: below it, the eager model's rounding may decide otherwise
OPTIONS: list[dict] = [
    {"temperature": 0, "logprobs": 1},
    {"logprobs": 2},
    {"top_k": 20, "top_p": 0.9},
    {"n": 2, "logprobs": 0},
    {"prompt_logprobs": 1, "temperature": 0.7},
    {"repetition_penalty": 1.3, "temperature": 0},
    {"min_p": 0.05, "min_tokens": 5, "logprobs": 3, "logprobs_mode": "raw"},
]


@pytest.fixture(scope="module")
def llm(float32_artifact: Path) -> LLM:
    return LLM(float32_artifact, num_threads=1)


def engine_of(llm: LLM, config: SchedulerConfig | None = None, **sizes: int) -> Engine:
    """A fresh engine over the loaded graphs and caches, with these sizes in place of the built ones."""
    llm._loaded.runner.limits = dataclasses.replace(llm._loaded.limits, **sizes)
    return Engine(llm._loaded.runner, config)


def outcome(request: Request) -> tuple:
    return (request.output_token_ids, request.logprobs, request.prompt_logprobs, request.finish_reason)


def run_all(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
        engine.scheduler.check_integrity()


def make_workload(seed: int, count: int) -> list[tuple[list[int], SamplingParams]]:
    numbers = np.random.default_rng(seed)
    workload = []
    for index in range(count):
        options = {"seed": index, "ignore_eos": True, "max_tokens": int(numbers.integers(5, 140))}
        length = int(numbers.integers(100, 128) if index % 2 else numbers.integers(1, 250))
        workload.append(
            (make_prompt(length, seed=index), SamplingParams(**options, **OPTIONS[index % len(OPTIONS)]))
        )
    return workload


@pytest.mark.parametrize("seed", [2, 3])
def test_random_workload_gives_what_each_request_gives_alone(llm: LLM, seed: int) -> None:
    """Lengths, arrivals, budgets, chunks, preemption, aborts, n > 1, mixed settings: equal by bytes."""
    numbers = np.random.default_rng(seed)
    config = SchedulerConfig(max_num_batched_tokens=(None, 13)[seed % 2], watermark=1.0)
    engine = engine_of(llm, config, num_blocks=4, max_model_len=384)
    waiting = make_workload(seed, 14)
    requests = [engine.add_request(*waiting.pop()) for _ in range(6)]
    while waiting or engine.has_work:
        if waiting and (numbers.random() < 0.4 or not engine.has_work):
            requests.append(engine.add_request(*waiting.pop()))
        if numbers.random() < 0.01 and requests:
            victim = requests[int(numbers.integers(len(requests)))]
            if not victim.finished:
                engine.abort(victim.request_id)
        engine.step()
        engine.scheduler.check_integrity()
    assert engine.scheduler.num_preemptions > 0, "memory was never short"
    assert engine.scheduler.blocks.num_free == engine.scheduler.blocks.capacity
    for request in requests:
        for own in (request, *request.choices):
            given = {
                field.name: getattr(own.params, field.name)
                for field in dataclasses.fields(own.params)
                if field.init
            }
            if own.index:
                given |= {"prompt_logprobs": None, "seed": derived_seed(request.seed, own.index)}
            alone = engine_of(llm)
            expected = alone.add_request(own.prompt_token_ids, SamplingParams(**(given | {"n": 1})))
            run_all(alone)
            if own.finish_reason == "abort":
                count = len(own.output_token_ids)
                assert own.output_token_ids == expected.output_token_ids[:count]
                assert own.logprobs == expected.logprobs[: len(own.logprobs)]
            else:
                assert outcome(own) == outcome(expected)


def test_crowd_gives_what_the_naive_loop_over_the_eager_model_gives(llm: LLM, golden_dir: Path) -> None:
    """Greedy tokens, wherever the eager model's two best logits are apart; log-probabilities within 1e-3."""
    engine = engine_of(llm, SchedulerConfig(watermark=1.0), num_blocks=3, max_model_len=256)
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=0, logprobs_mode="raw")
    requests = [engine.add_request(make_prompt(length, seed=length), params) for length in (3, 60, 120, 30)]
    run_all(engine)
    decided = 0
    for request in requests:
        tokens = [*request.prompt_token_ids, *request.output_token_ids]
        logits = eager_logits(golden_dir, tokens[:-1], "float32").astype(np.float64)
        for place, token in enumerate(request.output_token_ids):
            row = logits[request.num_prompt_tokens - 1 + place]
            logprobs = row - row.max() - np.log(np.exp(row - row.max()).sum())
            assert request.logprobs[place][token].logprob == pytest.approx(logprobs[token], abs=1e-3)
            second, first = np.sort(row)[-2:]
            if first - second > MARGIN:
                decided += 1
                assert token == row.argmax()
    assert decided > 80


def test_caches_take_no_more_memory_than_the_pools_say(llm: LLM) -> None:
    """Every block and slot is used; what became resident is at most the arenas and what a step needs."""
    engine = engine_of(llm)
    run_workload = [engine.add_request(*entry) for entry in make_workload(3, 2)]
    run_all(engine)
    before = resident_bytes()
    limits = engine.runner.limits
    length = limits.max_model_len - 20
    requests = [
        engine.add_request(
            make_prompt(length, seed=n), SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
        )
        for n in range(limits.num_slots - 1)
    ]
    run_all(engine)
    assert all(request.finish_reason == "length" for request in [*run_workload, *requests])
    most = sum(request.num_peak_blocks for request in requests)
    assert most == limits.blocks_for(limits.max_model_len) * len(requests)
    assert resident_bytes() - before <= llm._loaded.arenas.total_bytes + (8 << 20)
