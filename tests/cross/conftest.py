"""An artifact for a graphics card, built once for all tests here, without a card."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from card_build import OPTIONS
from tiny_build import tree

from deepinfer.compile import CompileResult, compile_model
from deepinfer.kernels import native
from deepinfer.passes import toolchain


@pytest.fixture(scope="session")
def new_cache(build_cache_dir: Path | None) -> Callable[[Path], Path]:
    """Makes a build cache without graphs; the op library of the host is compiled once for all."""
    common = native.user_cache_dir() if build_cache_dir is None else build_cache_dir / "native"

    def make(path: Path) -> Path:
        native.build_op_library(native.host_isa(), common)
        path.mkdir(mode=0o700)
        shutil.copytree(common, path / "native")
        return path

    return make


@pytest.fixture(scope="session")
def cross_build(
    golden_dir: Path, tmp_path_factory: pytest.TempPathFactory, new_cache: Callable[[Path], Path]
) -> CompileResult:
    """The golden model for sm_90. Must not be changed."""
    base = tmp_path_factory.mktemp("cross")
    return compile_model(golden_dir, base / "artifact", OPTIONS, cache_dir=new_cache(base / "cache"))


@pytest.fixture(scope="session")
def cross_files(cross_build: CompileResult) -> dict[str, bytes]:
    """Its files by relative path."""
    return tree(cross_build.out_dir)


@pytest.fixture(scope="session")
def driver_stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a library of the driver's name, its symbols and nothing in them."""
    folder = tmp_path_factory.mktemp("driver")
    toolchain._driver_stub(folder)
    (folder / "driver" / "libcuda.so").rename(folder / "libcuda.so.1")
    return folder
