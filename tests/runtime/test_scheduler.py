"""The scheduler alone: admission, order, chunks, budgets, growth, preemption, forks, ends (spec engine D)."""

import subprocess
import sys

import pytest

from deepinfer.errors import RequestError, UsageError
from deepinfer.runtime.limits import Limits
from deepinfer.runtime.request import Batch, Request, RequestStatus
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.scheduler import Scheduler
from deepinfer.runtime.scheduler_config import EngineType, PreemptionMode, SchedulerConfig

EOS = 1


def limits(**changes: object) -> Limits:
    sizes: dict = {
        "prefill_buckets": (4, 8),
        "decode_buckets": (1, 2, 4),
        "logits_buckets": (4,),
        "prefill_table_size": 6,
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
        [(rows.request.arrival, rows.start, rows.count) for rows in batch.rows],
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


def run(scheduler: Scheduler, steps: int = 1000, token: int = 5) -> list[tuple]:
    """Shapes of the steps until nothing is left."""
    seen = []
    for _ in range(steps):
        batch = scheduler.schedule()
        if batch is None:
            break
        seen.append(shape(batch))
        commit(scheduler, batch, token)
        scheduler.check_integrity()
    return seen


def test_a_prefill_step_fills_its_budget_and_the_cut_prompt_goes_first() -> None:
    """Spec engine D.4, toy: prompts of 6, 5 and 4 tokens, a budget of 8."""
    scheduler = Scheduler(limits())
    for length in (6, 5, 4):
        scheduler.add([3] * length, params(2), 0)
    assert run(scheduler)[:3] == [
        ("prefill", 8, [(0, 0, 6), (1, 0, 2)]),
        ("prefill", 8, [(1, 2, 3), (2, 0, 4)]),
        ("decode", 4, [(0, 6, 1), (1, 5, 1), (2, 4, 1)]),
    ]


def test_nothing_follows_a_cut_prompt_in_its_step() -> None:
    scheduler = Scheduler(limits())
    for length in (19, 1):
        scheduler.add([3] * length, params(1), 0)
    assert run(scheduler) == [
        ("prefill", 8, [(0, 0, 8)]),
        ("prefill", 8, [(0, 8, 8)]),
        ("prefill", 4, [(0, 16, 3), (1, 0, 1)]),
    ]


def test_budget_is_the_smaller_of_bucket_and_setting() -> None:
    scheduler = Scheduler(limits(), SchedulerConfig(max_num_batched_tokens=3))
    scheduler.add([3] * 7, params(1), 0)
    assert [step[2][0][2] for step in run(scheduler)] == [3, 3, 1]
    scheduler = Scheduler(limits(), SchedulerConfig(max_num_batched_tokens=1000))
    scheduler.add([3] * 9, params(1), 0)
    assert [step[2][0][2] for step in run(scheduler)] == [8, 1]


def test_request_table_bounds_the_prompts_of_a_step() -> None:
    scheduler = Scheduler(limits(prefill_table_size=2))
    for _ in range(3):
        scheduler.add([3], params(1), 0)
    assert [len(step[2]) for step in run(scheduler)] == [2, 1]


def test_long_prompt_lets_others_decode() -> None:
    """D.3: after two prefill steps with requests waiting to decode come eight decode steps."""
    config = SchedulerConfig(max_prefill_steps=2, min_decode_steps=3)
    scheduler = Scheduler(limits(), config)
    scheduler.add([3], params(30), 0)
    commit(scheduler, scheduler.schedule())
    scheduler.add([3] * 40, params(1), 0)
    phases = [step[0] for step in run(scheduler)]
    assert phases[:12] == ["prefill"] * 2 + ["decode"] * 3 + ["prefill"] * 2 + ["decode"] * 3 + [
        "prefill",
        "decode",
    ]


def test_prompts_always_first_if_asked_for() -> None:
    scheduler = Scheduler(limits(), SchedulerConfig(min_decode_steps=0))
    scheduler.add([3], params(30), 0)
    commit(scheduler, scheduler.schedule())
    scheduler.add([3] * 40, params(1), 0)
    assert [step[0] for step in run(scheduler)][:5] == ["prefill"] * 5


@pytest.mark.parametrize(("used", "starts"), [(17, True), (18, True), (19, False)])
def test_no_prompt_starts_above_the_watermark_while_others_decode(used: int, starts: bool) -> None:
    """D.3: 85, 90 and 95 % of 20 blocks in use."""
    scheduler = Scheduler(limits(num_blocks=21, num_slots=9, max_model_len=200, max_blocks_per_request=25))
    scheduler.add([3] * (8 * used - 1), params(2), 0)
    while scheduler.waiting or scheduler.prefilling:
        commit(scheduler, scheduler.schedule())
    assert scheduler.blocks.num_used == used
    scheduler.add([3], params(), 0)
    assert (scheduler.schedule().phase == "prefill") is starts


def test_submitted_text_starts_at_the_next_step() -> None:
    """K-9, K-10: no empty steps at the start, and chunk k + 1 follows in the next step."""
    scheduler = Scheduler(limits())
    assert scheduler.schedule() is None
    scheduler.add([3] * 20, params(1), 0)
    assert [step[0] for step in run(scheduler)] == ["prefill"] * 3


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
    assert [int(request.request_id) for request in scheduler.decoding] == [0, 1, 2, 3, 4, 5]
    turns = []
    for _ in range(3):
        batch = scheduler.schedule()
        turns.append([int(rows.request.request_id) for rows in batch.rows])
        commit(scheduler, batch)
    assert turns == [[0, 1, 2, 3], [4, 5, 0, 1], [2, 3, 4, 5]]
    assert [len(request.output_token_ids) for request in requests] == [3] * 6


def test_head_of_the_queue_waits_for_room_and_nothing_overtakes_it() -> None:
    scheduler = Scheduler(limits(num_blocks=9))
    first, second = (scheduler.add([3] * 33, params(8), 0) for _ in range(2))
    small = scheduler.add([3], params(2), 0)
    while first.output_token_ids == []:
        commit(scheduler, scheduler.schedule())
    while not first.finished:
        assert second.status is small.status is RequestStatus.WAITING
        batch = scheduler.schedule()
        assert batch.phase == "decode"
        commit(scheduler, batch)
    assert scheduler.schedule().rows[0].request is second


def test_blocks_of_a_prompt_are_reserved_at_its_first_chunk_and_grow_one_by_one() -> None:
    scheduler = Scheduler(limits())
    request = scheduler.add([3] * 23, params(20), 0)
    held = []
    while not request.finished:
        batch = scheduler.schedule()
        held.append((request.num_tokens, len(request.block_table)))
        commit(scheduler, batch)
    assert held[:3] == [(23, 3)] * 3  # three chunks
    assert all(blocks == -(-tokens // 8) for tokens, blocks in held)
    assert request.num_peak_blocks == 6 and scheduler.blocks.num_free == scheduler.blocks.capacity


def decoding(scheduler: Scheduler, outputs: list[int]) -> list[Request]:
    """Requests that decode and have made so many tokens; every one needs another block next."""
    requests = []
    for count in outputs:
        request = scheduler.add([3] * 8, params(40), 0)
        while not request.output_token_ids:
            commit(scheduler, scheduler.schedule())
        requests.append(request)
        request.output_token_ids += [5] * (count - 1)
        scheduler.blocks.free(request.block_table)
        request.block_table = scheduler.blocks.allocate(scheduler.limits.blocks_for(7 + count))
        request.num_computed_tokens = request.num_tokens - 1
        assert len(request.block_table) < scheduler.limits.blocks_for(request.num_tokens)
    return requests


def test_the_longest_give_way_to_the_shortest() -> None:
    """D.7, K-15: served by rising number of outputs, given up by falling; the answer stays the same."""
    scheduler = Scheduler(limits(num_blocks=12), SchedulerConfig(watermark=1.0, min_decode_steps=0))
    most, more, few, fewest = decoding(scheduler, [33, 17, 9, 1])
    assert scheduler.blocks.num_free == 0
    batch = scheduler.schedule()
    assert {rows.request for rows in batch.rows} == {more, few, fewest}
    assert (most.status, most.num_preemptions, most.block_table) == (RequestStatus.WAITING, 1, ())
    assert scheduler.waiting == [most] and most.num_computed_tokens == 0
    commit(scheduler, batch)
    run(scheduler)
    assert [len(request.output_token_ids) for request in (most, more, few, fewest)] == [40] * 4
    assert all(request.finish_reason == "length" for request in (most, more, few, fewest))


def test_nothing_is_preempted_without_need() -> None:
    """K-14: an empty free list alone preempts nobody."""
    scheduler = Scheduler(limits(num_blocks=3))
    for _ in range(2):
        scheduler.add([3] * 4, params(4), 0)
    run(scheduler)
    assert scheduler.num_preemptions == 0


def test_a_preempted_request_computes_prompt_and_outputs_again_and_gets_its_next_token() -> None:
    scheduler = Scheduler(limits(num_blocks=4))
    old, new = (scheduler.add([3] * 8, params(9), 0) for _ in range(2))
    steps = run(scheduler)
    assert new.num_preemptions == 1 and old.num_preemptions == 0
    assert ("prefill", 8, [(1, 0, 8)]) in steps and ("prefill", 4, [(1, 8, 1)]) in steps
    assert len(old.output_token_ids) == len(new.output_token_ids) == 9
    assert (old.num_positions_processed, new.num_positions_processed) == (8 + 8, 8 + 9 + 7)


def test_stop_mode_ends_what_it_preempts() -> None:
    scheduler = Scheduler(
        limits(num_blocks=12), SchedulerConfig(watermark=1.0, preemption_mode=PreemptionMode.STOP)
    )
    most, *others = decoding(scheduler, [33, 17, 9, 1])
    batch = scheduler.schedule()
    assert (most.finish_reason, most.stop_reason) == ("error", "kv_overflow")
    assert scheduler.take_ended() == [most] and len(most.output_token_ids) == 33
    commit(scheduler, batch)
    scheduler.check_integrity()


def test_a_request_preempted_twice_is_spared_while_it_is_small() -> None:
    scheduler = Scheduler(limits(num_blocks=12), SchedulerConfig(watermark=1.0, min_decode_steps=0))
    most, more, few, fewest = decoding(scheduler, [33, 17, 9, 1])
    most.num_preemptions = 2  # it holds five of eleven blocks
    more.num_preemptions = 2
    scheduler.schedule()
    assert (more.num_preemptions, few.num_preemptions) == (2, 1), "the longest that is not spared"
    scheduler = Scheduler(limits(num_blocks=9))
    most, more = decoding(scheduler, [33, 17])
    most.num_preemptions = 2  # five of eight: too much to be spared
    scheduler.schedule()
    assert (most.num_preemptions, more.num_preemptions) == (3, 0)


def test_choices_join_when_the_last_chunk_is_computed_and_share_full_blocks() -> None:
    scheduler = Scheduler(limits())
    parent = scheduler.add([3] * 19, params(4, n=3), 0)
    children = [scheduler.add([3] * 19, params(4, n=3), c, parent=parent, index=c) for c in (1, 2)]
    commit(scheduler, scheduler.schedule())
    commit(scheduler, scheduler.schedule())
    batch = scheduler.schedule()
    assert batch.rows[0].forks == tuple(children) and batch.sampled_requests == [parent, *children]
    commit(scheduler, batch)
    scheduler.check_integrity()
    for child in children:
        assert (
            child.block_table[:2] == parent.block_table[:2] and child.block_table[2] != parent.block_table[2]
        )
        assert child.slot_id != parent.slot_id and child.num_positions_processed == 0
    copies = scheduler.schedule().copies
    assert [(copy.source_slot, copy.slot) for copy in copies] == [
        (parent.slot_id, child.slot_id) for child in children
    ]
    assert [(copy.source_block, copy.block) for copy in copies] == [
        (parent.block_table[2], child.block_table[2]) for child in children
    ]


def test_choices_without_room_compute_the_prompt_themselves() -> None:
    scheduler = Scheduler(limits(num_slots=3))
    parent = scheduler.add([3] * 8, params(4, n=2), 0)
    other = scheduler.add([3] * 8, params(9), 0)
    child = scheduler.add([3] * 8, params(4, n=2), 1, parent=parent, index=1)
    scheduler._prefill_budget = lambda: 16  # type: ignore[method-assign]
    scheduler.limits = limits(num_slots=3, prefill_buckets=(16,))
    batch = scheduler.schedule()
    assert [rows.request for rows in batch.rows] == [parent, other] or batch.rows[0].forks == (child,)
    commit(scheduler, batch)
    run(scheduler)
    assert all(own.finish_reason == "length" for own in (parent, other, child))


def test_fork_shares_full_blocks_by_reference_count() -> None:
    """D.14: reference counts 2, 1, 0; the parent's blocks stay; the block in use is never shared."""
    scheduler = Scheduler(limits())
    parent = scheduler.add([3] * 19, params(30), 0)
    while len(parent.output_token_ids) < 3:
        commit(scheduler, scheduler.schedule())
    before, free = parent.block_table, scheduler.blocks.num_free
    child = scheduler.fork(parent, seed=9)
    assert (parent.block_table, child.output_token_ids) == (before, parent.output_token_ids)
    assert child.block_table[:2] == before[:2] and child.block_table[2] not in before
    assert scheduler.blocks.num_free == free - 1
    batch = scheduler.schedule()
    assert [copy.block for copy in batch.copies] == [child.block_table[2]]
    commit(scheduler, batch)
    assert scheduler.schedule().copies == ()
    scheduler.abort(parent)
    scheduler.check_integrity()
    assert scheduler.blocks.num_free == free - 1 + 1
    scheduler.abort(child)
    assert scheduler.blocks.num_free == scheduler.blocks.capacity


def test_fork_of_what_does_not_decode_or_has_no_room_is_refused() -> None:
    scheduler = Scheduler(limits(num_slots=2))
    request = scheduler.add([3] * 9, params(), 0)
    with pytest.raises(RequestError, match="decodes"):
        scheduler.fork(request, 1)
    while not request.output_token_ids:
        commit(scheduler, scheduler.schedule())
    with pytest.raises(RequestError, match="no cache is free"):
        scheduler.fork(request, 1)
    scheduler.check_integrity()


def test_engine_types_refuse_what_is_not_theirs() -> None:
    prompt = Scheduler(limits(), SchedulerConfig(engine_type=EngineType.PROMPT))
    completion = Scheduler(limits(), SchedulerConfig(engine_type=EngineType.COMPLETION))
    with pytest.raises(RequestError, match="computes no prompts"):
        completion.add([3], params(), 0)
    request = prompt.add([3] * 9, params(), 0)
    assert [step[0] for step in run(prompt)] == ["prefill", "prefill"]
    assert list(prompt.prefilled) == [request] and request.output_token_ids == [5]
    with pytest.raises(RequestError, match="does not decode"):
        prompt.add_prefilled(request)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"watermark": 1.1}, "watermark"),
        ({"watermark": True}, "watermark"),
        ({"watermark": "a"}, "watermark"),
        ({"watermark": None}, "watermark"),
        ({"max_prefill_steps": 0}, "max_prefill_steps"),
        ({"min_decode_steps": -1}, "min_decode_steps"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens"),
        ({"max_num_batched_tokens": 2.5}, "max_num_batched_tokens"),
        ({"preemption_mode": "swap"}, "preemption_mode"),
        ({"engine_type": "normal"}, "engine_type"),
    ],
)
def test_bad_policy_is_refused(options: dict, name: str) -> None:
    with pytest.raises(UsageError, match=name):
        SchedulerConfig(**options)


