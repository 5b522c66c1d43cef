"""The step loop: the scheduler selects, the runner replays, the sampler draws, the scheduler commits.

Owns the order of these and the clock. Knows nothing of text, files or graphs. One thread at a time.
"""

import secrets
import time
from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from deepinfer.runtime import sampler
from deepinfer.runtime.model_runner import StepRunner
from deepinfer.runtime.request import Batch, Request
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.sampling_state import make_state
from deepinfer.runtime.scheduler import Scheduler

_COUNTS = ("prefill_steps", "prefill_rows", "decode_steps", "decode_rows", "tokens")


class Engine:
    """Requests in, tokens out, one step at a time.

    Between two calls of `step` the engine is consistent. If `step` raises, be it an interrupt from the
    keyboard, call `abort_all`: it ends every request and takes all memory back, and the engine is as new.
    """

    def __init__(self, runner: StepRunner) -> None:
        self.runner = runner
        self.scheduler = Scheduler(runner.limits)
        self.counts: Counter[str] = Counter(dict.fromkeys(_COUNTS, 0))

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self.scheduler.has_work

    def validate(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raises RequestError if the request cannot be served; changes nothing."""
        self.scheduler.validate(prompt_token_ids, params)

    def add_request(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> Request:
        """Queues a request, drawing its seed if the parameters name none. Raises RequestError."""
        seed = secrets.randbits(64) if params.seed is None else params.seed
        request = self.scheduler.add(prompt_token_ids, params, seed)
        limits = self.scheduler.limits
        request.sampling_state = make_state(
            params, request.prompt_token_ids, limits.eos_token_ids, limits.vocab_size
        )
        request.times["arrival"] = time.perf_counter()
        return request

    def step(self) -> list[Request]:
        """Runs one step; returns the requests that got a token or ended. Without work, does nothing."""
        batch = self.scheduler.schedule()
        if batch is None:
            return []
        now = time.perf_counter()
        for rows in batch.rows:
            rows.request.times.setdefault("start", now)
        logits = self.runner.run(batch)
        result = self._sample(batch, logits)
        errors = [None if code == sampler.OK else sampler.STATUS_NAMES[int(code)] for code in result.status]
        updated = self.scheduler.commit(batch, result.token_ids.tolist(), errors)
        for request, logprobs in zip(updated, result.logprobs, strict=bool(result.logprobs)):
            if logprobs is not None:
                request.logprobs.append(logprobs)
        self._record(batch, updated, num_tokens=errors.count(None))
        return updated

    def abort(self, request: Request) -> None:
        """Ends one request between two steps and takes its memory back."""
        self.scheduler.abort(request)

    def abort_all(self) -> None:
        """Ends every request, whatever an exception interrupted."""
        self.scheduler.abort_all()

    def _sample(self, batch: Batch, logits: Tensor) -> sampler.Sampled:
        requests = batch.sampled_requests
        for request in requests:
            if request.sampling_state is not None:
                request.sampling_state.advance(request.output_token_ids)
        return sampler.sample(
            logits,
            [request.params for request in requests],
            [request.num_tokens for request in requests],
            [request.seed for request in requests],
            [request.sampling_state for request in requests],
        )

    def _record(self, batch: Batch, updated: Sequence[Request], num_tokens: int) -> None:
        now = time.perf_counter()
        for request in updated:
            if request.output_token_ids:
                request.times.setdefault("first_token", now)
            if request.finished:
                request.times["end"] = now
        self.counts[f"{batch.phase}_steps"] += 1
        self.counts[f"{batch.phase}_rows"] += batch.num_rows
        self.counts["tokens"] += num_tokens


def timing_seconds(request: Request) -> dict[str, float]:
    """Durations of a finished request: waiting, to the first token, between tokens in sum, and in all."""
    times = request.times
    end = times.get("end", times["arrival"])
    start = times.get("start", end)
    first_token = times.get("first_token", end)
    return {
        "queue": start - times["arrival"],
        "first_token": first_token - times["arrival"],
        "decode": end - first_token,
        "total": end - times["arrival"],
    }
