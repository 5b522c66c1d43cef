"""The C++ compiler: missing, or failing at one of its tasks."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_build

from deepinfer.cli import compile as command
from deepinfer.errors import LoweringError

Caches = Callable[..., Path]

# Says the same of itself as the real one, so that caches are as good as before; fails on what this project
# itself compiles, the op library and the code of a graph.
FAILING = """#!/bin/sh
case " $* " in
  *" -c wrapper.cpp "*|*" -fvisibility=hidden "*) echo "virtual memory exhausted" >&2; exit 4 ;;
esac
exec {real} "$@"
"""


@pytest.fixture
def failing_compiler(tmp_path: Path) -> Path:
    """A folder with a g++ that fails."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "g++"
    program.write_text(FAILING.format(real=shutil.which("g++")))
    program.chmod(0o755)
    return folder


def test_without_a_compiler_nothing_is_built(
    tiny_model: Path,
    parent: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("DEEPINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command.main([str(tiny_model), "-o", str(parent / "out"), *tiny_build.FLAGS]) == 3
    message = capsys.readouterr().err
    assert message.startswith("[DI303]") and "g++ was not found" in message and "install g++" in message
    assert list(parent.iterdir()) == []


def test_a_compiler_that_fails_on_the_op_library_is_quoted(
    tiny_model: Path,
    parent: Path,
    tmp_path: Path,
    failing_compiler: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("DEEPINFER_CACHE", str(cache))
    monkeypatch.setenv("PATH", str(failing_compiler), prepend=":")
    assert command.main([str(tiny_model), "-o", str(parent / "out"), *tiny_build.FLAGS]) == 3
    message = capsys.readouterr().err
    assert message.startswith("[DI303]") and "virtual memory exhausted" in message
    assert "op library" in message and message.count("\n") == 1
    assert list(parent.iterdir()) == []
    assert [path.name for path in (cache / "native").iterdir()] == ["build.lock"]


def test_a_compiler_that_fails_on_a_graph_is_quoted(
    tiny_model: Path,
    parent: Path,
    make_cache: Caches,
    failing_compiler: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a real worker: its error arrives with its class, its place and the compiler's words."""
    cache = make_cache("prefill-8", "decode-1")
    monkeypatch.setenv("CXX", str(failing_compiler / "g++"))
    with pytest.raises(LoweringError, match="virtual memory exhausted") as caught:
        tiny_build.build(tiny_model, parent / "out", cache)
    assert "logits-1" in str(caught.value)
    assert list(parent.iterdir()) == []
    assert list((cache / "work").iterdir()) == []
