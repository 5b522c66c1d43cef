"""Workers end with the build, whatever ends it, and so does everything that they started."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_build
from tiny_build import forked, processes_with, wait_for

from deepinfer import build_graphs
from deepinfer.artifacts import open_artifact
from deepinfer.build_process import WorkerProcesses, worker_environment
from deepinfer.cli import compile as command
from deepinfer.errors import BuildError

Stubs = Callable[..., Callable[[], list[str]]]
Caches = Callable[..., Path]

START_A_CHILD = "import subprocess, sys; subprocess.Popen(['sleep', '1000'], stdin=subprocess.DEVNULL)"


@pytest.fixture
def run(tmp_path: Path) -> Callable[[str], tuple[int, str]]:
    """A function that runs Python code as a worker does."""

    def run_code(code: str) -> tuple[int, str]:
        with WorkerProcesses() as running:
            return running.run([sys.executable, "-I", "-S", "-c", code], tmp_path)

    return run_code


@pytest.mark.parametrize("code", [0, 1, 70, 255])
def test_an_exit_code_is_handed_on(code: int, run: Callable[[str], tuple[int, str]]) -> None:
    text = f"import sys; print('x' * 5000, 'end', file=sys.stderr); sys.exit({code})"
    found, output = run(text)
    assert found == code
    assert output.endswith("end\n") and len(output) <= 4096


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGABRT", "SIGTERM"])
def test_a_signal_is_handed_on(name: str, run: Callable[[str], tuple[int, str]]) -> None:
    number = int(getattr(signal, name))
    assert run(f"import os; os.kill(os.getpid(), {number})")[0] == -number


def test_what_a_worker_leaves_running_ends_with_it(
    tmp_path: Path, run: Callable[[str], tuple[int, str]]
) -> None:
    assert run(f"{START_A_CHILD}; sys.exit(3)")[0] == 3
    wait_for(lambda: not processes_with(str(tmp_path)))


def test_a_command_that_cannot_be_started_is_named(tmp_path: Path) -> None:
    with WorkerProcesses() as running, pytest.raises(BuildError, match="absent"):
        running.run(["true"], tmp_path / "absent")


def test_stopping_ends_workers_and_their_children_and_starts_no_more(tmp_path: Path) -> None:
    running, codes = WorkerProcesses(), []
    code = f"{START_A_CHILD}; import time; time.sleep(1000)"
    arguments = [sys.executable, "-I", "-S", "-c", code]
    thread = threading.Thread(target=lambda: codes.append(running.run(arguments, tmp_path)[0]))
    thread.start()
    wait_for(lambda: len(processes_with(str(tmp_path))) == 3)
    running.stop()
    thread.join()
    assert codes == [-signal.SIGKILL]
    wait_for(lambda: not processes_with(str(tmp_path)))
    with pytest.raises(BuildError, match="stopped"):
        running.run(["true"], tmp_path)


def test_a_workers_environment_is_made_and_not_inherited(tmp_path: Path) -> None:
    builder = {
        "PATH": "/bin",
        "CXX": "clang++",
        "TORCHINDUCTOR_FREEZING": "1",
        "TORCH_LOGS": "all",
        "CPATH": "include",
        "PYTHONHASHSEED": "7",
        "PYTHONOPTIMIZE": "2",
        "OMP_NUM_THREADS": "64",
        "TMPDIR": "elsewhere",
        "LC_ALL": "de_DE.UTF-8",
        "DEEPINFER_DUMP": "dump",
    }
    assert worker_environment(builder, tmp_path) == {
        "PATH": "/bin",
        "CXX": "clang++",
        "LC_ALL": "C",
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "SOURCE_DATE_EPOCH": "0",
        "TMPDIR": str(tmp_path),
    }


def test_a_killed_worker_fails_the_build_with_the_reason(
    tiny_model: Path, parent: Path, make_cache: Caches, stub_workers: Stubs
) -> None:
    cache = make_cache("decode-1")
    started = stub_workers(hang=["logits-1"])

    def kill_the_worker() -> None:
        wait_for(lambda: "logits-1" in started())
        (worker,) = [p for p in processes_with(str(cache)) if _is_stub(p)]
        os.kill(worker, signal.SIGKILL)

    thread = threading.Thread(target=kill_the_worker)
    thread.start()
    with pytest.raises(BuildError, match=r"logits-1: .*signal 9.*fewer --jobs"):
        tiny_build.build(tiny_model, parent / "out", cache)
    thread.join()
    _assert_nothing_left(parent, cache)


def _is_stub(process: int) -> bool:
    words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    return any(word.endswith(b"stub_worker.py") for word in words[:5]) and not any(
        word.endswith(b"process_guard.py") for word in words
    )


def _assert_nothing_left(parent: Path, cache: Path) -> None:
    wait_for(lambda: not processes_with(str(cache)))
    assert list(parent.iterdir()) == []
    assert list((cache / "work").iterdir()) == []


def test_a_failing_worker_stops_the_others(
    tiny_model: Path, parent: Path, make_cache: Caches, stub_workers: Stubs
) -> None:
    cache = make_cache(every=False)
    started = stub_workers(hang=["prefill-8", "logits-1"], fail={"decode-1": "first line\nlast line"})
    with pytest.raises(BuildError, match="decode-1: .*exit code 3: last line"):
        tiny_build.build(tiny_model, parent / "out", cache, options=tiny_build.tiny_options(jobs=2))
    assert "decode-1" in started()
    _assert_nothing_left(parent, cache)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_command_told_to_end_says_so_and_leaves_nothing(
    number: int,
    code: int,
    tiny_model: Path,
    parent: Path,
    make_cache: Caches,
    stub_workers: Stubs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = make_cache(every=False)
    started = stub_workers(hang=["decode-1"])
    monkeypatch.setenv("DEEPINFER_CACHE", str(cache))
    arguments = [str(tiny_model), "-o", str(parent / "out"), *tiny_build.FLAGS]
    child = os.fork()
    if child == 0:
        try:
            os._exit(command.main(arguments))
        except SystemExit as end:
            os._exit(int(end.code or 0))
    wait_for(lambda: "decode-1" in started())
    os.kill(child, number)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code
    _assert_nothing_left(parent, cache)
    stub_workers()
    result = tiny_build.build(tiny_model, parent / "out", cache)
    assert {g.name for g in result.graphs if g.from_cache} == {"prefill-8"}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "terminate"])
def test_a_builder_that_dies_takes_its_workers_along(
    number: int, tiny_model: Path, parent: Path, make_cache: Caches, stub_workers: Stubs
) -> None:
    cache = make_cache(every=False)
    started = stub_workers(hang=["prefill-8", "decode-1"])
    options = tiny_build.tiny_options(jobs=2)
    builder = forked(lambda: tiny_build.build(tiny_model, parent / "out", cache, options=options))
    wait_for(lambda: len(started()) == 2)
    assert len(processes_with(str(cache))) >= 4
    os.kill(builder, number)
    os.waitpid(builder, 0)
    wait_for(lambda: not processes_with(str(cache)))
    assert not (parent / "out").exists()
    _assert_next_build_cleans(tiny_model, parent, cache, stub_workers)


def _assert_next_build_cleans(model: Path, parent: Path, cache: Path, stub_workers: Stubs) -> None:
    assert len(list((cache / "work").iterdir())) == 1
    stub_workers()
    result = tiny_build.build(model, parent / "out", cache)
    with open_artifact(parent / "out") as artifact:
        assert artifact.artifact_id == result.artifact_id
    assert [path.name for path in parent.iterdir()] == ["out"]
    assert list((cache / "work").iterdir()) == []


def test_the_compilers_of_a_killed_build_end_too(
    tiny_model: Path,
    parent: Path,
    tmp_path: Path,
    make_cache: Caches,
    stub_workers: Stubs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a real worker, killed while g++ runs below it; its temporary files are where they get removed."""
    real = build_graphs.python_command
    cache = make_cache("prefill-8", "decode-1")
    tmp = tmp_path / "tmp"
    tmp.mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp))
    builder = forked(lambda: tiny_build.build(tiny_model, parent / "out", cache))
    wait_for(lambda: any(_is_compiler(process) for process in processes_with(str(cache))), seconds=300)
    tiny_build.kill(builder)
    wait_for(lambda: not processes_with(str(cache)))
    assert list(tmp.iterdir()) == []
    assert build_graphs.python_command is real
    _assert_next_build_cleans(tiny_model, parent, cache, stub_workers)


def _is_compiler(process: int) -> bool:
    try:
        return "cc1plus" in Path(f"/proc/{process}/comm").read_text()
    except OSError:
        return False


def test_the_guard_imports_nothing_that_is_installed(tmp_path: Path) -> None:
    """It runs isolated and without site-packages, so that it starts in milliseconds."""
    guard = Path(build_graphs.__file__).with_name("process_guard.py")
    code = f"import runpy, sys; runpy.run_path({str(guard)!r}); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    )
    assert not {"deepinfer", "torch", "numpy", "site"} & set(done.stdout.split())
