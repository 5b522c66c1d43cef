"""The runner of captured graphs on a recording device: same tokens, no allocation, no wait, nothing stale."""

from collections.abc import Callable

import pytest
import torch
from fake_graphs import FakeLogitsGraph, FakeStepGraph, fake_cache_layout, fake_limits, fake_runner
from recording_device import DeviceFault, RecordingDevice, Watched
from torch import Tensor

from deepinfer.runtime.caches import CacheArenas
from deepinfer.runtime.cuda_runner import CudaModelRunner
from deepinfer.runtime.engine import Engine
from deepinfer.runtime.limits import Limits
from deepinfer.runtime.model_runner import Graph
from deepinfer.runtime.request import Batch
from deepinfer.runtime.sampling_params import SamplingParams

PROMPTS = [list(range(1, 1 + length)) for length in (1, 7, 16, 5, 12, 3, 9)]


def cuda_runner(
    limits: Limits | None = None, *, capture_all: bool = False
) -> tuple[CudaModelRunner, RecordingDevice, CacheArenas]:
    limits = limits or fake_limits()
    device, arenas = RecordingDevice(), CacheArenas.allocate(fake_cache_layout(limits))
    arenas.blocks.fill_(0x5A)
    arenas.slots.fill_(0x5A)
    graphs: dict[str, Graph] = {}
    for phase, buckets in (("prefill", limits.prefill_buckets), ("decode", limits.decode_buckets)):
        graphs |= {f"{phase}-{b}": Watched(FakeStepGraph(phase, b, limits, None)) for b in buckets}
    graphs |= {f"logits-{bucket}": Watched(FakeLogitsGraph(bucket)) for bucket in limits.logits_buckets}
    runner = CudaModelRunner(limits, graphs, arenas.regions, device, capture_all=capture_all)
    return runner, device, arenas


class Reading:
    """What an engine does with the logits of a step: it reads them, which waits for the device."""

    def __init__(self, runner: CudaModelRunner, device: RecordingDevice, watched: bool = False) -> None:
        self.limits, self._runner, self._device, self._watched = runner.limits, runner, device, watched

    def run(self, batch: Batch) -> Tensor:
        if self._watched:
            with self._device.watched():
                logits = self._runner.run(batch)
        else:
            logits = self._runner.run(batch)
        self._device.wait()
        return logits.clone()


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
    runner, device, _ = cuda_runner(capture_all=capture_all)
    assert generated(Reading(runner, device)) == generated(fake_runner())


def test_steps_allocate_nothing_and_read_nothing() -> None:
    """Everything is captured before; then a whole workload is watched."""
    runner, device, _ = cuda_runner(capture_all=True)
    assert generated(Reading(runner, device, watched=True)) == generated(fake_runner())


def test_a_lazy_capture_happens_once_per_graph_and_touches_no_live_state() -> None:
    runner, device, arenas = cuda_runner()
    before = arenas.blocks.clone(), arenas.slots.clone()
    for phase, bucket in (("decode", 4), ("prefill", 16)):
        runner._step(phase, bucket)
    blocks, slots = arenas.blocks.view(-1), arenas.slots.view(-1)
    block_bytes, slot_bytes = (
        len(blocks) // runner.limits.num_blocks,
        len(slots) // runner.limits.num_slots,
    )
    # block 0 and slot 0 belong to padding rows
    assert torch.equal(blocks[block_bytes:], before[0][block_bytes:])
    assert torch.equal(slots[slot_bytes:], before[1][slot_bytes:])
    reading = Reading(runner, device)
    generated(reading)
    captured = dict(runner._steps)
    generated(reading)
    assert runner._steps == captured


def test_a_step_is_two_copies_two_replays_and_one_gather() -> None:
    runner, device, _ = cuda_runner(capture_all=True)
    device.wait()
    device.log.clear()
    generated(Reading(runner, device), PROMPTS[:1])
    assert device.log[:5] == ["copy", "replay", "copy", "select", "replay"]
    assert len(device.log) == 5 * 6  # one prefill, five decodes, a token each


def test_after_a_failed_step_nothing_stale_is_left() -> None:
    """The request of the failed step is dropped; the next ones get what they would have got without it."""
    runner, device, _ = cuda_runner(capture_all=True)
    reading, engine = Reading(runner, device), None
    engine = Engine(reading)  # type: ignore[arg-type]
    engine.add_request([9, 8, 7, 6], SamplingParams(max_tokens=4, seed=1))
    engine.step()
    device.fail_next = True
    with pytest.raises(RuntimeError, match="the launch failed"):
        engine.step()
    engine.abort_all()
    device.wait()
    assert generated(reading) == generated(fake_runner())


def test_more_rows_than_the_head_takes_at_once() -> None:
    limits = fake_limits(logits_buckets=(1,))
    runner, device, _ = cuda_runner(limits, capture_all=True)
    assert generated(Reading(runner, device, watched=True)) == generated(fake_runner(limits))


def _reads_back(runner: CudaModelRunner) -> Callable[[Batch], Tensor]:
    run = type(runner).run

    def broken(batch: Batch) -> Tensor:
        logits = run(runner, batch)
        logits[0, 0].item()
        return logits

    return broken


def _allocates(runner: CudaModelRunner) -> Callable[[Batch], Tensor]:
    run = type(runner).run
    return lambda batch: run(runner, batch) * 1


@pytest.mark.parametrize(
    ("fault", "message", "capture_all"),
    [
        (_reads_back, "reads a value on the host", True),
        (_allocates, "a step allocates", True),
        (lambda runner: type(runner).run.__get__(runner), "captures a graph|allocates", False),
    ],
)
def test_the_recording_device_finds_faults(
    fault: Callable[[CudaModelRunner], Callable[[Batch], Tensor]], message: str, capture_all: bool
) -> None:
    runner, device, _ = cuda_runner(capture_all=capture_all)
    runner.run = fault(runner)  # type: ignore[method-assign]
    with pytest.raises(DeviceFault, match=message):
        generated(Reading(runner, device, watched=True))


def test_a_moved_address_is_found() -> None:
    runner, device, _ = cuda_runner(capture_all=True)
    graph = runner._graphs["decode-4"]
    with pytest.raises(DeviceFault, match="an address changed"):
        graph.run([torch.zeros(4, dtype=torch.int64)])


def test_a_host_buffer_that_is_filled_too_early_shows() -> None:
    """The fake is as lazy as a device: a step that starts before the last was read spoils its inputs."""
    runner, device, _ = cuda_runner(capture_all=True)
    buffers = runner._host.buffers("decode", 4)
    step = runner._steps["decode", 4]
    buffers.flat.fill_(1)
    device.copy(step.static, buffers.flat)
    buffers.flat.fill_(2)
    device.wait()
    assert torch.all(step.static == 2)
