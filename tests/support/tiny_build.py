"""Builds of the tiny checkpoint for tests: real graphs once, then copies of them handed out in no time.

`stub_workers` replaces the program that a worker runs by one that copies a graph built before; processes,
files and errors between builder and worker stay as they are.
"""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from deepinfer import build_graphs, compile
from deepinfer.artifacts import BuildCache
from deepinfer.build_key import graph_key
from deepinfer.build_worker import Job
from deepinfer.compile import CompileResult, compile_model
from deepinfer.settings import CompileConfig

GRAPHS = ("prefill-8", "decode-1", "logits-1")
FLAGS = (
    "--precision=float32",
    "--decode-rows=1",
    "--prefill-tokens=8",
    "--max-num-seqs=2",
    "--max-model-len=64",
    "--jobs=1",
    "-q",
)
_STUB = Path(__file__).parent / "stub_worker.py"


def tiny_options(**changes: Any) -> CompileConfig:
    """Options under which the graphs are small; those of FLAGS."""
    return CompileConfig(
        **{
            "precision": "float32",
            "decode_rows": (1,),
            "prefill_tokens": (8,),
            "max_num_seqs": 2,
            "max_model_len": 64,
            "jobs": 1,
            **changes,
        }
    )


def build(model: Path, out: Path, cache: Path, **settings: Any) -> CompileResult:
    """Compile without a comparison; `options`, `force`, `progress` and `dump_dir` as for compile_model."""
    options = settings.pop("options", None) or tiny_options()
    return compile_model(model, out, options, cache_dir=cache, certify=False, **settings)


def jobs_of(model: Path, options: CompileConfig | None = None) -> dict[str, Job]:
    """The jobs of a build, by the name of their graph."""
    resolved = compile._resolve(model, options or tiny_options())
    jobs = [compile._job(resolved, spec, Path("unused"), None) for spec in resolved.specs]
    return {job.spec.name: job for job in jobs}


def key_of(job: Job) -> str:
    """The job's key in the build cache."""
    fields = msgspec.to_builtins(job)
    return graph_key({name: value for name, value in fields.items() if name not in build_graphs._PLACES})


def copy_cache(source: Path, target: Path, keys: list[str]) -> Path:
    """A cache of one's own with the op libraries and some graphs of another."""
    target.mkdir(mode=0o700, parents=True)
    shutil.copytree(source / "native", target / "native", ignore=shutil.ignore_patterns(".build-*"))
    (target / "native").chmod(0o700)
    there, own = BuildCache(source / "graphs"), BuildCache(target / "graphs")
    for key in keys:
        files = there.get(key)
        assert files is not None, "the graph has not been built"
        own.put(key, files)
    return target


def unpack_graphs(cache: Path, keys: dict[str, str], target: Path) -> Path:
    """A folder per graph with the files that its worker left, for the stub to copy."""
    for name, key in keys.items():
        files = BuildCache(cache / "graphs").get(key)
        assert files is not None, "the graph has not been built"
        (target / name).mkdir(parents=True)
        for file, data in files.items():
            (target / name / file).write_bytes(data)
    return target


def stub_command(graphs: Path, log: Path, **behaviour: Any) -> Callable[..., list[str]]:
    """What to put in place of `python_command`: see stub_worker.py for what `behaviour` may hold."""
    given = json.dumps({"graphs": str(graphs), "log": str(log), **behaviour})
    return lambda _module, job_file: [sys.executable, "-I", "-S", str(_STUB), given, job_file]


def processes_with(text: str) -> list[int]:
    """Processes of which the environment or the command line mentions `text`, this one excluded."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            content = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if state != "Z" and text.encode() in content:
            found.append(int(entry.name))
    return found


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Wait until `condition()` is true and return what it gave; fails the test after a long time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError(f"still not so after {seconds} seconds")


def forked(work: Callable[[], object]) -> int:
    """Start `work` in a child process; returns its id. It ends with 0, or with 1 after an exception."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return child


def kill(process: int) -> int:
    """Kill a child by SIGKILL, wait for it and return its status."""
    os.kill(process, signal.SIGKILL)
    return os.waitpid(process, 0)[1]


def tree(directory: Path) -> dict[str, bytes]:
    """Every file below a directory by its relative path."""
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in _files(directory)}


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in sorted(directory.rglob("*")) if path.is_file())
