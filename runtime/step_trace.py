"""Where the time of an engine's steps goes: spans of every part, kept while a trace is on.

A trace puts itself around the parts of one engine and takes itself away again, so an engine without one pays
nothing. Spans hold durations and counts, never token ids or text.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

from deepinfer.runtime.engine import Engine
from deepinfer.runtime.request import Batch

SCHEDULER, GRAPH, SAMPLING = "scheduler", "graph", "sampling"
# of a runner of captured graphs, which fills, replays and waits in one
_RUN = (GRAPH, "step graph", "runner", "run")
# what is watched: lane, name of the part, attribute of the engine that has it, its method
_PARTS = (
    (SCHEDULER, "schedule", "scheduler", "schedule"),
    (SCHEDULER, "fill", "runner", "fill_step"),
    (GRAPH, "step graph", "runner", "replay"),
    (GRAPH, "head", "runner", "logits_of_batch"),
    (GRAPH, "head", "runner", "logits_of_rows"),  # of prompts that are scored
    (SAMPLING, "sample", "sampler", "sample"),
    (SCHEDULER, "commit", "scheduler", "commit"),
)


class Span(NamedTuple):
    """One part of one step."""

    lane: str
    name: str
    step: int
    start: float  # seconds on the clock of the trace
    seconds: float
    details: dict[str, int | str]


class StepTrace:
    """A context manager: records the spans of `engine` while it is entered."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.perf_counter) -> None:
        self.spans: list[Span] = []
        self.num_steps = 0
        self._engine, self._clock = engine, clock
        self._batch: Batch | None = None
        self._parts = [part for part in _PARTS if hasattr(getattr(engine, part[2]), part[3])]
        if not hasattr(engine.runner, "fill_step"):
            self._parts = [_RUN if part[1] == "step graph" else part for part in self._parts]

    def __enter__(self) -> "StepTrace":
        for lane, name, owner_name, method in self._parts:
            owner = getattr(self._engine, owner_name)
            setattr(owner, method, self._watched(getattr(owner, method), lane, name))
        self._engine.step = self._step(self._engine.step)  # type: ignore[method-assign]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, _, owner_name, method in self._parts:
            delattr(getattr(self._engine, owner_name), method)  # what is left is the class's own
        del self._engine.step  # type: ignore[method-assign]

    def seconds_per_step(self) -> dict[str, list[float]]:
        """Of every part, and of "other" in between, one entry per step."""
        found: dict[str, dict[int, float]] = defaultdict(dict)
        for span in self.spans:
            by_step = found[span.name]
            by_step[span.step] = by_step.get(span.step, 0.0) + span.seconds
        total = found.pop("step", {})
        names = dict.fromkeys(name for _, name, _, _ in _PARTS)
        parts = {name: [found[name].get(step, 0.0) for step in total] for name in names}
        parts["other"] = [
            seconds - sum(found[name].get(step, 0.0) for name in names) for step, seconds in total.items()
        ]
        return parts

    def chrome_events(self) -> list[dict[str, Any]]:
        """Events of the Chrome trace format, which Perfetto opens: a lane per kind of work."""
        lanes = ("engine", SCHEDULER, GRAPH, SAMPLING)
        begin = min((span.start for span in self.spans), default=0.0)
        names = [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": lane}}
            for number, lane in enumerate(lanes)
        ]
        return names + [
            {
                "ph": "X",
                "name": span.name,
                "pid": 1,
                "tid": lanes.index(span.lane),
                "ts": round((span.start - begin) * 1e6, 3),
                "dur": round(span.seconds * 1e6, 3),
                "args": {"step": span.step, **span.details},
            }
            for span in sorted(self.spans, key=lambda span: span.start)
        ]

    def _step(self, step: Callable[[], Any]) -> Callable[[], Any]:
        def watched() -> Any:
            start = self._clock()
            result = step()
            batch, self._batch = self._batch, None
            if batch is not None:
                details: dict[str, int | str] = {
                    "phase": batch.phase,
                    "bucket": batch.bucket,
                    "rows": batch.num_rows,
                    "requests": len(batch.rows),
                }
                seconds = self._clock() - start
                self.spans.append(Span("engine", "step", self.num_steps, start, seconds, details))
                self.num_steps += 1
            return result

        return watched

    def _watched(self, method: Callable[..., Any], lane: str, name: str) -> Callable[..., Any]:
        def watched(*arguments: Any, **named: Any) -> Any:
            start = self._clock()
            result = method(*arguments, **named)
            seconds = self._clock() - start
            if isinstance(result, Batch):
                self._batch = result
            if name != "schedule" or result is not None:
                self.spans.append(Span(lane, name, self.num_steps, start, seconds, {}))
            return result

        return watched
