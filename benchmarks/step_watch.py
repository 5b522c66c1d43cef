"""What an engine's steps must not do, counted over many steps of mixed shapes in a process of their own.

`python step_watch.py ARTIFACT THREADS STEPS` prints the counts as JSON. They are found where they happen:
guards by the hook that the frame evaluator calls after every check, clones among all allocations of the CPU's
allocator, which the code inside a graph uses too. The profiler that lists these imports parts of Inductor, so
that the steps run once without it and once more with it.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from deepinfer.runtime.engine import Engine
from deepinfer.runtime.loader import CompilerWatch, LoadedArtifact, load_artifact
from deepinfer.runtime.sampling_params import SamplingParams

STEPS_A_PROFILE = 50  # which bounds the memory of the recorded events


@contextmanager
def compiler_watch() -> Iterator[dict[str, int]]:
    """Counts what a compiler does within the block; the counts are there when it has ended."""
    found = dict.fromkeys(("compiles", "guard evaluations", "Inductor imports", "child processes"), 0)

    def count_guard(passed: bool) -> bool:
        found["guard evaluations"] += 1
        return passed

    compiler, inductor, frames = CompilerWatch(), _inductor_modules(), _compiled_frames()
    before = eval_frame.set_guard_complete_hook(count_guard)
    try:
        yield found
    finally:
        eval_frame.set_guard_complete_hook(before)
    found["compiles"] = _compiled_frames() - frames
    found["Inductor imports"] = len(_inductor_modules() - inductor)
    found["child processes"] = compiler.counts()["child_processes_seen"]


@contextmanager
def clone_watch(regions: Mapping[str, Tensor]) -> Iterator[dict[str, int]]:
    """Counts allocations of just the bytes of one of these caches, or of all of them, within the block."""
    sizes = [tensor.numel() * tensor.element_size() for tensor in regions.values()]
    found = {"cache-sized clones": 0}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        yield found
    found["cache-sized clones"] = sum(size in {*sizes, sum(sizes)} for size in _allocated(recorded))


def mixed_steps(loaded: LoadedArtifact, steps: int) -> dict[str, int]:
    """All counts, over so many steps of requests of all lengths that come and go; 0 is the promise."""
    traffic = _traffic(loaded)
    with compiler_watch() as counts:
        for _ in range(steps):
            next(traffic)
    clones = 0
    for start in range(0, steps, STEPS_A_PROFILE):
        with clone_watch(loaded.arenas.regions) as found:
            for _ in range(min(STEPS_A_PROFILE, steps - start)):
                next(traffic)
        clones += found["cache-sized clones"]
    return {**counts, "cache-sized clones": clones}


def _traffic(loaded: LoadedArtifact) -> Iterator[None]:
    """Runs a step whenever it is asked for more."""
    engine, numbers = Engine(loaded.runner), np.random.default_rng(1)
    longest = min(200, loaded.limits.max_model_len // 2)
    vocab = loaded.limits.vocab_size
    while True:
        if len(engine.scheduler.waiting) < 4:
            length, count = (int(number) for number in numbers.integers(1, longest, 2))
            params = SamplingParams(max_tokens=count, temperature=count % 2, seed=count, ignore_eos=True)
            engine.add_request(numbers.integers(3, min(500, vocab), length).tolist(), params)
        engine.step()
        yield


def _allocated(recorded: profile) -> Iterator[int]:
    """Sizes in bytes of all allocations of the CPU's allocator."""
    profiler = recorded.profiler
    assert profiler is not None and profiler.kineto_results is not None
    waiting: list[Any] = list(profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        kind, fields = event.typed
        if kind == _EventType.Allocation and fields.alloc_size > 0:  # freeing is a negative one
            yield fields.alloc_size


def _compiled_frames() -> int:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else dynamo.counters["frames"]["total"]


def _inductor_modules() -> set[str]:
    return {name for name in tuple(sys.modules) if name.startswith("torch._inductor")}


if __name__ == "__main__":
    artifact = load_artifact(sys.argv[1])
    torch.set_num_threads(int(sys.argv[2]))
    print(json.dumps(mixed_steps(artifact, int(sys.argv[3]))))
