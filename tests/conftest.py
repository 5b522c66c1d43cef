"""Shared fixtures: golden data, quiet threads, a trust store of the tests' own, and artifacts built once."""

import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

# Several test processes share the cores, so each keeps to one thread and none spins while it waits.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A run that was started in the background ignores interrupts, and so would the commands that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

GOLDEN_DATA = Path(__file__).parent / "golden_data"


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """The checkpoint of the tiny golden model, in the released on-disk layout, with its reference results."""
    return GOLDEN_DATA / "v41-tiny"


@pytest.fixture(scope="session")
def v4_golden_dir() -> Path:
    """The same of the generation before: a pure oracle of structure, unquantised, in float32."""
    return GOLDEN_DATA / "v4-tiny"


@pytest.fixture(scope="session")
def shared_dir(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A directory that all test processes of this run share."""
    base = tmp_path_factory.getbasetemp()
    return base if worker_id == "master" else base.parent


@pytest.fixture(scope="session", autouse=True)
def own_trust_store(shared_dir: Path) -> Iterator[None]:
    """Keep the tests out of the user's list of trusted artifacts."""
    before = os.environ.get("XDG_CONFIG_HOME")
    os.environ["XDG_CONFIG_HOME"] = str(shared_dir / "config")
    yield
    if before is None:
        del os.environ["XDG_CONFIG_HOME"]
    else:
        os.environ["XDG_CONFIG_HOME"] = before


@pytest.fixture(scope="session")
def build_cache_dir() -> Path | None:
    """Where finished graphs are kept; None is the user's own cache."""
    return Path(os.environ["DEEPINFER_CACHE"]) if "DEEPINFER_CACHE" in os.environ else None


def _built_once(golden_dir: Path, shared_dir: Path, precision: str, cache_dir: Path | None) -> Path:
    from deepinfer.compile import compile_model
    from deepinfer.settings import CompileConfig

    target = shared_dir / f"artifact-{precision}"
    with (shared_dir / f"artifact-{precision}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            options = CompileConfig(precision=precision, decode_rows=(4,), prefill_tokens=(16,))
            compile_model(golden_dir, target, options, cache_dir=cache_dir, certify=False)
    return target


@pytest.fixture(scope="session")
def float32_artifact(golden_dir: Path, shared_dir: Path, build_cache_dir: Path | None) -> Path:
    """The golden model compiled in float32 precision, decode-4 and prefill-16. Must not be changed."""
    return _built_once(golden_dir, shared_dir, "float32", build_cache_dir)


@pytest.fixture(scope="session")
def native_artifact(golden_dir: Path, shared_dir: Path, build_cache_dir: Path | None) -> Path:
    """The golden model compiled with default settings in native precision. Must not be changed."""
    return _built_once(golden_dir, shared_dir, "native", build_cache_dir)
