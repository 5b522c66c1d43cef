"""What happened to each request, step by step: positions, memory, reasons, times. Bounded, without content.

By default a record holds counts and positions only, so a trace may be kept and sent where prompts may not.
With a `TracePassport`, which says why and for whom, it also holds token ids, log-probabilities and text.
"""

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from deepinfer.errors import UsageError
from deepinfer.runtime.engine import Engine
from deepinfer.runtime.request import Batch, Request

MAX_RECORDS: Final = 10_000


@dataclass(frozen=True, slots=True)
class TracePassport:
    """Leave to record content. Every field says something. Raises UsageError if one does not."""

    classification: str  # of the content: public, internal, personal
    purpose: str
    access: str  # who may read it
    retention: str  # when it is deleted
    redaction: str  # what is left out of it, and how
    encryption: str
    export: str  # where it may go

    def __post_init__(self) -> None:
        for field in fields(self):
            if not isinstance(getattr(self, field.name), str) or not getattr(self, field.name).strip():
                raise UsageError(f"{field.name} says nothing", where="TracePassport")


@dataclass(frozen=True, slots=True)
class RequestContent:
    """What a step gave to a request, as it is."""

    token_id: int | None
    logprob: float | None
    text: str


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What one step did for one request."""

    step: int
    request_digest: str  # of prompt and parameters: the same request has the same one
    phase: str
    position_start: int  # of the rows that were computed
    position_count: int
    cached_before: int  # positions in the cache
    cached_after: int
    blocks: int  # held after the step
    draw_position: int | None  # which the random words of its token were keyed by; None: it drew none
    output_index: int | None  # of the token it got
    visible: int  # characters, or tokens without text, that may be shown by now
    finish_reason: str | None
    triggers: tuple[str, ...]
    seconds: float  # of the step, with all that ran in it
    content: RequestContent | None = None


class RequestTrace:
    """Records the steps of an engine while `recording`; the newest `max_records` are kept."""

    def __init__(
        self,
        engine: Engine,
        *,
        max_records: int = MAX_RECORDS,
        passport: TracePassport | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """passport: leave to record content too."""
        if max_records < 1:
            raise UsageError(f"{max_records} records are no trace", where="max_records")
        self.passport = passport
        self.num_dropped = 0
        self._records: deque[RequestRecord] = deque(maxlen=max_records)
        self._engine, self._clock = engine, clock
        self._step = 0
        self._digests: dict[str, str] = {}  # of requests that have not ended, by id

    @property
    def records(self) -> tuple[RequestRecord, ...]:
        """What is kept, oldest first."""
        return tuple(self._records)

    def as_dicts(self) -> Iterator[dict[str, Any]]:
        """The records as plain data, for JSON."""
        return (asdict(record) for record in self._records)

    @contextmanager
    def recording(self) -> Iterator["RequestTrace"]:
        """Records while it is entered; the engine is as before afterwards."""
        scheduler = self._engine.scheduler
        replaced = {name: vars(scheduler).get(name) for name in ("schedule", "commit")}
        plain_schedule, plain_commit = scheduler.schedule, scheduler.commit
        began = self._clock()

        def schedule() -> Batch | None:
            nonlocal began
            began = self._clock()
            return plain_schedule()

        def recorded(batch: Batch, *results: Any) -> list[Request]:
            before = {id(own): len(own.output_token_ids) for own in self._requests(batch)}
            cached = {id(rows.request): rows.start for rows in batch.rows}
            updated = plain_commit(batch, *results)
            self._add(batch, before, cached, self._clock() - began)
            return updated

        scheduler.schedule, scheduler.commit = schedule, recorded  # type: ignore[method-assign,assignment]
        try:
            yield self
        finally:
            for name, before_that in replaced.items():
                if before_that is None:
                    delattr(scheduler, name)  # what is left is the class's own
                else:
                    setattr(scheduler, name, before_that)

    def _requests(self, batch: Batch) -> list[Request]:
        return [own for rows in batch.rows for own in (rows.request, *rows.forks)]

    def _add(self, batch: Batch, before: dict[int, int], cached: dict[int, int], seconds: float) -> None:
        for rows in batch.rows:
            for own in (rows.request, *rows.forks):
                count = len(own.output_token_ids)
                made = count > before[id(own)]
                computed = rows.count if own is rows.request else 0
                self.num_dropped += len(self._records) == self._records.maxlen
                self._records.append(
                    RequestRecord(
                        step=self._step,
                        request_digest=self._digest(own),
                        phase=batch.phase,
                        position_start=rows.start,
                        position_count=computed,
                        cached_before=cached[id(rows.request)],
                        cached_after=own.num_computed_tokens,
                        blocks=len(own.block_table),
                        draw_position=own.num_tokens - 1 if made and not own.params.greedy else None,
                        output_index=count - 1 if made else None,
                        visible=len(own.output_token_ids) if own.text is None else own.text.num_visible,
                        finish_reason=own.finish_reason,
                        triggers=tuple(trigger.kind for trigger in own.triggers),
                        seconds=seconds,
                        content=self._content(own, made),
                    )
                )
        self._step += 1

    def _digest(self, request: Request) -> str:
        digest = self._digests.get(request.request_id) or digest_of(request)
        if request.finished:
            self._digests.pop(request.request_id, None)
        else:
            self._digests[request.request_id] = digest
        return digest

    def _content(self, request: Request, made: bool) -> RequestContent | None:
        if self.passport is None:
            return None
        token_id = request.output_token_ids[-1] if made else None
        logprob = None
        if token_id is not None and len(request.logprobs) == len(request.output_token_ids):
            logprob = request.logprobs[-1][token_id].logprob
        return RequestContent(token_id, logprob, "" if request.text is None else request.text.text)


def digest_of(request: Request) -> str:
    """SHA-256 of what a request asks, whatever it is called and whenever it comes."""
    asked = {
        field.name: getattr(request.params, field.name) for field in fields(request.params) if field.init
    }
    text = repr((request.prompt_token_ids, sorted(asked.items()), request.seed))
    return hashlib.sha256(b"deepinfer.request\0" + text.encode()).hexdigest()