def test_live_ids_are_unique_and_can_be_used_again() -> None:
    """An id that is in use is refused, the request that has it is unharmed."""
    scheduler = Scheduler(limits())
    first = scheduler.add([3], params(3), 0, request_id="x")
    commit(scheduler, scheduler.schedule())
    with pytest.raises(RequestError, match="'x'"):
        scheduler.add([3], params(), 0, request_id="x")
    run(scheduler)
    assert first.finish_reason == "length"
    scheduler.add([3], params(), 0, request_id="x")


def test_deadline_ends_a_request_in_every_state() -> None:
    scheduler = Scheduler(limits())
    running = scheduler.add([3], params(), 0, deadline=5.0)
    commit(scheduler, scheduler.schedule())
    cut = scheduler.add([3] * 20, params(), 0, deadline=5.0)
    waiting = scheduler.add([3], params(), 0, deadline=5.0)
    later = scheduler.add([3], params(), 0, deadline=5.1)
    commit(scheduler, scheduler.schedule())
    assert scheduler.prefilling is cut
    scheduler.expire(4.9)
    assert scheduler.take_ended() == []
    scheduler.expire(5.0)
    scheduler.check_integrity()
    assert {(own.finish_reason, own.stop_reason) for own in scheduler.take_ended()} == {("abort", "timeout")}
    assert running.finished and cut.finished and waiting.finished and not later.finished
    assert len(running.output_token_ids) == 1


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
    assert scheduler.take_ended() == ([request] if request.finished else [])
    assert request.finished == (not scheduler.has_work)


