"""The scheduler alone: admission, order, chunks, fairness, memory; then hundreds of random steps."""

import subprocess
import sys

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from deepinfer.errors import RequestError
from deepinfer.runtime.limits import Limits
from deepinfer.runtime.request import Batch, Request, RequestStatus
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.scheduler import Scheduler

EOS = 1


def limits(**changes: object) -> Limits:
    sizes: dict = {
        "prefill_buckets": (4, 8),
        "decode_buckets": (1, 2, 4),
        "logits_buckets": (4,),
        "prefill_table_size": 1,
        "max_model_len": 64,
        "block_tokens": 8,
        "max_blocks_per_request": 8,
        "num_blocks": 33,
        "num_slots": 7,
        "vocab_size": 100,
        "eos_token_ids": (EOS,),
        "image_token_id": 99,
    }
    return Limits(**(sizes | changes))


def params(max_tokens: int = 4, **changes: object) -> SamplingParams:
    return SamplingParams(**({"max_tokens": max_tokens, "temperature": 0} | changes))


def commit(scheduler: Scheduler, batch: Batch, token: int = 5) -> list[Request]:
    count = len(batch.sampled_requests)
    return scheduler.commit(batch, [token] * count, [None] * count)


def shape(batch: Batch) -> tuple:
    return (
        batch.phase,
        batch.bucket,
        [(rows.request.request_id, rows.start, rows.count) for rows in batch.rows],
    )


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "no tokens"),
        ([3, -1], {}, "-1 is outside"),
        ([3, 100], {}, "100 is outside"),
        ([3, 99], {}, "image"),
        ([3] * 61, {}, "model length of 64"),
        ([3], {"max_tokens": 64}, "model length of 64"),
        ([3], {"stop_token_ids": [5, 100]}, "100 is outside"),
    ],
)
def test_impossible_request_is_refused_before_any_work(prompt: list, options: dict, message: str) -> None:
    scheduler = Scheduler(limits())
    with pytest.raises(RequestError, match=message):
        scheduler.add(prompt, params(**options), seed=0)
    assert not scheduler.has_work and scheduler.schedule() is None
    scheduler.check_integrity()


def test_request_larger_than_the_whole_pool_is_refused() -> None:
    scheduler = Scheduler(limits(num_blocks=3))
    scheduler.add([3] * 12, params(4), 0)
    with pytest.raises(RequestError, match="3 cache blocks"):
        scheduler.add([3] * 12, params(5), 0)


def test_image_id_is_an_ordinary_token_where_the_model_has_none() -> None:
    Scheduler(limits(image_token_id=None)).add([99], params(), 0)


def test_prompts_go_one_by_one_in_chunks_then_all_decode() -> None:
    scheduler = Scheduler(limits())
    for length in (19, 3, 8):
        scheduler.add([3] * length, params(2), 0)
    seen = []
    while (batch := scheduler.schedule()) is not None:
        seen.append(shape(batch))
        commit(scheduler, batch)
    assert seen == [
        ("prefill", 8, [(0, 0, 8)]),
        ("prefill", 8, [(0, 8, 8)]),
        ("prefill", 4, [(0, 16, 3)]),
        ("prefill", 4, [(1, 0, 3)]),
        ("prefill", 8, [(2, 0, 8)]),
        ("decode", 4, [(0, 19, 1), (1, 3, 1), (2, 8, 1)]),
    ]


def test_only_the_last_chunk_makes_a_token() -> None:
    scheduler = Scheduler(limits())
    request = scheduler.add([3] * 9, params(), 0)
    batch = scheduler.schedule()
    assert batch.sampled_requests == [] and commit(scheduler, batch) == []
    assert commit(scheduler, scheduler.schedule()) == [request]
    assert (request.num_computed_tokens, request.num_tokens) == (9, 10)


