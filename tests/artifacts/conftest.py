"""Fixtures of the artifact tests; puts `artifact_factory` beside them within reach of their imports."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import artifact_factory  # noqa: E402


@pytest.fixture
def fast_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip waiting for the disk where a test is not about durability."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A fresh directory in memory where there is one, for tests that write thousands of files."""
    memory = Path("/dev/shm")
    if not (memory.is_dir() and os.access(memory, os.W_OK)):
        yield tmp_path
        return
    directory = Path(tempfile.mkdtemp(prefix="deepinfer-test-", dir=memory))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def good_artifact(tmp_path: Path, fast_sync: None) -> Path:
    """The directory of a small valid artifact."""
    artifact_factory.build(tmp_path / "good.di")
    return tmp_path / "good.di"
