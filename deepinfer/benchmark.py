"""Measure an artifact as its users meet it: latency, throughput, start-up, and the graphs by themselves.

Requests are random tokens of given lengths, greedy, with the end token ignored, so every run does the same
work. Figures are plain data: medians, p90 and p99 of repeated runs after a warm-up.
"""

import contextlib
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepinfer.errors import ResourceError, UsageError
from deepinfer.runtime.engine import Engine
from deepinfer.runtime.llm import LLM
from deepinfer.runtime.model_runner import DECODE, LOGITS, PREFILL
from deepinfer.runtime.request import Request
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.scheduler_config import SchedulerConfig
from deepinfer.runtime.step_trace import StepTrace

_FIRST_TOKEN_ID = 3  # below are the special tokens of common tokenizers
_STARTUP_CODE = """
import sys, time
start = time.perf_counter()
import deepinfer.runtime
import torch
imported = time.perf_counter()
from deepinfer import LLM, SamplingParams
llm = LLM(sys.argv[1], num_threads=int(sys.argv[2]))
loaded = time.perf_counter()
llm.generate([[3, 4, 5]], SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
first = time.perf_counter()
import json
from deepinfer.peak_memory import peak_memory_bytes
print(json.dumps({
    "peak": peak_memory_bytes(),
    "import torch": imported - start,
    "other imports, open and load": loaded - imported,
    "first token": first - loaded,
    "parts": {name: milliseconds / 1e3 for name, _, milliseconds in llm._loaded.report.parts},
}))
"""


@dataclass(frozen=True)
class Workload:
    """What is run: one point of a measurement."""

    concurrency: int = 1  # requests that are in flight together
    input_len: int = 64  # prompt tokens of each
    output_len: int = 32  # tokens that each generates
    chunk_size: int | None = None  # token rows of a prefill step; None: the largest graph
    num_threads: int | None = None  # None: as loaded


@dataclass(frozen=True)
class Summary:
    """Median, 90th and 99th percentile, in seconds, of so many samples."""

    median: float
    p90: float
    p99: float
    count: int


def summarize(values: Sequence[float]) -> Summary:
    """Of at least one value; percentiles are those of the samples, not between them."""
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(np.ceil(share * len(ordered))) - 1)]

    return Summary(statistics.median(ordered), at(0.9), at(0.99), len(ordered))


def latency(llm: LLM, workload: Workload, repeats: int = 5) -> dict[str, Any]:
    """TTFT, ITL, TPOT and end-to-end time of `concurrency` requests that arrive together.

    TTFT: from arrival to the first token. ITL: between two tokens of a request. TPOT: a request's time after
    its first token, per further token. Raises UsageError for a workload the artifact cannot serve.
    """
    engine = _engine(llm, workload)
    samples: dict[str, list[float]] = {"ttft": [], "itl": [], "tpot": [], "e2e": []}
    steps: dict[str, list[float]] = {}
    for repeat in range(repeats + 1):
        with StepTrace(engine) as trace, _no_garbage_collection():
            timed = _run(engine, workload, repeat)
        if not repeat:  # the first run warms up
            continue
        for stamps in timed:
            arrival, *tokens = stamps
            samples["ttft"].append(tokens[0] - arrival)
            samples["itl"] += [later - earlier for earlier, later in zip(tokens, tokens[1:], strict=False)]
            samples["e2e"].append(tokens[-1] - arrival)
            if len(tokens) > 1:
                samples["tpot"].append((tokens[-1] - tokens[0]) / (len(tokens) - 1))
        for name, seconds in trace.seconds_per_step().items():
            steps.setdefault(name, []).extend(seconds)
    return {
        "workload": asdict(workload),
        "seconds": {name: asdict(summarize(values)) for name, values in samples.items() if values},
        "step_seconds": {name: statistics.fmean(values) for name, values in steps.items()},
    }


def throughput(llm: LLM, workload: Workload, num_requests: int, repeats: int = 3) -> dict[str, Any]:
    """Tokens per second of `num_requests` requests, of which `concurrency` hold cache at a time."""
    engine = _engine(llm, workload)
    rates: dict[str, list[float]] = {"output": [], "total": [], "requests": []}
    for repeat in range(repeats + 1):
        with _no_garbage_collection():
            start = time.perf_counter()
            _run(engine, replace(workload, concurrency=num_requests), repeat)
            seconds = time.perf_counter() - start
        if repeat:
            rates["output"].append(num_requests * workload.output_len / seconds)
            rates["total"].append(num_requests * (workload.input_len + workload.output_len) / seconds)
            rates["requests"].append(num_requests / seconds)
    return {
        "workload": {**asdict(workload), "num_requests": num_requests},
        "per_second": {name: statistics.median(values) for name, values in rates.items()},
        "preemptions": engine.scheduler.num_preemptions,
    }


