"""Host time of one call of the sampler, by what the rows ask for: the whole call against the operation in it.

The vocabulary is small, so that the operation hides nothing; budget: 15 us and 3 us per row.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from harness import Line, compare, in_units

from deepinfer.kernels import sample as sample_op
from deepinfer.kernels.native import load_host_library
from deepinfer.runtime.sampler import CompiledSampler
from deepinfer.runtime.sampler_reference import ReferenceSampler
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.sampling_state import make_state

VOCAB = 512
ROWS = (1, 8, 64)
BUDGET_SECONDS, BUDGET_ROW_SECONDS = 15e-6, 3e-6
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.8},
    "top-k and top-p": {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
    "5 logprobs": {"temperature": 0.8, "logprobs": 5},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.1, "presence_penalty": 0.5},
}


class Batch:
    """Arguments of one call; positions move on with every call, as in an engine."""

    def __init__(self, rows: int, options: dict[str, Any]) -> None:
        draw = torch.Generator().manual_seed(rows)
        self.logits = torch.randn(rows, VOCAB, generator=draw) * 3
        self.params = [SamplingParams(seed=row, **options) for row in range(rows)]
        self.states = [make_state(own, list(range(2, 200)), (1,), VOCAB) for own in self.params]
        self.seeds = list(range(rows))
        self._steps = itertools.count(200)

    def step(self, sampler: CompiledSampler | ReferenceSampler) -> Callable[[], object]:
        """One call of a sampler."""

        def call() -> object:
            positions = [next(self._steps)] * len(self.params)
            return sampler.sample(
                self.logits, list(self.params), positions, list(self.seeds), list(self.states)
            )

        return call

    def operation(self) -> Callable[[], object]:
        """The call of the operation that is in it."""
        seen: list[tuple[Any, ...]] = []
        native = sample_op.native
        try:
            object.__setattr__(sample_op, "native", lambda *given: seen.append(given) or native(*given))
            self.step(CompiledSampler())()
        finally:
            object.__delattr__(sample_op, "native")
        return lambda: native(*seen[0])


def run(threads: int) -> list[Line]:
    """The lines of this area."""
    load_host_library()
    lines = []
    for rows, (name, options) in itertools.product(ROWS, KINDS.items()):
        batch = Batch(rows, options)
        result = compare({"operation": batch.operation(), "call": batch.step(CompiledSampler())}, rounds=15)
        host = result.seconds("call").median - result.seconds("operation").median
        budget = BUDGET_SECONDS + rows * BUDGET_ROW_SECONDS
        lines.append(
            result.line(
                f"sampler, {rows} rows, {name}: the operation against the whole call",
                "operation",
                "call",
                detail=f"call {in_units(result.seconds('call').median)}, host {in_units(max(host, 1e-9))} "
                f"of {in_units(budget)}",
            )
        )
    return [*lines, *_against_lists()]


def _against_lists() -> list[Line]:
    """Step time of both samplers: a greedy figure says nothing about a draw."""
    lines = []
    for name in ("greedy", "top-k and top-p"):
        batch = Batch(8, KINDS[name])
        steps = {"compiled": batch.step(CompiledSampler()), "lists": batch.step(ReferenceSampler())}
        result = compare(steps, rounds=5)
        lines.append(result.line(f"sampler, 8 rows, {name}, against plain lists", "compiled", "lists"))
    return lines