def test_more_requests_than_the_largest_bucket_take_turns() -> None:
    scheduler = Scheduler(limits())
    requests = [scheduler.add([3], params(12), 0) for _ in range(6)]
    while scheduler.waiting or scheduler.prefilling:
        commit(scheduler, scheduler.schedule())
    turns = []
    for _ in range(3):
        batch = scheduler.schedule()
        turns.append([rows.request.request_id for rows in batch.rows])
        commit(scheduler, batch)
    assert turns == [[0, 1, 2, 3], [4, 5, 0, 1], [2, 3, 4, 5]]
    assert [len(request.output_token_ids) for request in requests] == [3] * 6


def test_head_of_the_queue_waits_for_room_and_nothing_overtakes_it() -> None:
    scheduler = Scheduler(limits(num_blocks=9))
    big = [scheduler.add([3] * 30, params(8), 0) for _ in range(2)]
    small = scheduler.add([3], params(2), 0)
    while big[0].output_token_ids == []:
        commit(scheduler, scheduler.schedule())
    batch = scheduler.schedule()
    assert batch.phase == "decode"
    assert big[1].status is small.status is RequestStatus.WAITING
    while not big[0].finished:
        commit(scheduler, batch)
        batch = scheduler.schedule()
    assert [rows.request for rows in batch.rows] == [big[1]]


def test_blocks_for_all_tokens_are_reserved_at_the_start() -> None:
    scheduler = Scheduler(limits())
    for total, blocks in ((8, 1), (9, 2), (64, 8)):
        request = scheduler.add([3], params(total - 1), 0)
        scheduler.schedule()
        assert len(request.block_table) == blocks
        scheduler.abort(request)
    scheduler.check_integrity()
    assert scheduler.blocks.num_free == scheduler.blocks.capacity


@pytest.mark.parametrize(
    ("token", "options", "reason"),
    [
        (EOS, {}, ("stop", None)),
        (EOS, {"ignore_eos": True}, (None, None)),
        (EOS, {"ignore_eos": True, "stop_token_ids": [EOS]}, ("stop", EOS)),
        (7, {"stop_token_ids": [7]}, ("stop", 7)),
        (7, {"stop_token_ids": [7], "ignore_eos": True}, ("stop", 7)),
        (7, {}, (None, None)),
        (7, {"max_tokens": 1}, ("length", None)),
        (EOS, {"max_tokens": 1}, ("stop", None)),
    ],
)
def test_stop_rules(token: int, options: dict, reason: tuple) -> None:
    scheduler = Scheduler(limits())
    request = scheduler.add([3], params(**options), 0)
    commit(scheduler, scheduler.schedule(), token)
    assert (request.finish_reason, request.stop_reason) == reason
    assert request.output_token_ids == [token]
    assert request.finished == (not scheduler.has_work)


def test_error_ends_a_request_without_a_token() -> None:
    scheduler = Scheduler(limits())
    request = scheduler.add([3], params(), 0)
    scheduler.commit(scheduler.schedule(), [-1], ["numerical_error"])
    assert (request.finish_reason, request.stop_reason) == ("error", "numerical_error")
    assert request.output_token_ids == [] and not scheduler.has_work
    scheduler.check_integrity()


def test_abort_in_every_state_gives_memory_back() -> None:
    scheduler = Scheduler(limits())
    decoding = scheduler.add([3], params(), 0)
    commit(scheduler, scheduler.schedule())
    prefilling = scheduler.add([3] * 20, params(), 0)
    waiting = scheduler.add([3], params(), 0)
    commit(scheduler, scheduler.schedule())
    assert scheduler.prefilling is prefilling
    for request in (waiting, prefilling, decoding, decoding):
        scheduler.abort(request)
        scheduler.check_integrity()
        assert request.finish_reason == "abort"
    assert scheduler.schedule() is None
    assert scheduler.blocks.num_free == scheduler.blocks.capacity


