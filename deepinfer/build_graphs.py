"""Builds the graphs of an artifact: from the build cache where it can, else in parallel worker processes."""

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import msgspec

from deepinfer import errors
from deepinfer.artifacts import BuildCache
from deepinfer.build_key import graph_key
from deepinfer.build_worker import ARTIFACT_FILES, Job
from deepinfer.errors import BuildError, DeepInferError
from deepinfer.progress import Progress

# what a graph's files do not depend on
_PLACES = ("cache_dir", "dump_dir", "work_dir")
_FACTS = "result.json"


@dataclass(frozen=True)
class BuiltGraph:
    """One graph of a build: its files by name, and what there is to tell about it."""

    name: str
    files: dict[str, bytes]
    nodes_captured: int
    nodes: int
    rewrites: int
    seconds: float
    from_cache: bool


def build_graphs(
    jobs: Sequence[Job], cache: BuildCache, workers: int, progress: Progress
) -> list[BuiltGraph]:
    """Build every job, at most `workers` at a time, and return the graphs in the order of the jobs.

    A finished graph goes to the cache at once, so an interrupted build goes on where it stopped. Raises
    BuildError (and its subclasses) for the first graph that fails; the others are stopped.
    """
    progress.start("graphs", len(jobs))
    with _Workers() as running, ThreadPoolExecutor(max_workers=workers) as pool:
        futures = [pool.submit(_build_one, job, cache, running, progress) for job in jobs]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
            failed = [future for future in futures if future.done() and future.exception()]
            if failed:
                raise failed[0].exception() or AssertionError
        except BaseException:
            running.stop()
            for future in futures:
                future.cancel()
            raise
    return [future.result() for future in futures]


def _build_one(job: Job, cache: BuildCache, running: "_Workers", progress: Progress) -> BuiltGraph:
    started = time.perf_counter()
    fields = msgspec.to_builtins(job)
    key = graph_key({name: value for name, value in fields.items() if name not in _PLACES})
    # a dump is asked for to be read, so it is made even where the files are at hand
    files = cache.get(key) if job.dump_dir is None else None
    from_cache = files is not None
    if files is None:
        with tempfile.TemporaryDirectory(prefix="deepinfer-build-") as work_dir:
            files = _run_worker(msgspec.structs.replace(job, work_dir=work_dir), running)
        cache.put(key, files)
    facts = json.loads(files[_FACTS])
    progress.advance(job.spec.name)
    return BuiltGraph(
        name=job.spec.name,
        files={name: data for name, data in files.items() if name != _FACTS},
        seconds=time.perf_counter() - started,
        from_cache=from_cache,
        **facts,
    )


def _run_worker(job: Job, running: "_Workers") -> dict[str, bytes]:
    work_dir = Path(job.work_dir)
    job_file = work_dir / "job.json"
    job_file.write_bytes(msgspec.json.encode(job))
    with running.start([sys.executable, "-m", "deepinfer.build_worker", str(job_file)]) as process:
        _, output = process.communicate()
    if process.returncode or not (work_dir / _FACTS).exists():
        raise _worker_error(job, work_dir, process.returncode, output)
    return {
        name: (work_dir / name).read_bytes()
        for name in (*ARTIFACT_FILES, _FACTS)
        if (work_dir / name).exists()
    }


def _worker_error(job: Job, work_dir: Path, code: int, output: bytes) -> DeepInferError:
    with contextlib.suppress(OSError, ValueError, KeyError):
        fault = json.loads((work_dir / "error.json").read_text())
        kind = getattr(errors, fault["kind"], BuildError)
        return kind(fault["what"], where=fault["where"] or job.spec.name, action=fault["action"])
    lines = output.decode("utf-8", "replace").strip().splitlines()
    reason = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    detail = f": {lines[-1][:300]}" if lines else ""
    return BuildError(f"the worker process ended with {reason}{detail}", where=job.spec.name)


class _Workers:
    """The worker processes that run now, so that all of them can be stopped."""

    def __init__(self) -> None:
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def __enter__(self) -> "_Workers":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @contextlib.contextmanager
    def start(self, command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
        """Run a command within the block; raises BuildError once the build has been stopped."""
        with self._lock:
            if self._stopped:
                raise BuildError("the build was stopped")
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
            self._processes.add(process)
        try:
            yield process
        finally:
            with self._lock:
                self._processes.discard(process)

    def stop(self) -> None:
        """Kill what runs, and let nothing new start."""
        with self._lock:
            self._stopped = True
            for process in self._processes:
                process.kill()
