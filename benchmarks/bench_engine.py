"""A decode step of the engine against the graphs it replays: what all that is not a graph costs.

The trained small model; the graphs alone are the step graph and the head over the buffers of the step before.
Over a thousand steps of mixed shapes nothing may be compiled, imported, started or cloned: the last line
counts.
"""

import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from bench_step import MODELS
from harness import Line, compare

from deepinfer.compile import compile_model
from deepinfer.runtime.engine import Engine
from deepinfer.runtime.loader import LoadedArtifact, load_artifact
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.settings import CompileConfig

REQUESTS = (1, 8, 64)
CONTEXT = 100
MAX_MODEL_LEN = 1024
MIXED_STEPS = 1000
MAX_RATIO = {8: 1.10}  # of the engine's step to the graphs


def run(threads: int) -> list[Line]:
    """The lines of this area."""
    with tempfile.TemporaryDirectory(prefix="deepinfer-bench-") as folder:
        artifact = Path(folder) / "artifact"
        loaded = _built(artifact)
        torch.set_num_threads(threads)  # loading sets its own
        lines = [_against_graphs(loaded, requests) for requests in REQUESTS]
        return [*lines, _nothing_is_compiled(artifact, threads)]


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

    result = compare({"engine": steps, "graphs": graphs}, rounds=41, min_seconds=0.05)
    extra = (result.seconds("engine").median - result.seconds("graphs").median) * 1e6
    most = MAX_RATIO.get(requests)
    label = f"engine step, trained, {requests} requests: to its graphs"
    line = result.line(label, "engine", "graphs", floor=None if most is None else 1 / most)
    detail = f"{line.detail}; {extra:.0f} us beside them, {extra / requests:.1f} us per request"
    return dataclasses.replace(line, detail=detail)


def _nothing_is_compiled(artifact: Path, threads: int) -> Line:
    """A ratio of 1 if a thousand steps, in a fresh process, did nothing that they must not; else 0."""
    script = Path(__file__).with_name("step_watch.py")
    command = [sys.executable, "-P", str(script), str(artifact), str(threads), str(MIXED_STEPS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    counts = json.loads(done.stdout.splitlines()[-1])
    clean = float(not any(counts.values()))
    detail = ", ".join(f"{count} {name}" for name, count in counts.items())
    return Line(f"{MIXED_STEPS:,} steps of mixed shapes compile nothing", clean, clean, clean, 1.0, detail)
