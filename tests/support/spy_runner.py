"""A step runner and sampler that note what they are asked for, and let a test act, or fail, at any stage."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from fake_graphs import fake_limits
from torch import Tensor

from deepinfer.runtime.engine import Engine
from deepinfer.runtime.limits import Limits
from deepinfer.runtime.request import Batch, Request
from deepinfer.runtime.sampler import CompiledSampler
from deepinfer.runtime.sampler_interface import Sampled
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.table_runner import TableRunner

PROMPT = [3, 12, 4, 15, 8, 2, 6]  # seven tokens


def limits(**changes: object) -> Limits:
    return fake_limits(**{"vocab_size": 20, "num_slots": 9, "num_blocks": 65} | changes)  # type: ignore[arg-type]


def params(max_tokens: int, **options: object) -> SamplingParams:
    return SamplingParams(
        **{"max_tokens": max_tokens, "seed": 5, "ignore_eos": True, "logprobs": 0} | options
    )


def run_all(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
        engine.scheduler.check_integrity()


def alone(prompt: Sequence[int], own: SamplingParams, **options: Any) -> Request:
    engine = Engine(TableRunner(limits(), **options))
    request = engine.add_request(prompt, own)
    run_all(engine)
    return request


class Spy:
    """A table runner, and a sampler, that note what they are asked for; a hook may raise at any stage."""

    name = "spy"

    def __init__(self, hook: Callable[[str], None] = lambda stage: None, **options: Any) -> None:
        self.inner, self.hook = TableRunner(limits(), **options), hook
        self.limits = self.inner.limits
        self.read_state, self.identity = self.inner.read_state, self.inner.identity
        self.log: list[tuple] = []
        self._sampler = CompiledSampler()

    def run(self, batch: Batch) -> Tensor:
        self.hook("launch")
        self.inner.run(dataclasses.replace(batch, rows=batch.rows[:1]))  # some rows are in the caches
        self.hook("half")
        logits = self.inner.run(batch)
        self.hook("head")
        for rows in batch.rows:
            positions = tuple(range(rows.start, rows.start + rows.count))
            self.log.append(("model", rows.request.request_id, positions))
        return logits

    def logits_of_rows(self, rows: np.ndarray) -> Tensor:
        self.hook("scores")
        return self.inner.logits_of_rows(rows)

    def sample(self, *arguments: Any) -> Sampled:
        self.hook("sampler")
        result = self._sampler.sample(*arguments)
        self.log += [("decision", position) for position in arguments[2]]
        self.hook("sampled")
        return result


def spied(hook: Callable[[str], None] = lambda stage: None, **options: Any) -> tuple[Engine, Spy]:
    spy = Spy(hook, **options)
    return Engine(spy, sampler=spy), spy


def at(stage: str, time: int, act: Callable[[], object]) -> Callable[[str], None]:
    """A hook that acts when a stage is reached for the given time, from 1 on."""
    left = [time]

    def hook(reached: str) -> None:
        left[0] -= reached == stage
        if reached == stage and left[0] == 0:
            act()

    return hook


class Fault(Exception):
    """What a device may raise."""


def fail() -> None:
    raise Fault
