"""Shared fixtures: golden data, quiet threads."""

from pathlib import Path

import pytest

GOLDEN_DATA = Path(__file__).parent / "golden_data"


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """The checkpoint of the tiny golden model, in the released on-disk layout, with its reference results."""
    return GOLDEN_DATA / "v41-tiny"
