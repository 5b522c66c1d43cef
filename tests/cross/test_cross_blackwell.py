"""The same model for the other architecture: its own machine code, complete, refused without such a card."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from card_build import (
    CROSS_BUILDS,
    GRAPHS,
    OPTIONS,
    architecture,
    loader_environment,
    machine_codes,
    open_with_every_symbol,
)
from tiny_build import tree

from deepinfer.artifacts import open_artifact
from deepinfer.compile import CompileResult, compile_model
from deepinfer.errors import ArtifactMismatchError
from deepinfer.runtime.loader import load_artifact

pytestmark = CROSS_BUILDS


@pytest.fixture(scope="module")
def build(
    golden_dir: Path, tmp_path_factory: pytest.TempPathFactory, new_cache: Callable[[Path], Path]
) -> CompileResult:
    base = tmp_path_factory.mktemp("blackwell")
    options = msgspec.structs.replace(OPTIONS, target="cuda:sm_100")
    return compile_model(golden_dir, base / "artifact", options, cache_dir=new_cache(base / "cache"))


def test_it_holds_machine_code_of_its_architecture_alone(build: CompileResult) -> None:
    with open_artifact(build.out_dir) as artifact:
        target = artifact.manifest.target
    assert (target.device, target.arch) == ("cuda", "sm_100")
    assert build.certified is None and "no graphics card" in build.explanation
    files = tree(build.out_dir)
    for name in GRAPHS:
        codes = list(machine_codes(files[f"graphs/{name}/model.so"]))
        assert codes and {architecture(code) for code in codes} == {(100, True)}
    kernels = [
        b"_sparse_attention_kernel",
        b"_linear_fp8_kernel",
        b"_linear_fp4_kernel",
        b"_index_scores_kernel",
    ]
    codes = list(machine_codes(files["graphs/decode-4/model.so"]))
    for kernel in kernels:
        assert any(kernel in code for code in codes), kernel


def test_every_symbol_is_found(build: CompileResult, driver_stand_in: Path) -> None:
    shared_objects = [build.out_dir / "graphs" / name / "model.so" for name in GRAPHS]
    open_with_every_symbol(shared_objects, loader_environment(driver_stand_in))


def test_it_is_refused_here(build: CompileResult) -> None:
    assert not torch.cuda.is_available()
    with pytest.raises(
        ArtifactMismatchError, match="built for cuda sm_100, torch finds no graphics card here"
    ):
        load_artifact(build.out_dir)
