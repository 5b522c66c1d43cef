"""The op library, built once into the user's cache, and the comparisons that kernel tests share."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import routes
import torch
from safetensors.torch import load_file

from deepinfer.kernels import native

if routes.INTERPRETED:
    pytest.importorskip("triton", reason="TRITON_INTERPRET=1 asks for Triton")
    import interpreter

    interpreter.patch_interpreter()


@pytest.fixture(scope="session", autouse=True)
def op_library() -> Path:
    """Path of the library for this machine, loaded; the cache makes every later run start at once."""
    return native.load_host_library()


@pytest.fixture(scope="session")
def golden_kernels(golden_dir: Path) -> dict[str, torch.Tensor]:
    """Input and output pairs of the vendor's own kernels."""
    return load_file(golden_dir / "golden_kernels.safetensors")


@pytest.fixture(scope="session")
def same_bytes() -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Assert equal shape, dtype and bytes; the first difference is named."""

    def check(got: torch.Tensor, want: torch.Tensor) -> None:
        assert got.shape == want.shape
        assert got.dtype == want.dtype
        size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
        differs = got.contiguous().view(size) != want.contiguous().view(size)
        if differs.any():
            index = tuple(differs.nonzero()[0].tolist())
            pytest.fail(f"{int(differs.sum())} elements differ, first {index}: {got[index]} != {want[index]}")

    return check


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """torch.set_num_threads, undone at the end of the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def golden_values(golden_dir: Path) -> dict[str, torch.Tensor]:
    """What the reference implementation computes inside the golden model, by layer."""
    return load_file(golden_dir / "golden_intermediates.safetensors")


@pytest.fixture(scope="session")
def golden_weights(golden_dir: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the golden checkpoint, as it is on disk."""
    parts = sorted(golden_dir.glob("model-*.safetensors"))
    return {name: tensor for part in parts for name, tensor in load_file(part).items()}
