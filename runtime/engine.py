"""The step loop: the scheduler selects, the runner replays, the sampler draws, the scheduler commits.

Owns the order of these and the clock. Knows nothing of text, files or graphs. One thread at a time; only
`abort` may be called from another.
"""

import dataclasses
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from deepinfer.errors import RequestError
from deepinfer.runtime.finish import ERROR
from deepinfer.runtime.model_runner import MAX_LOGITS_ROWS, StepRunner
from deepinfer.runtime.outputs import Logprobs
from deepinfer.runtime.prompt_logprobs import forced_logprobs, prompt_logprobs
from deepinfer.runtime.request import Batch, CacheState, Request
from deepinfer.runtime.request_ids import RequestIds, choice_id
from deepinfer.runtime.request_text import make_text, num_visible
from deepinfer.runtime.sampler import CompiledSampler
from deepinfer.runtime.sampler_interface import OK, STATUS_NAMES, Sampler
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.sampling_state import make_state
from deepinfer.runtime.scheduler import PREFILLED, Scheduler
from deepinfer.runtime.scheduler_config import SchedulerConfig
from deepinfer.runtime.seeds import derived_seed
from deepinfer.runtime.token_bytes import TokenBytes

_COUNTS = ("prefill_steps", "prefill_rows", "decode_steps", "decode_rows", "tokens")