def test_error_ends_a_request_without_a_token() -> None:
    scheduler = Scheduler(limits())
    request = scheduler.add([3], params(), 0)
    scheduler.commit(scheduler.schedule(), [-1], ["numerical_error"])
    assert (request.finish_reason, request.stop_reason) == ("error", "numerical_error")
    assert request.output_token_ids == [] and scheduler.take_ended() == [request]
    assert not scheduler.has_work
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


@pytest.mark.parametrize("state", ["waiting", "first chunk in flight", "between chunks", "decode in flight"])
def test_abort_gives_everything_back_and_ends_once(state: str) -> None:
    """D.8, K-1 to K-3: in every state memory returns at once, and one end is reported, without a token."""
    scheduler = Scheduler(limits())
    request = scheduler.add([3] * 20, params(9), 0)
    batch = None
    if state != "waiting":
        batch = scheduler.schedule()
    if state in ("between chunks", "decode in flight"):
        commit(scheduler, batch)
        batch = None
    if state == "decode in flight":
        while not request.output_token_ids:
            commit(scheduler, scheduler.schedule())
        batch = scheduler.schedule()
        assert batch.phase == "decode"
    tokens = list(request.output_token_ids)
    scheduler.abort(request)
    assert scheduler.blocks.num_free == scheduler.blocks.capacity
    assert scheduler.slots.num_free == scheduler.slots.capacity
    if batch is not None:
        assert commit(scheduler, batch) == []
    scheduler.abort(request)
    assert (scheduler.take_ended(), request.output_token_ids) == ([request], tokens)
    assert scheduler.schedule() is None and not scheduler.has_work
    scheduler.check_integrity()
