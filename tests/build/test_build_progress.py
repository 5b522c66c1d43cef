"""What a build shows: one bar at a time, on stderr, when that is a terminal; the result alone on stdout."""

import fcntl
import json
import os
import pty
import re
import struct
import sys
import termios
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_build

from deepinfer import compile
from deepinfer.cli import compile as command
from deepinfer.errors import BuildError
from deepinfer.progress import Progress

Stubs = Callable[..., Callable[[], list[str]]]
Caches = Callable[..., Path]
LOUD = [flag for flag in tiny_build.FLAGS if flag != "-q"]


class Recorded(Progress):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, int]] = []
        self.units: dict[str, int] = {}
        self.notes: list[str] = []

    def start(self, stage: str, total: int) -> None:
        self.stages.append((stage, total))

    def advance(self, note: str = "", units: int = 1) -> None:
        stage = self.stages[-1][0]
        self.units[stage] = self.units.get(stage, 0) + units
        if note:
            self.notes.append(note)


def test_every_stage_reaches_its_end(
    tiny_model: Path, parent: Path, make_cache: Caches, stub_workers: Stubs
) -> None:
    stub_workers()
    progress = Recorded()
    cache = make_cache("decode-1")
    result = tiny_build.build(tiny_model, parent / "out", cache, progress=progress)
    size = (parent / "out" / "weights" / "model.safetensors").stat().st_size
    assert size > result.weights_bytes
    assert progress.stages == [("graphs", 3), ("weights", size)]
    assert progress.units == {"graphs": 3, "weights": size}
    assert sorted(progress.notes) == sorted(tiny_build.GRAPHS)


class _Interrupting(Progress):
    """Ctrl-C at the n-th message."""

    def __init__(self, at: int) -> None:
        self._left = at

    def start(self, stage: str, total: int) -> None:
        self.advance()

    def advance(self, note: str = "", units: int = 1) -> None:
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt


def test_an_interrupt_while_something_is_shown_leaves_nothing(
    tiny_model: Path, parent: Path, make_cache: Caches, stub_workers: Stubs
) -> None:
    stub_workers()
    cache = make_cache("prefill-8", "decode-1", "logits-1")
    for at in range(1, 12):
        with pytest.raises(KeyboardInterrupt):
            tiny_build.build(tiny_model, parent / "out", cache, progress=_Interrupting(at))
        assert list(parent.iterdir()) == []
        assert not list(cache.glob("work/*"))


def _on_a_terminal(arguments: list[str]) -> tuple[int, str, str]:
    """Run the command in a child with a terminal as its stderr: exit code, stdout, what the terminal got."""
    terminal, terminal_end = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    out_read, out_write = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(out_write, 1)
        os.dup2(terminal_end, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        os._exit(command.main(arguments))
    os.close(out_write)
    os.close(terminal_end)
    shown: list[bytes] = []
    reader = threading.Thread(target=_read_all, args=(terminal, shown))
    reader.start()
    with os.fdopen(out_read) as out:
        printed = out.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    reader.join()
    os.close(terminal)
    return code, printed, b"".join(shown).decode()


def _read_all(descriptor: int, pieces: list[bytes]) -> None:
    try:
        while piece := os.read(descriptor, 4096):
            pieces.append(piece)
    except OSError:  # the other end of a terminal was closed
        return


def test_a_terminal_gets_one_bar_at_a_time_and_stdout_the_result(
    tiny_model: Path,
    parent: Path,
    make_cache: Caches,
    stub_workers: Stubs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stub_workers(seconds=0.2)
    monkeypatch.setenv("DEEPINFER_CACHE", str(make_cache(every=False)))
    monkeypatch.setattr(compile, "certified_once", lambda *_, **__: (None, "not compared"))
    arguments = [str(tiny_model), "-o", str(parent / "out"), *LOUD]
    code, printed, shown = _on_a_terminal([*arguments, "--json"])
    assert code == 0
    assert json.loads(printed)["out_dir"] == str(parent / "out")
    assert "graphs:" in shown and "3/3" in shown and "weights:" in shown
    assert "\x1b[A" not in shown, "a second bar was drawn below the first"
    assert shown.rindex("graphs:") < shown.index("weights:")
    assert not re.sub(r"[^\r\n]*\r", "", shown).strip(), "something of a bar was left on the screen"
    code, _, shown = _on_a_terminal([*arguments, "--json", "--force", "-q"])
    assert (code, shown) == (0, "")


def test_a_file_gets_no_bar(
    tiny_model: Path,
    parent: Path,
    make_cache: Caches,
    stub_workers: Stubs,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    stub_workers()
    monkeypatch.setenv("DEEPINFER_CACHE", str(make_cache()))
    assert command.main([str(tiny_model), "-o", str(parent / "out"), *LOUD]) == 0
    printed = capfd.readouterr()
    assert printed.err == ""
    for graph in tiny_build.GRAPHS:
        assert re.search(rf"^graph +{graph} ", printed.out, re.MULTILINE)


def test_a_failure_is_told_once_the_bar_is_gone(
    tiny_model: Path,
    parent: Path,
    make_cache: Caches,
    stub_workers: Stubs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stub_workers(fail={"decode-1": "no luck"})
    monkeypatch.setenv("DEEPINFER_CACHE", str(make_cache(every=False)))
    code, printed, shown = _on_a_terminal([str(tiny_model), "-o", str(parent / "out"), *LOUD])
    assert (code, printed) == (BuildError.exit_code, "")
    last_line = shown.rstrip().rpartition("\r")[2].strip()
    assert last_line.startswith("[DI300] decode-1:") and last_line.endswith("no luck")
