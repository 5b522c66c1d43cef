"""Caches on the recording device: forks, further choices, preemption, hand-overs; the bytes of the CPU's."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from fake_card import FakeCard, fake_card
from fake_graphs import fake_limits, fake_runner
from hypothesis import given, settings
from hypothesis import strategies as st
from recording_device import DeviceFault
from request_outcome import outcome

from deepinfer.runtime.engine import Engine
from deepinfer.runtime.limits import Limits
from deepinfer.runtime.model_runner import CpuModelRunner
from deepinfer.runtime.request import Batch, Request, ScheduledRows, StateCopy
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.scheduler_config import EngineType, SchedulerConfig

OPTIONS: list[dict] = [
    {},
    {"n": 3, "logprobs": 1},
    {"prompt_logprobs": 2, "logprobs": 2, "temperature": 0},
    {"n": 2, "prompt_logprobs": 0, "top_k": 5},
    {"golden_token_ids": [9, 8, 7], "logprobs": 1},
    {"stop_token_ids": list(range(2, 9)), "logprobs_mode": "raw", "logprobs": 0},
]


def prompt_of(length: int) -> list[int]:
    return np.random.default_rng(length).integers(2, 40, length).tolist()


def contents(runner: FakeCard | CpuModelRunner) -> tuple[bytes, bytes]:
    """All blocks and slots but number 0, which belongs to padding rows."""
    arenas = runner.arenas if isinstance(runner, FakeCard) else runner._state()
    if isinstance(runner, FakeCard):
        runner.device.wait()
    blocks, slots = arenas.blocks[arenas.block_bytes :], arenas.slots[arenas.slot_bytes :]
    return blocks.numpy().tobytes(), slots.numpy().tobytes()


class Pair:
    """The same engine over a card and over the CPU, in step; whatever differs after one is a failure."""

    def __init__(self, limits: Limits, config: SchedulerConfig | None = None) -> None:
        self.runners = (fake_card(limits), fake_runner(limits))
        self.engines = [Engine(runner, config) for runner in self.runners]
        self.requests: list[list[Request]] = []

    def do(self, action: Callable[[Engine, int], Request | None]) -> None:
        made = [action(engine, side) for side, engine in enumerate(self.engines)]
        if isinstance(made[0], Request):
            self.requests.append(made)  # type: ignore[arg-type]

    def step(self) -> None:
        for engine in self.engines:
            engine.step()
            engine.scheduler.check_integrity()
        assert contents(self.runners[0]) == contents(self.runners[1])
        for card, cpu in self.requests:
            assert outcome(card) == outcome(cpu)
            assert [outcome(own) for own in card.choices] == [outcome(own) for own in cpu.choices]

    def run_all(self) -> None:
        while any(engine.has_work for engine in self.engines):
            self.step()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_random_workloads_leave_the_same_tokens_logprobs_and_cache_bytes(data: st.DataObject) -> None:
    """Choices, forks, prompts scored, preemption, aborts; compared after every step."""
    pick = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
    limits = fake_limits(
        prefill_buckets=pick((4, 16), (3,), (64,)),
        decode_buckets=pick((1, 4), (2,), (8,)),
        logits_buckets=pick((1, 2), (1,), (4,)),
        num_blocks=pick(9, 12, 33),
        num_slots=pick(4, 6, 9),
    )
    pair = Pair(limits, SchedulerConfig(max_num_batched_tokens=pick(None, 5, 11), watermark=pick(0.9, 1.0)))
    for _ in range(data.draw(st.integers(1, 30))):
        action = pick("add", "add", "step", "step", "step", "step", "fork", "abort")
        if action == "add":
            options = {"max_tokens": data.draw(st.integers(4, 20)), "seed": 7} | pick(*OPTIONS)
            prompt = prompt_of(data.draw(st.integers(1, 40)))
            pair.do(lambda engine, _, p=prompt, o=options: engine.add_request(p, SamplingParams(**o)))
        elif action == "step":
            pair.step()
        elif pair.requests:
            place = data.draw(st.integers(0, len(pair.requests) - 1))
            chosen = pair.requests[place]
            if action == "abort":
                pair.do(lambda engine, side, own=chosen: engine.abort(own[side]))
            elif _can_fork(pair.engines[1], chosen[1]):
                pair.do(lambda engine, side, own=chosen: engine.fork(own[side]))
    pair.run_all()


def _can_fork(engine: Engine, request: Request) -> bool:
    decodes = request.status.value == "running" and bool(request.output_token_ids)
    return decodes and engine.scheduler.slots.num_free > 0 and engine.scheduler.blocks.num_free > 0


def test_preempted_requests_compute_the_same_bytes_again() -> None:
    pair = Pair(fake_limits(num_blocks=10), SchedulerConfig(watermark=1.0))
    for seed in range(4):
        params = SamplingParams(max_tokens=40, seed=seed, ignore_eos=True, logprobs=2)
        pair.do(lambda engine, _, n=seed, p=params: engine.add_request(prompt_of(9 + n), p))
    pair.run_all()
    assert all(engine.scheduler.num_preemptions >= 3 for engine in pair.engines)


@pytest.mark.parametrize("staged_bytes", [None, 0])
def test_what_one_device_computed_another_loads(staged_bytes: int | None) -> None:
    """From a card to the CPU and back; staging of one unit alone makes the host wait, and changes nothing."""
    finished = []
    for kinds in itertools.product(("card", "cpu"), repeat=2):
        limits = fake_limits(num_slots=5)
        makers = {"card": lambda: fake_card(limits, staged_bytes=staged_bytes), "cpu": fake_runner}  # noqa: B023
        first, second = (makers[kind]() for kind in kinds)
        prompts = Engine(first, SchedulerConfig(engine_type=EngineType.PROMPT))
        handed = [
            prompts.add_request(prompt_of(5 + 9 * n), SamplingParams(max_tokens=12, seed=n, logprobs=1))
            for n in range(4)
        ]
        while prompts.has_work:
            prompts.step()
        states = [own.cache_state for own in handed]
        completions = Engine(second, SchedulerConfig(engine_type=EngineType.COMPLETION))
        resumed = [completions.add_prefilled(own) for own in handed]
        while completions.has_work:
            completions.step()
        finished.append((states, [outcome(own) for own in resumed]))
        if kinds[1] == "card":
            waits = second.device.waits  # type: ignore[union-attr]
            # by default a step waits only where it loads more than the longest request has
            assert waits > 10 if staged_bytes == 0 else waits <= 1
    assert len(finished) == 4 and all(each == finished[0] for each in finished)
    assert all(len(tokens) > 1 for tokens, *_ in finished[0][1])


def test_a_fork_costs_one_copy_of_a_slot_and_one_of_a_block() -> None:
    card = fake_card()
    engine = Engine(card)
    parent = engine.add_request(prompt_of(11), SamplingParams(max_tokens=20, seed=3, ignore_eos=True))
    engine.step()
    engine.step()
    engine.fork(parent)
    card.device.log.clear()
    engine.step()
    assert card.device.log == ["copy", "copy", "copy", "copy", "replay", "select", "replay", "copy"]


@pytest.mark.parametrize("copy", [StateCopy(1, 5), StateCopy(0, 2), StateCopy(1, 2, 3, 33)])
def test_copies_out_of_range_are_refused_before_anything_is_queued(copy: StateCopy) -> None:
    card = fake_card()
    request = Request("r", (5, 6), SamplingParams(), 0, num_computed_tokens=1, block_table=(1,), slot_id=1)
    card.device.log.clear()
    with pytest.raises(AssertionError, match="caches that do not exist"):
        card.run(Batch("decode", 1, (ScheduledRows(request, 1, 1),), copies=(copy,)))
    assert not card.device.log


def test_copies_that_are_left_out_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(fake_limits(num_slots=6))
    monkeypatch.setattr(type(pair.runners[0].arenas), "copies", lambda *_: iter(()))  # of both
    pair.do(lambda engine, _: engine.add_request(prompt_of(9), SamplingParams(n=2, max_tokens=5, seed=1)))
    with pytest.raises((AssertionError, DeviceFault)):
        pair.run_all()
