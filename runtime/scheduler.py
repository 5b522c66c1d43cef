"""Decides what the next step computes. Pure Python: knows nothing of tensors, graphs, sampling or text.

The policy (spec engine D, single rank):

* Waiting requests start in the order of arrival; the head of the queue waits for room and nothing overtakes
  it. A start takes a slot and the blocks of everything the request has so far, so a prompt in progress never
  waits for memory. While it decodes, a request gets a block when it needs one.
* A prefill step fills a budget of rows: first the prompt that was cut, then new ones; the one that does not
  fit is cut and ends the step. Prompts go first, but after some steps of them the requests that decode get
  theirs, so a long prompt cannot stall everybody.
* If blocks run out, the requests with the fewest tokens are served first and those with the most give their
  memory back. They are computed again from the start, to the same bits: how rows are cut into steps changes
  no request's tokens, that is the property of the graphs.
* Further choices of a prompt join it when its last chunk is computed, if there is room, sharing its full
  blocks; without room they wait like any request, and compute the prompt themselves.
"""

import itertools
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from deepinfer.errors import RequestError
from deepinfer.runtime.admission import check_request
from deepinfer.runtime.finish import ABORT, ERROR, LENGTH, decide, triggers_of_end
from deepinfer.runtime.limits import Limits, smallest_bucket
from deepinfer.runtime.preemption import choose_victim, progress
from deepinfer.runtime.request import Batch, CacheState, Request, RequestStatus, ScheduledRows
from deepinfer.runtime.request_memory import RequestMemory
from deepinfer.runtime.request_text import end_text, triggers_of
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.scheduler_config import EngineType, SchedulerConfig

PREFILLED = "prefilled"  # handed on to another engine
TIMEOUT, OUT_OF_BLOCKS = "timeout", "kv_overflow"