def test_abort_all_survives_ids_that_nobody_recorded() -> None:
    scheduler = Scheduler(limits())
    scheduler.add([3] * 20, params(), 0)
    scheduler.schedule()
    scheduler.blocks.allocate(2)  # as if interrupted before the owner was recorded
    scheduler.abort_all()
    scheduler.check_integrity()
    assert scheduler.blocks.num_free == scheduler.blocks.capacity and not scheduler.has_work


def test_planning_needs_no_torch() -> None:
    code = "import sys; import deepinfer.runtime.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, go and step in any order; every promise is checked after every action."""

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(limits(num_blocks=14, num_slots=6))
        self.all: list[Request] = []
        self.started: list[int] = []
        self.idle_steps: dict[int, int] = {}

    @rule(
        target=requests,
        length=st.integers(1, 40),
        max_tokens=st.integers(1, 24),
        stops=st.lists(st.integers(2, 6), max_size=2),
    )
    def add(self, length: int, max_tokens: int, stops: list[int]) -> Request:
        request = self.scheduler.add([3] * length, params(max_tokens, stop_token_ids=stops), 0)
        self.all.append(request)
        return request

    @rule(request=requests)
    def abort(self, request: Request) -> None:
        self.scheduler.abort(request)
        assert request.finished and request.block_table == () and request.slot_id == 0

    @rule(outcome=st.integers(0, 9999))
    def step(self, outcome: int) -> None:
        scheduler = self.scheduler
        had_work = scheduler.has_work
        batch = scheduler.schedule()
        assert (batch is not None) == had_work, "work that cannot go on"
        if batch is None:
            return
        self.check_batch(batch)
        sampled = batch.sampled_requests
        tokens, bad = [int(digit) for digit in f"{outcome:04}"], outcome % 31
        errors: list[str | None] = [
            "numerical_error" if index == bad else None for index in range(len(sampled))
        ]
        before = {id(request): len(request.output_token_ids) for request in sampled}
        updated = scheduler.commit(batch, tokens[: len(sampled)], errors)
        assert updated == sampled
        for request, error in zip(sampled, errors, strict=True):
            assert len(request.output_token_ids) - before[id(request)] == (error is None)

    def check_batch(self, batch: Batch) -> None:
        buckets = {"prefill": (4, 8), "decode": (1, 2, 4)}[batch.phase]
        assert batch.bucket == min(size for size in buckets if size >= batch.num_rows)
        assert len({id(rows.request) for rows in batch.rows}) == len(batch.rows)
        for rows in batch.rows:
            request = rows.request
            assert rows.start == request.num_computed_tokens and rows.count >= 1
            assert rows.start + rows.count <= request.num_tokens
            assert (rows.start + rows.count - 1) // 8 < len(request.block_table) and request.slot_id
            if request.request_id not in self.started:
                self.started.append(request.request_id)
        if batch.phase == "decode":
            taken = {id(rows.request) for rows in batch.rows}
            for request in self.scheduler.decoding:
                missed = 0 if id(request) in taken else self.idle_steps.get(id(request), 0) + 1
                self.idle_steps[id(request)] = missed
                assert missed <= 1, "five running requests and a bucket of four: nobody misses two turns"

    @invariant()
    def everything_agrees(self) -> None:
        self.scheduler.check_integrity()
        assert self.started == sorted(self.started), "first come, first served"
        for request in self.all:
            assert len(request.output_token_ids) <= request.params.max_tokens
            assert request.finished == (request.finish_reason is not None)

    def teardown(self) -> None:
        for _ in range(10_000):
            batch = self.scheduler.schedule()
            if batch is None:
                break
            commit(self.scheduler, batch)
        assert all(request.finished for request in self.all), "a request that never ends"
        assert self.scheduler.blocks.num_free == self.scheduler.blocks.capacity
        assert self.scheduler.slots.num_free == self.scheduler.slots.capacity


SchedulerMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=250, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSchedulerMachine = SchedulerMachine.TestCase
