"""The runner of captured graphs on a recording device: same tokens, no allocation, no wait, nothing stale."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from fake_card import fake_card
from fake_graphs import fake_limits, fake_runner
from recording_device import DeviceFault
from torch import Tensor

from deepinfer.runtime.cuda_runner import CudaModelRunner
from deepinfer.runtime.engine import Engine
from deepinfer.runtime.request import Batch
from deepinfer.runtime.sampling_params import SamplingParams

PROMPTS = [list(range(1, 1 + length)) for length in (1, 7, 16, 5, 12, 3, 9)]


def generated(runner: object, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    engine = Engine(runner)  # type: ignore[arg-type]
    requests = [
        engine.add_request(prompt, SamplingParams(max_tokens=6, seed=index, temperature=0.8))
        for index, prompt in enumerate(prompts)
    ]
    while engine.has_work:
        engine.step()
        engine.scheduler.check_integrity()
    return [list(request.output_token_ids) for request in requests]


@pytest.mark.parametrize("capture_all", [False, True])
def test_the_engine_gives_the_same_tokens_as_on_a_cpu(capture_all: bool) -> None:
    """With everything captured before, the whole workload is watched: no allocation, no read."""
    card = fake_card(capture_all=capture_all)
    assert generated(card) == generated(fake_runner())
    assert card.device.waits == 0  # a read of the logits has waited for all


def test_a_lazy_capture_happens_once_per_graph_and_touches_no_live_state() -> None:
    card = fake_card(capture_all=False)
    runner, arenas = card.runner, card.arenas
    before = arenas.blocks.clone(), arenas.slots.clone()
    for phase, bucket in (("decode", 4), ("prefill", 16)):
        runner._step(phase, bucket)
    # block 0 and slot 0 belong to padding rows
    assert torch.equal(arenas.blocks[arenas.block_bytes :], before[0][arenas.block_bytes :])
    assert torch.equal(arenas.slots[arenas.slot_bytes :], before[1][arenas.slot_bytes :])
    generated(card)
    captured = dict(runner._steps)
    generated(card)
    assert runner._steps == captured


def test_a_step_is_two_copies_two_replays_and_one_gather() -> None:
    card = fake_card()
    card.device.wait()
    card.device.log.clear()
    generated(card, PROMPTS[:1])
    assert card.device.log[:6] == ["copy", "copy", "replay", "select", "replay", "copy"]  # the last: to read
    assert len(card.device.log) == 6 * 6  # one prefill, five decodes, a token each


def test_after_a_failed_step_nothing_stale_is_left() -> None:
    """The request of the failed step is dropped; the next ones get what they would have got without it."""
    card = fake_card()
    engine = Engine(card)
    engine.add_request([9, 8, 7, 6], SamplingParams(max_tokens=4, seed=1))
    engine.step()
    card.device.fail_next = True
    with pytest.raises(RuntimeError, match="the launch failed"):
        engine.step()
    engine.abort_all()
    with pytest.raises(AssertionError, match="no step is there"):
        card.logits_of_rows(np.arange(1))
    assert generated(card) == generated(fake_runner())


def test_more_rows_than_the_head_takes_at_once() -> None:
    limits = fake_limits(logits_buckets=(1,))
    assert generated(fake_card(limits)) == generated(fake_runner(limits))


def test_chunks_that_give_no_token_wait_for_each_others_inputs_and_nothing_else() -> None:
    """Nobody reads anything between two chunks of a prompt, so the same host memory would be filled early."""
    prompt = [list(np.random.default_rng(0).integers(2, 40, 50))]
    card = fake_card()
    assert generated(card, prompt) == generated(fake_runner(), prompt)
    assert card.device.waits == 3  # chunks of 16, 16, 16 and 2 rows


def _reads_back(runner: CudaModelRunner) -> Callable[[Batch], Tensor]:
    run = CudaModelRunner.run

    def broken(batch: Batch) -> Tensor:
        logits = run(runner, batch)
        logits[0, 0].item()
        return logits

    return broken


def _allocates(runner: CudaModelRunner) -> Callable[[Batch], Tensor]:
    run = CudaModelRunner.run
    return lambda batch: run(runner, batch) * 1


def _captures(runner: CudaModelRunner) -> Callable[[Batch], Tensor]:
    runner._steps.clear()
    return lambda batch: CudaModelRunner.run(runner, batch)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (_reads_back, "reads a value on the host"),
        (_allocates, "a step allocates"),
        (_captures, "captures a graph|allocates"),
    ],
)
def test_the_recording_device_finds_faults(
    fault: Callable[[CudaModelRunner], Callable[[Batch], Tensor]], message: str
) -> None:
    card = fake_card()
    broken = fault(card.runner)

    def watched(batch: Batch) -> Tensor:
        with card.device.watched():
            return broken(batch)

    card.runner.run = watched  # type: ignore[method-assign]
    with pytest.raises(DeviceFault, match=message):
        generated(card)


def test_a_moved_address_is_found() -> None:
    graph = fake_card().runner._graphs["decode-4"]
    with pytest.raises(DeviceFault, match="an address changed"):
        graph.run([torch.zeros(4, dtype=torch.int64)])


def test_a_host_buffer_that_is_filled_too_early_shows() -> None:
    """The fake is as lazy as a device: memory that changes before its copy is done spoils the copy."""
    card = fake_card()
    buffers = card.runner._host.buffers("decode", 4)
    step = card.runner._steps["decode", 4]
    buffers.flat.fill_(1)
    card.device.copy(step.static, buffers.flat)
    buffers.flat.fill_(2)
    card.device.wait()
    assert torch.all(step.static == 2)


def test_hidden_rows_in_the_memory_of_the_heads_would_show() -> None:
    """One pool for steps and heads, as memory may then be shared: later pieces read what is spoiled."""
    limits = fake_limits(logits_buckets=(1,))
    card = fake_card(limits)
    steps, heads = (card.device._pools[name] for name in ("steps", "heads"))
    heads += steps
    assert _score(card) != _score(fake_runner(limits))


def test_log_probabilities_of_a_prompt_are_those_of_the_cpu() -> None:
    for limits in (fake_limits(), fake_limits(logits_buckets=(1,), prefill_buckets=(64,))):
        assert _score(fake_card(limits)) == _score(fake_runner(limits))


def _score(runner: object) -> object:
    engine = Engine(runner)  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=3, seed=1, prompt_logprobs=2, logprobs=1)
    requests = [engine.add_request(prompt, params) for prompt in PROMPTS[1:4]]
    while engine.has_work:
        engine.step()
    return [(own.prompt_logprobs, own.logprobs, own.output_token_ids) for own in requests]


def test_rows_that_are_not_there_are_refused() -> None:
    card = fake_card()
    engine = Engine(card)
    engine.add_request([3, 4], SamplingParams(max_tokens=4, seed=1))
    engine.step()
    with pytest.raises(AssertionError, match=r"rows 0 \.\. 4 of a step of 4"):
        card.logits_of_rows(np.arange(5))
    with pytest.raises(AssertionError, match=r"rows -1 \.\. -1"):
        card.logits_of_rows(np.array([-1]))
    with pytest.raises(AssertionError, match="17 rows at once, more than 16"):
        card.logits_of_rows(np.zeros(17, np.int64))