class Scheduler:
    """Queues, pools and the two transitions of a step: `schedule`, then `commit` of the same batch."""

    def __init__(self, limits: Limits, config: SchedulerConfig | None = None) -> None:
        self.limits = limits
        self.config = config or SchedulerConfig()
        self._memory = RequestMemory(limits)
        self.blocks, self.slots = self._memory.blocks, self._memory.slots
        self.waiting: list[Request] = []  # by arrival
        self.prefilling: Request | None = None  # the prompt that was cut
        self.decoding: deque[Request] = deque()  # the one that has waited longest first
        self.prefilled: deque[Request] = deque()  # of a PROMPT engine: to be handed on
        self.ended: list[Request] = []  # not yet collected
        self.num_preemptions = 0
        self._live: dict[str, Request] = {}
        self._prefilled_started: list[Request] = []  # whose cache contents the next step loads
        self._with_deadline: dict[str, tuple[Request, float]] = {}
        self._batch: Batch | None = None  # not committed yet
        self._arrivals = itertools.count()
        self._prefill_steps = 0  # in a row
        self._decode_steps_due = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished, or has ended unseen."""
        return bool(self._live or self.ended)

    def validate(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raises RequestError if the request could not be served even by an empty engine."""
        check_request(self.limits, prompt_token_ids, params)

    def add(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        seed: int,
        *,
        request_id: str | None = None,
        deadline: float | None = None,
        parent: Request | None = None,
        index: int = 0,
    ) -> Request:
        """Queues a request. Raises RequestError, leaving no trace, if it cannot be served."""
        check_request(self.limits, prompt_token_ids, params)
        if self.config.engine_type is EngineType.COMPLETION:
            raise RequestError("this engine computes no prompts", action="hand it a prefilled request")
        return self._enter(
            tuple(prompt_token_ids), params, seed, request_id, deadline=deadline, parent=parent, index=index
        )

    def add_prefilled(self, prefilled: Request, request_id: str | None = None) -> Request:
        """Queues what a PROMPT engine handed on; its cache contents are loaded when it starts."""
        if self.config.engine_type is EngineType.PROMPT:
            raise RequestError("this engine does not decode", action="hand it to another one")
        check_request(self.limits, prefilled.prompt_token_ids, prefilled.params)
        assert prefilled.cache_state is not None, "handed on by an engine"
        request = self._enter(prefilled.prompt_token_ids, prefilled.params, prefilled.seed, request_id)
        request.take_outputs(prefilled)
        request.cache_state = prefilled.cache_state
        return request

    def fork(self, parent: Request, seed: int, request_id: str | None = None) -> Request:
        """A request that goes on from where a running one stands, with a seed of its own.

        It shares the parent's full blocks. Raises RequestError if the parent does not decode or there is no
        room now.
        """
        if parent.status is not RequestStatus.RUNNING:
            raise RequestError("only a request that decodes can be forked", where=parent.request_id)
        if not self._memory.has_room_for_fork:
            raise RequestError("no cache is free for a fork", action="try again later")
        request = self._enter(parent.prompt_token_ids, parent.params, seed, request_id, parent=parent)
        self.waiting.remove(request)
        request.take_outputs(parent)
        self._memory.start_fork(request, parent, parent.num_computed_tokens)
        self.decoding.append(request)
        return request

    def schedule(self) -> Batch | None:
        """The next step, or None if nothing is left to compute. Never an empty step."""
        assert self._batch is None, "the batch before was not committed"
        if self.config.engine_type is EngineType.COMPLETION or not self._wants_prefill():
            self._start_prefilled()
            batch = self._decode_batch()
            if batch is not None or self.config.engine_type is EngineType.COMPLETION:
                self._batch = batch
                return batch
        self._batch = self._prefill_batch()
        return self._batch

    def commit(self, batch: Batch, token_ids: Sequence[int], errors: Sequence[str | None]) -> list[Request]:
        """Records a step's results; returns the requests that got a token or an error, in row order.

        token_ids, errors: one entry for each of `batch.sampled_requests`; an error (its kind as text) ends
        the request without a token. A request that ended since the batch was made gets nothing.
        """
        sampled = batch.sampled_requests
        assert batch is self._batch, "a batch is committed once, before the next one is made"
        assert len(sampled) == len(token_ids) == len(errors), "one result per sampled request"
        self._batch = None
        alive = 0
        for request, start, count, _ in batch.rows:
            request.num_positions_processed += count
            if request.status is not RequestStatus.FINISHED:
                request.num_computed_tokens = start + count
                alive += 1
        if batch.phase == "decode":
            served = {id(rows.request) for rows in batch.rows}
            left = self.decoding if alive < len(self.decoding) else ()  # mostly all were served
            self.decoding = deque(request for request in left if id(request) not in served)
        elif not batch.rows[-1].makes_token and not batch.rows[-1].request.finished:
            self.prefilling = batch.rows[-1].request  # the one that was cut
        queue = self.prefilled if self.config.engine_type is EngineType.PROMPT else self.decoding
        updated = []
        for request, token_id, error in zip(sampled, token_ids, errors, strict=True):
            if request.status is RequestStatus.FINISHED:
                continue
            updated.append(request)
            request.status = RequestStatus.RUNNING
            if not request.params.max_tokens:
                self.finish(request, LENGTH)  # only its prompt was of interest
            elif error is not None:
                self.finish(request, ERROR, error)
            else:
                self._append(request, token_id)
            if request.status is RequestStatus.RUNNING:
                queue.append(request)
        return updated

    def finish(self, request: Request, finish_reason: str, stop_reason: int | str | None = None) -> None:
        """Ends a request, whatever its state, and takes back its memory; queues are the caller's business."""
        assert not request.finished, request.request_id
        self._memory.give_back(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason, request.stop_reason = finish_reason, stop_reason
        if not request.triggers:
            request.triggers = triggers_of_end(finish_reason, stop_reason)
        end_text(request)
        del self._live[request.request_id]
        self._with_deadline.pop(request.request_id, None)
        self.ended.append(request)

    def end(self, request: Request, finish_reason: str, stop_reason: int | str | None = None) -> None:
        """Ends one request outside of `commit`, whatever its state; without effect on one that has ended."""
        if request.finished:
            return
        if request is self.prefilling:
            self.prefilling = None
        elif request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
        elif request in self.prefilled:
            self.prefilled.remove(request)
        elif request in self.decoding:
            self.decoding.remove(request)
        self.finish(request, finish_reason, stop_reason)

    def hand_on(self, state_of: Callable[[Request], CacheState]) -> None:
        """Ends the requests whose prompts are computed, each with what the caches hold of it."""
        handed, self.prefilled = self.prefilled, deque()
        for request in handed:
            state = state_of(request)
            self.finish(request, PREFILLED)
            request.cache_state = state

    def abort(self, request: Request) -> None:
        """Ends one request at any time; without effect on one that has ended."""
        self.end(request, ABORT)

    def expire(self, now: float) -> None:
        """Ends the requests whose deadline has passed."""
        if self._with_deadline:
            for request in [own for own, due in self._with_deadline.values() if due <= now]:
                self.end(request, ABORT, TIMEOUT)

    def take_ended(self) -> list[Request]:
        """The requests that ended since the last call, each once."""
        ended, self.ended = self.ended, []
        return ended

    def abort_all(self) -> None:
        """Ends every request, from whatever point an interruption left the scheduler in."""
        for request in self._live.values():
            request.status, request.finish_reason = RequestStatus.FINISHED, ABORT
            request.triggers = triggers_of_end(ABORT, None)
            request.block_table, request.slot_id, request.cache_state = (), 0, None
        self.prefilling, self._batch, self._prefill_steps, self._decode_steps_due = None, None, 0, 0
        queues: tuple[Any, ...] = (self.waiting, self.decoding, self.prefilled, self.ended)
        for kept in (*queues, self._live, self._with_deadline, self._prefilled_started):
            kept.clear()
        self._memory.reset()

    def check_integrity(self) -> None:
        """Asserts that pools, queues and requests agree; for tests and for an idle engine."""
        cut = [self.prefilling] if self.prefilling else []
        queued = [*self.waiting, *self.decoding, *self.prefilled, *cut]
        assert len({id(request) for request in queued}) == len(queued), "a request is queued twice"
        if self._batch is None:
            assert {id(request) for request in queued} == {id(own) for own in self._live.values()}
        self._memory.check_integrity(self._live.values())
        assert [own.arrival for own in self.waiting] == sorted(own.arrival for own in self.waiting)
        assert all(request.status is RequestStatus.WAITING for request in self.waiting)
        for own in self.decoding:
            assert own.status is RequestStatus.RUNNING and own.num_computed_tokens == own.num_tokens - 1

    def _enter(
        self,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        seed: int,
        request_id: str | None,
        *,
        deadline: float | None = None,
        parent: Request | None = None,
        index: int = 0,
    ) -> Request:
        arrival = next(self._arrivals)
        name = str(arrival) if request_id is None else request_id
        if name in self._live:
            raise RequestError("a request of this id is being served", where=f"request_id {name!r}")
        request = Request(
            name, prompt_token_ids, params, seed, arrival, deadline=deadline, parent=parent, index=index
        )
        self._live[name] = request
        if deadline is not None:
            self._with_deadline[name] = request, deadline
        self.waiting.append(request)
        return request

    def _wants_prefill(self) -> bool:
        """Whether the next step should be one of prompts; without an effect (spec engine D.3)."""
        if self.prefilling is None and not self._can_start(busy=bool(self.decoding)):
            return False
        return not (self.decoding and self._decode_steps_due)

    def _can_start(self, busy: bool) -> bool:
        """Whether the head of the queue may start, as far as memory goes; busy: others hold memory."""
        if not self.waiting or self.waiting[0].cache_state is not None:
            return False
        if not self._memory.has_room_for(self.waiting[0]):
            return False
        return not busy or self.blocks.num_used <= self.config.watermark * self.blocks.capacity

    def _prefill_budget(self) -> int:
        """Rows of the next prefill step."""
        largest = self.limits.prefill_buckets[-1]
        return min(largest, self.config.max_num_batched_tokens or largest)

    def _prefill_batch(self) -> Batch | None:
        copies = self._memory.take_copies()  # those of forks that start now are due after this step
        left = self._prefill_budget()
        rows: list[ScheduledRows] = []
        while left and len(rows) < self.limits.prefill_table_size:
            busy = bool(rows or self.decoding)
            request, self.prefilling = self.prefilling or self._start_next(busy), None
            if request is None:
                break
            count = min(request.num_tokens - request.num_computed_tokens, left)
            left -= count
            last = request.num_computed_tokens + count == request.num_tokens
            forks = self._start_choices(request) if last else ()
            rows.append(ScheduledRows(request, request.num_computed_tokens, count, forks))
        if not rows:
            return None
        self._prefill_steps = self._prefill_steps + 1 if self.decoding else 0
        enough = self._prefill_steps >= self.config.max_prefill_steps
        self._decode_steps_due = self.config.min_decode_steps if enough else 0
        bucket = smallest_bucket(self.limits.prefill_buckets, self._prefill_budget() - left)
        return Batch("prefill", bucket, tuple(rows), copies, self._loads())

    def _decode_batch(self) -> Batch | None:
        if not self.decoding:
            return None
        largest, is_ready = self.limits.decode_buckets[-1], self._memory.is_ready
        requests = list(itertools.islice(self.decoding, largest))
        if not all(map(is_ready, requests)):
            self._grow(requests)
            # Giving memory up may have moved others into reach: they have their blocks, or wait a step.
            requests = [own for own in itertools.islice(self.decoding, largest) if is_ready(own)]
            if not requests:
                return None
        rows = tuple([ScheduledRows(request, request.num_computed_tokens, 1) for request in requests])
        self._prefill_steps = 0
        self._decode_steps_due = max(0, self._decode_steps_due - 1)
        bucket = smallest_bucket(self.limits.decode_buckets, len(rows))
        return Batch("decode", bucket, rows, self._memory.take_copies(), self._loads())

    def _loads(self) -> tuple[Request, ...]:
        started, self._prefilled_started = self._prefilled_started, []
        return tuple([request for request in started if request.cache_state is not None])

    def _start_next(self, busy: bool) -> Request | None:
        """Takes the head of the queue into service if its memory is free."""
        if not self._can_start(busy):
            return None
        request = self.waiting.pop(0)
        self._memory.start(request)
        request.status = RequestStatus.PREFILLING
        return request

    def _start_prefilled(self) -> None:
        """Takes requests that come with their cache contents into service, as memory allows."""
        while self.waiting and self.waiting[0].cache_state is not None:
            if not self._memory.has_room_for(self.waiting[0]):
                return
            request = self.waiting.pop(0)
            self._memory.start(request)
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = request.num_tokens - 1
            self.decoding.append(request)
            self._prefilled_started.append(request)

    def _start_choices(self, parent: Request) -> tuple[Request, ...]:
        """Waiting choices of a prompt whose last chunk is computed now, as far as there is room."""
        copies_in_time = self.config.engine_type is not EngineType.PROMPT  # before the state is handed on
        if parent.params.n == 1 or parent.output_token_ids or not copies_in_time:
            return ()
        started = []
        for request in [own for own in self.waiting if own.parent is parent and not own.num_preemptions]:
            if not self._memory.has_room_for_fork:
                break
            self.waiting.remove(request)
            self._memory.start_fork(request, parent, parent.num_tokens)
            started.append(request)
        return tuple(started)

    def _grow(self, requests: list[Request]) -> None:
        """Gives each a block where its next row needs one; the longest give way where there is none."""
        served: set[int] = set()
        for request in sorted(requests, key=progress):
            while request.status is RequestStatus.RUNNING and not self._memory.extend(request):
                others = [own for own in self.decoding if own is not request and id(own) not in served]
                waits = bool(served) or self.prefilling is not None
                victim = choose_victim(request, others, waits, self.config, self.blocks.capacity)
                if victim is None:
                    self.end(request, ERROR, OUT_OF_BLOCKS)
                else:
                    self._preempt(victim)
            served.add(id(request))

    def _preempt(self, request: Request) -> None:
        self.decoding.remove(request)
        self.num_preemptions += 1
        request.num_preemptions += 1
        if not self.config.recomputes:
            self.finish(request, ERROR, OUT_OF_BLOCKS)
            return
        self._memory.give_back(request)
        request.status, request.num_computed_tokens = RequestStatus.WAITING, 0
        insort(self.waiting, request, key=lambda own: own.arrival)

    def _append(self, request: Request, token_id: int) -> None:
        """Adds a token and applies the stop rules; a stop token wins over the length."""
        request.output_token_ids.append(token_id)
        triggers = triggers_of(request, self.limits.eos_token_ids)
        if triggers and (end := decide(triggers)) is not None:
            request.triggers = end.triggers
            self.finish(request, end.finish_reason, end.stop_reason)
