"""Fixtures of the artifact tests; puts `artifact_factory` beside them within reach of their imports."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import artifact_factory  # noqa: E402


@pytest.fixture
def fast_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip waiting for the disk where a test is not about durability."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


@pytest.fixture
def good_artifact(tmp_path: Path, fast_sync: None) -> Path:
    """The directory of a small valid artifact."""
    artifact_factory.build(tmp_path / "good.di")
    return tmp_path / "good.di"
