"""The op library, which the sampler calls also where no artifact brings one."""

import pytest

from deepinfer.kernels import native


@pytest.fixture(scope="session", autouse=True)
def op_library() -> None:
    """Load this machine's library; an artifact built from the same sources brings the same bytes."""
    native.load_host_library()
