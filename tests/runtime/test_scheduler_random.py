"""The scheduler under hundreds of thousands of random steps: memory, order, progress, ends."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.errors import RequestError
from deepinfer.runtime.limits import Limits
from deepinfer.runtime.request import Batch, Request, RequestStatus, StateCopy
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.scheduler import Scheduler
from deepinfer.runtime.scheduler_config import PreemptionMode, SchedulerConfig

BLOCK, EOS, STOP = 4, 1, 6
REASONS = {"stop", "length", "abort", "error"}


class Driver:
    """Submits, steps, aborts, forks and lets deadlines pass at random, and checks every promise each time."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        pick = self.random.choice
        self.num_slots, self.largest = pick((2, 4, 7)), pick((1, 2, 4))
        num_blocks = pick((9, 12, 20, 40))
        self.limits = Limits(
            prefill_buckets=pick(((1,), (4, 8), (5,), (16,))),
            decode_buckets=tuple(sorted({1, self.largest})),
            logits_buckets=(4,),
            prefill_table_size=pick((1, 2, 6)),
            max_model_len=32,
            block_tokens=BLOCK,
            max_blocks_per_request=8,
            num_blocks=num_blocks,
            num_slots=self.num_slots,
            vocab_size=20,
            eos_token_ids=(EOS,),
        )
        self.config = SchedulerConfig(
            preemption_mode=pick((PreemptionMode.RECOMPUTE,) * 3 + (PreemptionMode.STOP,)),
            max_num_batched_tokens=pick((None, 3)),
            watermark=pick((0.5, 0.9, 1.0)),
            max_prefill_steps=pick((1, 2)),
            min_decode_steps=pick((0, 1, 8)),
        )
        self.scheduler = Scheduler(self.limits, self.config)
        self.now = 0
        self.live: dict[int, Request] = {}
        self.ends: Counter[int] = Counter()
        self.started: list[int] = []
        self.missed: Counter[int] = Counter()

    def add(self) -> None:
        length = self.random.randint(1, 24)
        params = SamplingParams(
            max_tokens=self.random.randint(1, 32 - length),
            temperature=0,
            n=self.random.choice((1, 1, 1, min(2, self.num_slots - 1))),
            stop_token_ids=[STOP],
        )
        deadline = self.now + self.random.randint(5, 300) if self.random.random() < 0.1 else None
        parent = None
        for index in range(params.n):
            request = self.scheduler.add(
                [3] * length, params, index, deadline=deadline, parent=parent, index=index
            )
            parent = parent or request
            self.live[request.arrival] = request

    def fork(self) -> None:
        running = [own for own in self.live.values() if own.status is RequestStatus.RUNNING]
        if not running:
            return
        parent = self.random.choice(running)
        table, tokens = parent.block_table, list(parent.output_token_ids)
        try:
            child = self.scheduler.fork(parent, 1)
        except RequestError:
            assert not self.scheduler.blocks.num_free or not self.scheduler.slots.num_free
            return
        assert parent.block_table == table and child.output_token_ids == tokens
        self.live[child.arrival] = child
        self.started.append(child.arrival)

    def abort(self) -> None:
        if self.live:
            request = self.random.choice(list(self.live.values()))
            self.scheduler.abort(request)
            assert request.finished and not request.block_table and not request.slot_id

    def step(self) -> Batch | None:
        scheduler, self.now = self.scheduler, self.now + 1
        scheduler.expire(self.now)
        batch = scheduler.schedule()
        if batch is not None:
            self.check(batch)
            for copy in batch.copies:
                self.copy(copy)
            sampled = batch.sampled_requests
            tokens = [self.random.choice((3, 3, 3, 3, 4, 5, EOS, STOP)) for _ in sampled]
            errors = ["numerical_error" if self.random.random() < 0.01 else None for _ in sampled]
            if self.random.random() < 0.05:
                self.abort()  # while the step is in flight
            before = {id(own): (len(own.output_token_ids), own.finished) for own in sampled}
            updated = scheduler.commit(batch, tokens, errors)
            assert updated == [own for own in sampled if not before[id(own)][1]]
            for request, error in zip(sampled, errors, strict=True):
                count, had_ended = before[id(request)]
                assert len(request.output_token_ids) == count + (error is None and not had_ended)
        self.collect()
        scheduler.check_integrity()
        return batch

    def collect(self) -> None:
        for request in self.scheduler.take_ended():
            self.ends[request.arrival] += 1
            assert request.finish_reason in REASONS and self.ends[request.arrival] == 1
            assert not request.block_table and not request.slot_id
            del self.live[request.arrival]

    def check(self, batch: Batch) -> None:
        buckets = self.limits.prefill_buckets if batch.phase == "prefill" else self.limits.decode_buckets
        assert batch.rows and batch.bucket == min(size for size in buckets if size >= batch.num_rows)
        assert len({id(rows.request) for rows in batch.rows}) == len(batch.rows)
        joining = {id(fork) for rows in batch.rows for fork in rows.forks}  # they start after this step
        owners = [own for own in self.live.values() if id(own) not in joining]
        users = Counter(block for own in owners for block in own.block_table)
        for rows in batch.rows:
            request, end = rows.request, rows.start + rows.count
            assert rows.start == request.num_computed_tokens and rows.count >= 1 and end <= request.num_tokens
            assert end <= len(request.block_table) * BLOCK and request.slot_id
            written = request.block_table[rows.start // BLOCK : (end - 1) // BLOCK + 1]
            assert all(users[block] == 1 for block in written), "what is written is not shared"
            if request.arrival not in self.started and not request.num_preemptions:
                self.started.append(request.arrival)
        assert sum(1 for rows in batch.rows if not rows.makes_token) <= 1, "one prompt is cut at most"
        if batch.phase == "decode":
            taken = {id(rows.request) for rows in batch.rows}
            for request in self.scheduler.decoding:
                number = request.arrival
                self.missed[number] = 0 if id(request) in taken else self.missed[number] + 1
                assert self.missed[number] <= 2 * -(-self.num_slots // self.largest), (
                    "a turn that never comes"
                )
        else:
            assert batch.num_rows <= (self.config.max_num_batched_tokens or batch.bucket)

    def copy(self, copy: StateCopy) -> None:
        slots = {own.slot_id for own in self.live.values()}
        assert copy.slot in slots and copy.slot != copy.source_slot
        assert (copy.block == 0) is (copy.source_block == 0)

    def drain(self) -> None:
        most = 60 + sum(own.num_tokens + 2 * own.params.max_tokens for own in self.live.values()) * 40
        for _ in range(most):
            if not self.scheduler.has_work:
                break
            assert self.step() is not None or not self.live, "work that cannot go on"
        assert not self.live, "a request that never ends"
        assert self.scheduler.blocks.num_free == self.scheduler.blocks.capacity
        assert self.scheduler.slots.num_free == self.scheduler.slots.capacity

    def run(self, steps: int) -> None:
        arrivals = self.random.choice((0.1, 0.25, 0.6))
        for _ in range(steps):
            if self.random.random() < arrivals and len(self.live) < 30:
                self.add()
            if self.random.random() < 0.03:
                self.abort()
            if self.random.random() < 0.03:
                self.fork()
            assert (self.step() is not None) or not self.live
        self.drain()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_random_steps_keep_every_promise(seed: int) -> None:
    Driver(seed).run(150)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_two_hundred_thousand_random_steps(part: int) -> None:
    """No block owned twice, none leaked, no starvation, every request ends exactly once."""
    preemptions = 0
    for seed in range(20):
        driver = Driver(1000 * part + seed)
        driver.run(1000)
        preemptions += driver.scheduler.num_preemptions
    assert preemptions > 20, "memory was never short"