class Engine:
    """Requests in, tokens out, one step at a time.

    Between two calls of `step` the engine is consistent. If `step` raises, be it an interrupt from the
    keyboard, what the caches hold is unknown: call `abort_all`, without which no further step is made. It
    ends every request, with the tokens of the steps before, and takes all memory back: the engine is as new.
    """

    def __init__(
        self,
        runner: StepRunner,
        config: SchedulerConfig | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sampler: Sampler | None = None,
        token_bytes: TokenBytes | None = None,
    ) -> None:
        """config: the policy of steps and memory. sampler: the compiled one by default. token_bytes: of the
        tokenizer, for the text of the requests; without it they have none, nor stop strings.
        """
        self.runner = runner
        self.sampler = sampler or CompiledSampler()
        self.scheduler = Scheduler(runner.limits, config)
        self.counts: Counter[str] = Counter(dict.fromkeys(_COUNTS, 0))
        self._token_bytes = token_bytes
        self._clock = clock
        self._ids = RequestIds()
        self._in_step = False

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished, or has ended and was not returned by `step` yet."""
        return self.scheduler.has_work

    def validate(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raises RequestError if the request cannot be served; changes nothing."""
        if params.stop and self._token_bytes is None:
            raise RequestError("text without a tokenizer", where="stop", action="use stop_token_ids")
        self.scheduler.validate(prompt_token_ids, params)

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        timeout: float | None = None,
    ) -> Request:
        """Queues a request, drawing its seed if the parameters name none; its first choice is returned.

        request_id: its name, unique among unfinished ones; made up by default. timeout: seconds after which
        it ends, whatever it has. Raises RequestError, leaving no trace.
        """
        is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
        if timeout is not None and not (is_number and 0 < timeout < float("inf")):
            raise RequestError(f"{timeout!r} is no number of seconds above 0", where="timeout")
        self.validate(prompt_token_ids, params)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        self._apply_aborts()  # they may free the id
        name = self._ids.choose(request_id, params.n)
        now = self._clock()
        deadline = None if timeout is None else now + timeout
        request = self.scheduler.add(prompt_token_ids, params, seed, request_id=name, deadline=deadline)
        self._prepare(request, now)
        further = []
        for choice in range(1, params.n):
            own = self.scheduler.add(
                request.prompt_token_ids,
                params,
                derived_seed(seed, choice),
                request_id=choice_id(name, choice),
                deadline=deadline,
                parent=request,
                index=choice,
            )
            self._prepare(own, now)
            further.append(own)
        request.choices, request.num_seeds_derived = tuple(further), len(further)
        if self._ids.enter(request, now):
            self._abort(request)
        return request

    def add_prefilled(self, prefilled: Request, request_id: str | None = None) -> Request:
        """Queues a request that a PROMPT engine of the same artifact has handed on. Raises RequestError."""
        if prefilled.finish_reason != PREFILLED or prefilled.cache_state is None:
            raise RequestError("this request was not handed on by a PROMPT engine", where="prefilled")
        if prefilled.cache_state.identity != self.runner.identity:
            raise RequestError(
                f"its cache contents are of {prefilled.cache_state.identity!r}, not of "
                f"{self.runner.identity!r}",
                where="prefilled",
                action="hand requests only to engines of the same artifact",
            )
        self._apply_aborts()
        request = self.scheduler.add_prefilled(prefilled, self._ids.choose(request_id))
        now = self._clock()
        self._prepare(request, now)
        if self._ids.enter(request, now):
            self._abort(request)
        return request

    def fork(self, request: Request, seed: int | None = None, request_id: str | None = None) -> Request:
        """A further request that goes on from where a running one stands, sharing its memory.

        seed: derived from the request's own by default. Raises RequestError if it does not decode, or there
        is no room now.
        """
        if seed is None:
            seed = derived_seed(request.seed, request.num_seeds_derived + 1)
        child = self.scheduler.fork(request, seed, self._ids.choose(request_id))
        request.num_seeds_derived += 1
        now = self._clock()
        self._prepare(child, now)
        self._ids.enter(child, now)
        return child

    def step(self) -> list[Request]:
        """Runs one step, if there is work; returns the requests that got a token or ended, each once.

        Every request is returned exactly once with `finished` set, whatever ended it.
        """
        assert not self._in_step, "the step before was interrupted: call abort_all"
        self._in_step = True
        self._apply_aborts()
        self.scheduler.expire(self._clock())
        batch = self.scheduler.schedule()
        updated: list[Request] = []
        if batch is not None:
            if batch.phase == "prefill" or batch.loads:
                now = self._clock()
                for rows in batch.rows:
                    rows.request.times.setdefault("start", now)
            logits = self.runner.run(batch)
            for request in batch.loads:
                request.cache_state = None
            token_ids, errors, logprobs = self._sample(batch, logits)
            if batch.phase == "prefill":
                self._score_prompts(batch)
            self._apply_aborts()
            self.scheduler.expire(self._clock())
            updated = self._commit(batch, token_ids, errors, logprobs)
            if self.scheduler.prefilled:
                self.scheduler.hand_on(self._state_of)
            self.counts[f"{batch.phase}_steps"] += 1
            self.counts[f"{batch.phase}_rows"] += batch.num_rows
        if ended := self.scheduler.take_ended():
            seen = {id(request) for request in updated}
            updated += [request for request in ended if id(request) not in seen]
        self._stamp(updated)
        self._in_step = False
        return updated

    def abort(self, request: Request | str) -> None:
        """Ends a request and its further choices; without effect if all have ended.

        A request itself ends at once, which is for the engine's own thread. An id may come from any
        thread: it is applied by the next step; an id not known yet ends the request that brings it.
        """
        if isinstance(request, str):
            self._ids.abort(request)
        else:
            self._abort(request)

    def abort_all(self) -> None:
        """Ends every request, whatever an exception interrupted."""
        self.scheduler.abort_all()
        self._ids.end_all(self._clock())
        self._in_step = False

    def _prepare(self, request: Request, now: float) -> None:
        limits = self.scheduler.limits
        request.sampling_state = make_state(
            request.params, request.prompt_token_ids, limits.eos_token_ids, limits.vocab_size
        )
        request.times["arrival"] = now
        if self._token_bytes is not None:
            request.text = make_text(request, self._token_bytes)
        request.num_visible = num_visible(request)  # of what a fork begins with

    def _state_of(self, request: Request) -> CacheState:
        return dataclasses.replace(self.runner.read_state(request), identity=self.runner.identity)

    def _abort(self, request: Request) -> None:
        for own in (request, *request.choices):
            self.scheduler.abort(own)

    def _apply_aborts(self) -> None:
        if self._ids.is_asked:
            for request in self._ids.to_abort(self._clock()):
                self._abort(request)

    def _commit(
        self,
        batch: Batch,
        token_ids: Sequence[int],
        errors: Sequence[str | None],
        logprobs: Sequence[Logprobs | None],
    ) -> list[Request]:
        """Records what a step gave, a token together with its log-probabilities or neither."""
        for request, entry in zip(batch.sampled_requests, logprobs, strict=True) if logprobs else ():
            if entry is not None and request.params.max_tokens and not request.finished:
                request.logprobs.append(entry)
        updated = self.scheduler.commit(batch, token_ids, errors)
        made = [own for own in updated if own.finish_reason != ERROR and own.params.max_tokens]
        self.counts["tokens"] += len(made)
        return updated

    def _sample(
        self, batch: Batch, logits: Tensor
    ) -> tuple[list[int], list[str | None], list[Logprobs | None]]:
        """A token or the kind of an error per sampled request; log-probabilities if any are asked for."""
        requests = batch.sampled_requests
        states = [request.sampling_state for request in requests]
        if any(states):
            for request, state in zip(requests, states, strict=True):
                if state is not None:
                    state.advance(request.output_token_ids)
        result = self.sampler.sample(
            logits,
            [request.params for request in requests],
            [request.num_tokens for request in requests],
            [request.seed for request in requests],
            states,
        )
        token_ids, found = list(result.token_ids), list(result.logprobs)
        errors = [None if code == OK else STATUS_NAMES[code] for code in result.status]
        for row, request in enumerate(requests):
            if not (golden := request.params.golden_token_ids):
                continue
            golden = golden[len(request.output_token_ids) :][:1]
            if golden and errors[row] is None and golden[0] != token_ids[row]:
                token_ids[row] = golden[0]
                if request.params.logprobs is not None:
                    found[row] = forced_logprobs(
                        logits[row], golden[0], request.params, request.sampling_state
                    )
        return token_ids, errors, found

    def _score_prompts(self, batch: Batch) -> None:
        """Log-probabilities of the prompt tokens that follow this step's rows, where they are asked for."""
        first = 0
        for scheduled in batch.rows:
            request, begin = scheduled.request, first
            first += scheduled.count
            if request.params.prompt_logprobs is None or request.index:
                continue
            if not request.prompt_logprobs:
                request.prompt_logprobs.append(None)  # nothing comes before the first token
            start = max(scheduled.start, len(request.prompt_logprobs) - 1)  # what was scored stays
            end = min(scheduled.start + scheduled.count, request.num_prompt_tokens - 1)
            for piece in range(start, end, MAX_LOGITS_ROWS):
                places = np.arange(piece, min(piece + MAX_LOGITS_ROWS, end))
                logits = self.runner.logits_of_rows(places - scheduled.start + begin)
                targets = request.prompt_token_ids[piece + 1 : piece + 1 + len(places)]
                request.prompt_logprobs += prompt_logprobs(logits, targets, request.params)

    def _stamp(self, updated: Sequence[Request]) -> None:
        now = self._clock()
        for request in updated:
            visible = num_visible(request)
            if visible > request.num_visible:
                request.num_visible = visible
                request.visible_times.append(now)
            if request.finished:
                request.times["end"] = now
        if ended := [request for request in updated if request.finished]:
            self._ids.leave(ended, now)