def startup(artifact: Path, num_threads: int, repeats: int = 5) -> dict[str, Any]:
    """A fresh process from its start to the first token, and the parts of that time. Raises ResourceError."""
    totals, parts = [], []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-P", "-c", _STARTUP_CODE, str(artifact), str(num_threads)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ResourceError(f"a fresh process failed: {reason}", where=str(artifact))
        totals.append(time.perf_counter() - start)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        # the process ends after its first token: what is left of its life is start and end of the interpreter
        inside = sum(value for value in found.values() if isinstance(value, float))
        found["interpreter"] = totals[-1] - inside
        parts.append(found)
    parts, totals = parts[1:], totals[1:]  # the first finds cold file caches
    names = [name for name in parts[0] if name not in ("parts", "peak")]
    return {
        "seconds": asdict(summarize(totals)),
        "parts_seconds": {name: statistics.median(part[name] for part in parts) for name in names},
        "load_seconds": {
            name: statistics.median(part["parts"][name] for part in parts) for name in parts[0]["parts"]
        },
        "peak_memory_bytes": max((part["peak"] for part in parts if part["peak"]), default=None),
    }


def graphs(llm: LLM, repeats: int = 50) -> dict[str, Any]:
    """Seconds of every compiled graph by itself, over buffers as a step leaves them."""
    runner, limits = llm._runner, llm.limits
    found = {}
    with _no_garbage_collection():
        for phase, buckets in ((PREFILL, limits.prefill_buckets), (DECODE, limits.decode_buckets)):
            for bucket in buckets:
                _fill(llm, phase, bucket)
                calls = [_seconds(lambda p=phase, b=bucket: runner.replay(p, b)) for _ in range(repeats + 3)]
                found[f"{phase}-{bucket}"] = asdict(summarize(calls[3:]))
        for bucket in (rows for rows in limits.logits_buckets if rows <= limits.decode_buckets[-1]):
            rows = np.arange(bucket)  # of the last decode step
            calls = [_seconds(lambda r=rows: runner.logits_of_rows(r)) for _ in range(repeats + 3)]
            found[f"{LOGITS}-{bucket}"] = asdict(summarize(calls[3:]))
    return {"seconds": found}


def trace(llm: LLM, workload: Workload) -> list[dict[str, Any]]:
    """Events of one run in the Chrome trace format."""
    engine = _engine(llm, workload)
    _run(engine, workload, 0)
    with StepTrace(engine) as recorded:
        _run(engine, workload, 1)
    return recorded.chrome_events()


def sweep(workload: Workload, name: str, values: Iterable[int]) -> list[Workload]:
    """The same workload with one setting varied. Raises UsageError for a setting that there is not."""
    known = asdict(workload)
    if name not in known:
        raise UsageError(
            f"{_flag(name)!r} cannot be varied",
            where="--vary",
            action=f"one of {', '.join(map(_flag, known))}",
        )
    return [replace(workload, **{name: value}) for value in values]


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _engine(llm: LLM, workload: Workload) -> Engine:
    """A fresh engine over the loaded artifact. Raises UsageError for what it cannot serve."""
    limits = llm.limits
    for name, value in asdict(workload).items():
        if value is not None and value < 1:
            raise UsageError(f"{value} is below 1", where=f"--{_flag(name)}")
    if workload.input_len + workload.output_len > limits.max_model_len:
        raise UsageError(
            f"{workload.input_len} and {workload.output_len} tokens exceed the artifact's "
            f"{limits.max_model_len}",
            where="--input-len",
            action="lower --input-len or --output-len",
        )
    torch.set_num_threads(workload.num_threads or llm.num_threads)
    runner = llm._runner
    slots = min(workload.concurrency, llm._loaded.limits.num_slots - 1)
    runner.limits = replace(llm._loaded.limits, num_slots=slots + 1)
    return Engine(runner, SchedulerConfig(max_num_batched_tokens=workload.chunk_size))


def _run(engine: Engine, workload: Workload, seed: int) -> list[list[float]]:
    """Runs the requests; for each, when it arrived and when each of its tokens came."""
    numbers = np.random.default_rng(seed)
    vocab = engine.runner.limits.vocab_size
    params = SamplingParams(max_tokens=workload.output_len, temperature=0, ignore_eos=True)
    image = engine.runner.limits.image_token_id
    stamps: dict[str, list[float]] = {}
    for _ in range(workload.concurrency):
        prompt = numbers.integers(min(_FIRST_TOKEN_ID, vocab - 1), vocab, workload.input_len)
        prompt[prompt == image] -= 1
        request: Request = engine.add_request(prompt.tolist(), params)
        stamps[request.request_id] = [request.times["arrival"]]
    while engine.has_work:
        updated = engine.step()
        now = time.perf_counter()
        for request in updated:
            stamps[request.request_id].append(now)
    return list(stamps.values())


def _fill(llm: LLM, phase: str, bucket: int) -> None:
    """Leaves the buffers of a graph as full as a step of it can be."""
    most = llm._loaded.limits.num_slots - 1
    if phase == DECODE:
        workload = Workload(concurrency=min(bucket, most), input_len=1, output_len=2)
    else:
        workload = Workload(input_len=min(bucket, llm.limits.max_model_len - 1), output_len=1)
    _run(_engine(llm, workload), workload, 0)


def _seconds(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keeps the collector from running while a clock does."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
