"""The tiny checkpoint, its graphs built once, and caches to spoil."""

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_build
from tiny_checkpoint import write_tiny_checkpoint

from deepinfer import build_graphs
from deepinfer.kernels import native


@pytest.fixture(scope="session")
def tiny_model(shared_dir: Path) -> Path:
    """A checkpoint with one window-only layer. Must not be changed."""
    target = shared_dir / "tiny-model"
    with (shared_dir / "tiny-model.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            write_tiny_checkpoint(target, window_only=True)
    return target


@pytest.fixture(scope="session")
def tiny_artifact(tiny_model: Path, shared_dir: Path, build_cache_dir: Path | None) -> Path:
    """The artifact of the tiny checkpoint, really compiled. Must not be changed."""
    target = shared_dir / "tiny-artifact"
    with (shared_dir / "tiny-artifact.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            cache = build_cache_dir or native.user_cache_dir().parent
            tiny_build.build(tiny_model, target, cache)
    return target


@pytest.fixture(scope="session")
def tiny_keys(tiny_model: Path) -> dict[str, str]:
    """The keys of the tiny checkpoint's graphs in a build cache."""
    return {name: tiny_build.key_of(job) for name, job in tiny_build.jobs_of(tiny_model).items()}


@pytest.fixture
def make_cache(
    tmp_path: Path, tiny_artifact: Path, tiny_keys: dict[str, str], build_cache_dir: Path | None
) -> Callable[..., Path]:
    """A function that makes a cache with the op libraries and the named graphs (all by default)."""
    source = build_cache_dir or native.user_cache_dir().parent

    def make(*names: str, at: str = "cache", every: bool = True) -> Path:
        chosen = names or (tuple(tiny_keys) if every else ())
        return tiny_build.copy_cache(source, tmp_path / at, [tiny_keys[name] for name in chosen])

    return make


@pytest.fixture
def built_graphs(
    tmp_path: Path, tiny_artifact: Path, tiny_keys: dict[str, str], build_cache_dir: Path | None
) -> Path:
    """A folder per graph with what its worker left."""
    source = build_cache_dir or native.user_cache_dir().parent
    return tiny_build.unpack_graphs(source, tiny_keys, tmp_path / "built")


@pytest.fixture
def stub_workers(
    tmp_path: Path, built_graphs: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Callable[[], list[str]]]:
    """A function that replaces workers by stubs; what it returns lists the graphs they were started for."""
    log = tmp_path / "started.txt"

    def replace(**behaviour: object) -> Callable[[], list[str]]:
        command = tiny_build.stub_command(built_graphs, log, **behaviour)
        monkeypatch.setattr(build_graphs, "python_command", command)
        log.write_text("")
        return lambda: log.read_text().split()

    return replace


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    """An empty directory for outputs, to see what a build leaves in it."""
    directory = tmp_path / "outputs"
    directory.mkdir()
    return directory
