"""A decode step of the engine against the graphs it replays: what all that is not a graph costs.

The trained small model; the graphs alone are the step graph and the head over the buffers of the step before.
Over a thousand steps of mixed shapes nothing may be compiled: that is counted, and said in the last line.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from bench_step import MODELS
from harness import Line, compare

from deepinfer.compile import compile_model
from deepinfer.runtime.engine import Engine
from deepinfer.runtime.loader import CompilerWatch, LoadedArtifact, load_artifact
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.settings import CompileConfig

REQUESTS = (1, 8, 64)
CONTEXT = 100
MAX_MODEL_LEN = 1024
MAX_RATIO = {8: 1.10}  # of the engine's step to the graphs


def run(threads: int) -> list[Line]:
    """The lines of this area."""
    with tempfile.TemporaryDirectory(prefix="deepinfer-bench-") as folder:
        loaded = _built(Path(folder) / "artifact")
        torch.set_num_threads(threads)  # loading sets its own
        lines = [_against_graphs(loaded, requests) for requests in REQUESTS]
        return [*lines, _nothing_is_compiled(loaded)]


def _built(target: Path) -> LoadedArtifact:
    options = CompileConfig(
        decode_rows=REQUESTS,
        prefill_tokens=(64,),
        logits_rows=REQUESTS,
        max_num_seqs=max(REQUESTS),
        max_model_len=MAX_MODEL_LEN,
        taps="off",
    )
    compile_model(MODELS["trained"], target, options, certify=False)
    return load_artifact(target)


class Steps:
    """An engine that always has so many requests to decode."""

    def __init__(self, loaded: LoadedArtifact, requests: int) -> None:
        self.engine = Engine(loaded.runner)
        self.requests = requests

    def __call__(self) -> None:
        """One decode step; once in many, all requests begin anew."""
        if not self.engine.has_work:
            self._start()
        self.engine.step()

    def _start(self) -> None:
        params = SamplingParams(max_tokens=MAX_MODEL_LEN - CONTEXT, temperature=0, ignore_eos=True)
        for number in range(self.requests):
            prompt = np.random.default_rng(number).integers(3, 500, CONTEXT).tolist()
            self.engine.add_request(prompt, params)
        while self.engine.scheduler.waiting or self.engine.scheduler.prefilling:
            self.engine.step()


def _against_graphs(loaded: LoadedArtifact, requests: int) -> Line:
    steps, rows = Steps(loaded, requests), np.arange(requests)
    steps()
    runner = loaded.runner

    def graphs() -> None:
        runner.replay("decode", requests)
        runner.logits_of_rows(rows)

    result = compare({"engine": steps, "graphs": graphs}, rounds=15, min_seconds=0.05)
    extra = (result.seconds("engine").median - result.seconds("graphs").median) * 1e6
    most = MAX_RATIO.get(requests)
    label = f"engine step, trained, {requests} requests: to its graphs"
    line = result.line(label, "engine", "graphs", floor=None if most is None else 1 / most)
    detail = f"{line.detail}; {extra:.0f} us beside them, {extra / requests:.1f} us per request"
    return Line(line.name, line.ratio, line.low, line.high, line.floor, detail)


def _nothing_is_compiled(loaded: LoadedArtifact) -> Line:
    """A ratio of 1 if a thousand steps of mixed shapes compiled nothing and started nothing, else 0."""
    engine, watch = Engine(loaded.runner), CompilerWatch()
    numbers = np.random.default_rng(1)
    steps = 0
    while steps < 1000:
        if len(engine.scheduler.waiting) < 4:
            length, count = (int(number) for number in numbers.integers(1, 200, 2))
            params = SamplingParams(max_tokens=count, temperature=count % 2, seed=count, ignore_eos=True)
            engine.add_request(numbers.integers(3, 500, length).tolist(), params)
        engine.step()
        steps += 1
    counts = watch.counts()
    engine.abort_all()
    clean = float(not any(counts.values()))
    detail = ", ".join(f"{name} {count}" for name, count in counts.items())
    return Line("1,000 steps of mixed shapes compile nothing", clean, clean, clean, 1.0, detail)
