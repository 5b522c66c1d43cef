"""Builds the graphs of an artifact: from the build cache where it can, else in parallel worker processes."""

import contextlib
import json
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import msgspec

from deepinfer import errors
from deepinfer.artifacts import BuildCache
from deepinfer.build_key import graph_key
from deepinfer.build_process import WorkerProcesses, python_command, work_directory
from deepinfer.build_worker import ARTIFACT_FILES, PASS_TEXTS_FILE, Job
from deepinfer.errors import BuildError, DeepInferError
from deepinfer.progress import Progress

# what a graph's files do not depend on
_PLACES = ("cache_dir", "dump_dir", "work_dir")
_FACTS = "result.json"
_MAX_REASON_CHARS = 300


@dataclass(frozen=True)
class BuiltGraph:
    """One graph of a build: its files by name, and what there is to tell about it.

    `pass_texts` is for a sidecar: the graph's text after every pass, packed, or None if it was not kept.
    """

    name: str
    files: dict[str, bytes]
    pass_texts: bytes | None
    nodes_captured: int
    nodes: int
    rewrites: int
    seconds: float
    from_cache: bool


def build_graphs(jobs: Sequence[Job], cache_dir: Path, workers: int, progress: Progress) -> list[BuiltGraph]:
    """Build every job, at most `workers` at a time, and return the graphs in the order of the jobs.

    A finished graph goes to the cache below `cache_dir` at once, so an interrupted build goes on where it
    stopped. Raises BuildError (and its subclasses) for the first graph that fails; the others are stopped.
    """
    cache = BuildCache(cache_dir / "graphs")
    progress.start("graphs", len(jobs))
    with (
        work_directory(cache_dir) as work_dir,
        WorkerProcesses() as running,
        ThreadPoolExecutor(max_workers=workers) as pool,
    ):
        futures = [pool.submit(_build_one, job, cache, work_dir, running, progress) for job in jobs]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
            for future in futures:
                if future.done():
                    future.result()
        except BaseException:
            for future in futures:
                future.cancel()
            running.stop()
            raise
    return [future.result() for future in futures]


def _build_one(
    job: Job, cache: BuildCache, build_dir: Path, running: WorkerProcesses, progress: Progress
) -> BuiltGraph:
    started = time.perf_counter()
    fields = msgspec.to_builtins(job)
    key = graph_key({name: value for name, value in fields.items() if name not in _PLACES})
    # a dump is asked for to be read, so it is made even where the files are at hand
    files = cache.get(key) if job.dump_dir is None else None
    from_cache = files is not None
    if files is None:
        files = _run_worker(job, build_dir / job.spec.name, running)
        cache.put(key, files)
    facts = json.loads(files[_FACTS])
    progress.advance(job.spec.name)
    return BuiltGraph(
        name=job.spec.name,
        files={name: data for name, data in files.items() if name in ARTIFACT_FILES},
        pass_texts=files.get(PASS_TEXTS_FILE),
        seconds=time.perf_counter() - started,
        from_cache=from_cache,
        **facts,
    )


def _run_worker(job: Job, work_dir: Path, running: WorkerProcesses) -> dict[str, bytes]:
    job_file = work_dir / "job.json"
    try:
        work_dir.mkdir()
        job_file.write_bytes(msgspec.json.encode(msgspec.structs.replace(job, work_dir=str(work_dir))))
        code, output = running.run(python_command("deepinfer.build_worker", str(job_file)), work_dir)
        if code or not (work_dir / _FACTS).exists():
            raise _worker_error(job, work_dir, code, output)
        names = [name for name in (*ARTIFACT_FILES, PASS_TEXTS_FILE, _FACTS) if (work_dir / name).exists()]
        return {name: (work_dir / name).read_bytes() for name in names}
    except OSError as error:
        raise BuildError(
            f"the work directory cannot be used: {error.strerror or error}",
            where=f"{job.spec.name}: {error.filename or work_dir}",
            action="check the space and the permissions there, or name another cache directory",
        ) from error


def _worker_error(job: Job, work_dir: Path, code: int, output: str) -> DeepInferError:
    with contextlib.suppress(OSError, ValueError, KeyError):
        fault = json.loads((work_dir / "error.json").read_text())
        kind = getattr(errors, fault["kind"], BuildError)
        place = fault["where"] or ""
        if job.spec.name not in place:
            place = f"{job.spec.name}: {place}".removesuffix(": ")
        return kind(fault["what"], where=place, action=fault["action"])
    if code < 0:
        return BuildError(
            f"the worker process was killed by signal {-code}",
            where=job.spec.name,
            action="if memory ran out, build with fewer --jobs; what was finished is not built again",
        )
    lines = output.strip().splitlines()
    detail = f": {lines[-1][:_MAX_REASON_CHARS]}" if lines else ""
    return BuildError(f"the worker process ended with exit code {code}{detail}", where=job.spec.name)
