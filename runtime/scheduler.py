"""Decides what the next step computes. Pure Python: knows nothing of tensors, graphs or sampling.

The policy is plain first come, first served:

* A waiting request starts when a slot and all blocks it can ever need (prompt plus max_tokens) are free. A
  request that runs therefore never waits for memory and never has to give it back, so there is no deadlock
  and no preemption; the price is that blocks stay reserved for tokens a request may not make. The head of the
  queue waits for room; nothing overtakes it.
* Prefill goes first, one request at a time, in chunks of the largest bucket; the last chunk takes the
  smallest bucket that holds it.
* All prefilled requests then decode together. If they are more than the largest bucket, each step takes the
  ones that have waited longest.

How rows are cut into chunks and batches changes no request's tokens: that is the property of the graphs.
"""

import itertools
from collections import deque
from collections.abc import Sequence

from deepinfer.errors import RequestError
from deepinfer.runtime.block_pool import BlockPool
from deepinfer.runtime.limits import Limits, smallest_bucket
from deepinfer.runtime.request import Batch, Request, RequestStatus, ScheduledRows
from deepinfer.runtime.sampling_params import SamplingParams

ERROR, STOP, LENGTH, ABORT = "error", "stop", "length", "abort"


class Scheduler:
    """Queues, pools and the two transitions of a step: `schedule`, then `commit` of the same batch."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.blocks = BlockPool(limits.num_blocks, "cache block")
        self.slots = BlockPool(limits.num_slots, "state slot")
        self.waiting: deque[Request] = deque()
        self.prefilling: Request | None = None
        self.decoding: deque[Request] = deque()  # the one that has waited longest first
        self._ids = itertools.count()

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.waiting or self.prefilling or self.decoding)

    def validate(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raises RequestError if the request could not be served even by an empty engine."""
        limits = self.limits
        if not len(prompt_token_ids):
            raise RequestError("the prompt has no tokens", where="prompt_token_ids")
        low, high = min(prompt_token_ids), max(prompt_token_ids)
        if low < 0 or high >= limits.vocab_size:
            raise RequestError(
                f"token id {low if low < 0 else high} is outside the vocabulary of {limits.vocab_size}",
                where="prompt_token_ids",
            )
        if limits.image_token_id is not None and limits.image_token_id in prompt_token_ids:
            raise RequestError(
                f"token id {limits.image_token_id} stands for an image, and images are not supported",
                where="prompt_token_ids",
            )
        total = len(prompt_token_ids) + params.max_tokens
        if total > limits.max_model_len:
            raise RequestError(
                f"{len(prompt_token_ids)} prompt tokens and max_tokens {params.max_tokens} exceed the model "
                f"length of {limits.max_model_len}",
                where="max_tokens",
                action="shorten the prompt or lower max_tokens",
            )
        if limits.blocks_for(total) > self.blocks.capacity:
            raise RequestError(
                f"{total} tokens need {limits.blocks_for(total)} cache blocks, the artifact has "
                f"{self.blocks.capacity}",
                where="max_tokens",
                action="shorten the prompt, lower max_tokens, or build with more cache blocks",
            )
        for name, largest in params.largest_token_ids():
            if largest >= limits.vocab_size:
                raise RequestError(
                    f"id {largest} is outside the vocabulary of {limits.vocab_size}", where=name
                )
        if any(isinstance(word, str) for word in params.bad_words):
            raise RequestError(
                "text without a tokenizer", where="bad_words", action="give lists of token ids"
            )

    def add(self, prompt_token_ids: Sequence[int], params: SamplingParams, seed: int) -> Request:
        """Queues a request. Raises RequestError, leaving no trace, if it cannot be served."""
        self.validate(prompt_token_ids, params)
        request = Request(next(self._ids), tuple(prompt_token_ids), params, seed)
        self.waiting.append(request)
        return request

    def schedule(self) -> Batch | None:
        """The next step, or None if nothing is left to do. Reserves the memory of a request it starts."""
        if self.prefilling is None:
            self.prefilling = self._start_next()
        if self.prefilling is not None:
            return self._prefill_batch(self.prefilling)
        if self.decoding:
            return self._decode_batch()
        # Every request fits an empty engine (validate), so a queue cannot be stuck with nothing running.
        assert not self.waiting, "a waiting request cannot start although nothing runs"
        return None

    def commit(self, batch: Batch, token_ids: Sequence[int], errors: Sequence[str | None]) -> list[Request]:
        """Records a step's results; returns the requests that got a token or ended, in row order.

        token_ids, errors: one entry for each of `batch.sampled_requests`; an error (its kind as text) ends
        the request without a token.
        """
        for scheduled in batch.rows:
            scheduled.request.num_computed_tokens = scheduled.start + scheduled.count
        sampled = batch.sampled_requests
        assert len(sampled) == len(token_ids) == len(errors), "one result per sampled request"
        if batch.phase == "decode":
            for _ in batch.rows:  # they are the head of the queue, and go to its end unless they finish
                self.decoding.popleft()
        for request, token_id, error in zip(sampled, token_ids, errors, strict=True):
            if error is not None:
                self.finish(request, ERROR, error)
            else:
                self._append(request, int(token_id))
            if self.prefilling is request:
                self.prefilling = None
            if not request.finished:
                self.decoding.append(request)
        return sampled

    def finish(self, request: Request, finish_reason: str, stop_reason: int | str | None = None) -> None:
        """Ends a request and takes back its memory; queues are the caller's business."""
        assert not request.finished, request.request_id
        self.blocks.free(request.block_table)
        if request.slot_id:
            self.slots.free((request.slot_id,))
        request.block_table, request.slot_id = (), 0
        request.status = RequestStatus.FINISHED
        request.finish_reason, request.stop_reason = finish_reason, stop_reason

    def abort(self, request: Request) -> None:
        """Ends one request between two steps; without effect on one that has ended."""
        if request.finished:
            return
        if request is self.prefilling:
            self.prefilling = None
        else:
            (self.waiting if request.status is RequestStatus.WAITING else self.decoding).remove(request)
        self.finish(request, ABORT)

    def abort_all(self) -> None:
        """Ends every request, from whatever point an interruption left the scheduler in."""
        unfinished = [*self.waiting, *self.decoding, *([self.prefilling] if self.prefilling else [])]
        self.waiting.clear()
        self.decoding.clear()
        self.prefilling = None
        for request in unfinished:
            request.status, request.finish_reason = RequestStatus.FINISHED, ABORT
            request.block_table, request.slot_id = (), 0
        # An exception between taking ids and recording their owner would leak them: nobody owns any now.
        self.blocks.reset()
        self.slots.reset()

    def check_integrity(self) -> None:
        """Asserts that pools, queues and requests agree; for tests and for an idle engine."""
        self.blocks.check_integrity()
        self.slots.check_integrity()
        running = [*self.decoding, *([self.prefilling] if self.prefilling else [])]
        tables = [block for request in running for block in request.block_table]
        slots = [request.slot_id for request in running]
        assert len(tables) == len(set(tables)) == self.blocks.capacity - self.blocks.num_free
        assert len(slots) == len(set(slots)) == self.slots.capacity - self.slots.num_free
        assert 0 not in tables and 0 not in slots
        assert all(request.status is RequestStatus.RUNNING for request in running)
        assert all(request.status is RequestStatus.WAITING for request in self.waiting)
        for request in self.decoding:
            assert request.num_computed_tokens == request.num_tokens - 1, "one token is uncomputed"

    def _start_next(self) -> Request | None:
        """Takes the head of the queue into service if its memory is free."""
        if not self.waiting or not self.slots.num_free:
            return None
        request = self.waiting[0]
        num_blocks = self.limits.blocks_for(request.max_num_tokens)
        if num_blocks > self.blocks.num_free:
            return None
        self.waiting.popleft()
        request.block_table = self.blocks.allocate(num_blocks)
        (request.slot_id,) = self.slots.allocate(1)
        request.status = RequestStatus.RUNNING
        return request

    def _prefill_batch(self, request: Request) -> Batch:
        buckets = self.limits.prefill_buckets
        start = request.num_computed_tokens
        count = min(request.num_tokens - start, buckets[-1])
        return Batch("prefill", smallest_bucket(buckets, count), (ScheduledRows(request, start, count),))

    def _decode_batch(self) -> Batch:
        buckets = self.limits.decode_buckets
        requests = tuple(itertools.islice(self.decoding, buckets[-1]))
        rows = tuple(ScheduledRows(request, request.num_computed_tokens, 1) for request in requests)
        return Batch("decode", smallest_bucket(buckets, len(rows)), rows)

    def _append(self, request: Request, token_id: int) -> None:
        """Adds a token and applies the stop rules; a stop token wins over the length."""
        request.output_token_ids.append(token_id)
        params = request.params
        if not params.ignore_eos and token_id in self.limits.eos_token_ids:
            self.finish(request, STOP)
        elif token_id in params.stop_token_ids:
            self.finish(request, STOP, token_id)
        elif len(request.output_token_ids) >= params.max_tokens:
            self.finish(request, LENGTH)
