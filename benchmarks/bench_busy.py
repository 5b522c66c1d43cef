"""Decode steps while another process burns a core: threads that spin on each other would collapse.

The burner is stopped and continued in turns, so that both halves of a pair see the same machine.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from bench_engine import Steps
from bench_step import MODELS
from harness import Line, Spread

from deepinfer.compile import compile_model
from deepinfer.runtime.loader import load_artifact
from deepinfer.settings import CompileConfig

REQUESTS = 8
FLOOR = 0.5
ROUNDS = 9
SECONDS = 0.4  # of one measurement: several slices of the scheduler


def run(threads: int) -> list[Line]:
    """The lines of this area."""
    with tempfile.TemporaryDirectory(prefix="deepinfer-bench-") as folder:
        options = CompileConfig(
            decode_rows=(REQUESTS,),
            prefill_tokens=(64,),
            max_num_seqs=REQUESTS,
            max_model_len=1024,
            taps="off",
        )
        compile_model(MODELS["trained"], Path(folder) / "artifact", options, certify=False)
        steps = Steps(load_artifact(Path(folder) / "artifact"), REQUESTS)
        torch.set_num_threads(threads)  # loading sets its own
        steps()
        burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            pairs = [_pair(steps, burner.pid) for _ in range(ROUNDS)]
        finally:
            burner.send_signal(signal.SIGCONT)
            burner.kill()
            burner.wait()
    ratio = Spread.of([busy / quiet for quiet, busy in pairs])
    quiet, busy = (Spread.of([pair[place] for pair in pairs]).median for place in (0, 1))
    detail = f"{busy:.0f} steps/s with a neighbour, {quiet:.0f} without"
    name = f"decode of {REQUESTS} requests beside a process that burns a core: rate kept"
    return [Line(name, ratio.median, ratio.low, ratio.high, FLOOR, detail)]


def _pair(steps: Steps, burner: int) -> tuple[float, float]:
    """Steps per second without and with the neighbour."""
    os.kill(burner, signal.SIGSTOP)
    quiet = _rate(steps)
    os.kill(burner, signal.SIGCONT)
    return quiet, _rate(steps)


def _rate(steps: Steps) -> float:
    count, start = 0, time.perf_counter()
    while (now := time.perf_counter()) - start < SECONDS:
        steps()
        count += 1
    return count / (now - start)
