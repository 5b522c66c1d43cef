"""Worker processes of a build: what they get to see, where they work, and that they end with the build.

A worker's environment is made, not inherited, so that no variable of the builder reaches the result. Its
work directory is one that a later build removes if this one is killed. Knows nothing about graphs.
"""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from deepinfer import process_guard
from deepinfer.artifacts import atomic
from deepinfer.artifacts.private import open_private_directory
from deepinfer.errors import BuildError

# What a worker needs in order to find Python, this package, torch's libraries and the compiler.
_KEPT = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "CXX",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONUSERBASE",
    "PYTHONNOUSERSITE",
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONPYCACHEPREFIX",
)
# One thread, one order of sets, one language of messages, whoever builds.
_FIXED = {"LC_ALL": "C", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "SOURCE_DATE_EPOCH": "0"}
_PLAIN_PATH = re.compile(r"[A-Za-z0-9/._+@%-]+")


def worker_environment(variables: Mapping[str, str], work_dir: Path) -> dict[str, str]:
    """The environment of a worker whose temporary files go below `work_dir`."""
    kept = {name: variables[name] for name in _KEPT if name in variables}
    return {**kept, **_FIXED, "TMPDIR": str(work_dir)}


def python_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of this package; nothing in the current directory is ever imported."""
    return [sys.executable, "-P", "-m", module, *arguments]


@contextlib.contextmanager
def work_directory(cache_dir: Path) -> Iterator[Path]:
    """A private directory for the time of a build, below `cache_dir`, and gone afterwards.

    Those that killed builds left behind are removed. Raises BuildError when it cannot be made.
    """
    root = _work_root(cache_dir)
    root_fd = open_private_directory(root, BuildError, create=True)
    assert root_fd is not None
    try:
        with _reported(root):
            atomic.remove_stale_wrappers(root_fd)
            name, wrapper_fd = atomic.create_wrapper(root_fd)
        try:
            yield root / name
        finally:
            atomic.remove_tree(root_fd, name)
            os.close(wrapper_fd)
    finally:
        os.close(root_fd)


def _work_root(cache_dir: Path) -> Path:
    root = cache_dir / "work"
    if _PLAIN_PATH.fullmatch(str(root)):
        return root
    # Inductor writes paths into command lines as they are, so a blank in one must not reach it
    return Path(tempfile.gettempdir()) / f"deepinfer-{os.geteuid()}"


@contextlib.contextmanager
def _reported(where: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BuildError(
            f"no work can be done there: {error.strerror or error}",
            where=str(error.filename or where),
            action="check the space and the permissions there, or name another cache directory",
        ) from error


class WorkerProcesses:
    """The worker processes that run now. All of them end with the context, or with this process."""

    def __init__(self) -> None:
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def __enter__(self) -> "WorkerProcesses":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, command: Sequence[str], work_dir: Path) -> tuple[int, str]:
        """Run a command to its end; returns its exit code (negative: a signal) and the end of its stderr.

        Raises BuildError when it cannot be started, or once the build has been stopped.
        """
        output = work_dir / "stderr.txt"
        with _reported(work_dir), output.open("wb") as stderr:
            process = self._start(command, work_dir, stderr.fileno())
        try:
            code = process.wait()
        finally:
            with self._lock:
                self._processes.discard(process)
            _end(process)
        return code, output.read_bytes()[-4096:].decode("utf-8", "replace")

    def _start(self, command: Sequence[str], work_dir: Path, stderr: int) -> subprocess.Popen[bytes]:
        guard = [sys.executable, "-I", "-S", process_guard.__file__]
        with self._lock:
            if self._stopped:
                raise BuildError("the build was stopped")
            process = subprocess.Popen(
                [*guard, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env=worker_environment(os.environ, work_dir),
                process_group=0,
            )
            self._processes.add(process)
        return process

    def stop(self) -> None:
        """Kill what runs and what it started, and let nothing new start."""
        with self._lock:
            self._stopped = True
            for process in self._processes:
                _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Close the guard's input, upon which it kills its process group."""
    assert process.stdin is not None
    process.stdin.close()
