"""A whole artifact for a card, made where there is none; `make cross` has what that needs."""

import subprocess
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

from deepinfer.artifacts import describe, open_artifact, read_certificate, render
from deepinfer.cli import diff as diff_command
from deepinfer.compile import CompileResult, compile_model
from deepinfer.errors import ArtifactMismatchError
from deepinfer.passes import toolchain
from deepinfer.runtime.loader import load_artifact

pytestmark = CROSS_BUILDS


def test_the_manifest_says_what_it_is_for(cross_build: CompileResult) -> None:
    with open_artifact(cross_build.out_dir) as artifact:
        manifest = artifact.manifest
    assert (manifest.target.device, manifest.target.arch) == ("cuda", "sm_90")
    assert manifest.target.isa in toolchain.ISA_LEVELS
    assert (
        manifest.toolchain.torch == str(torch.__version__) and "triton 3.7.1" in manifest.toolchain.compiler
    )
    assert tuple(sorted(graph.name for graph in manifest.graphs)) == GRAPHS


def test_nothing_has_run_and_that_is_said(cross_build: CompileResult) -> None:
    assert cross_build.certified is None and "no graphics card" in cross_build.explanation
    assert read_certificate(cross_build.out_dir, "eager") is None
    text = render(describe(cross_build.out_dir))
    assert "target      cuda sm_90" in text and "certificate none" in text


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_holds_the_machine_code_of_its_kernels(name: str, cross_files: dict[str, bytes]) -> None:
    codes = list(machine_codes(cross_files[f"graphs/{name}/model.so"]))
    kernels = {"logits-4": [b"_linear_kernel"]}.get(
        name, [b"_sparse_attention_kernel", b"_linear_fp8_kernel", b"_index_scores_kernel", b"_ring_write"]
    )
    for kernel in kernels:
        assert any(kernel in code for code in codes), kernel
    assert {architecture(code) for code in codes} == {(90, True)}
    assert f"graphs/{name}/model.json" not in cross_files  # no operation is looked up by name at run time


@pytest.mark.parametrize("name", ["decode-4", "prefill-16"])
def test_every_form_of_a_kernel_has_code_of_its_own(name: str, cross_files: dict[str, bytes]) -> None:
    """Layers call a kernel at several widths; one code for all of them would be wrong for most."""
    codes = set(machine_codes(cross_files[f"graphs/{name}/model.so"]))
    forms = {
        kernel: sum(kernel in code for code in codes) for kernel in (b"_linear_fp8_kernel", b"_rope_kernel")
    }
    assert min(forms.values()) > 1, forms
    assert len(codes) > 60


def test_no_path_of_the_builder_is_in_the_files(
    cross_build: CompileResult, cross_files: dict[str, bytes]
) -> None:
    for place in (cross_build.out_dir.parent, toolchain.TORCH_DIR, Path.cwd(), Path.home()):
        found = [path for path, content in cross_files.items() if str(place).encode() in content]
        assert not found, (place, found)


@pytest.mark.parametrize("name", GRAPHS)
def test_every_symbol_is_found_in_the_libraries_of_torch(
    name: str, cross_build: CompileResult, driver_stand_in: Path
) -> None:
    shared_object = cross_build.out_dir / "graphs" / name / "model.so"
    environment = loader_environment(driver_stand_in)
    linked = subprocess.run(["ldd", "-r", shared_object], capture_output=True, text=True, env=environment)
    assert linked.returncode == 0, linked.stderr
    faults = [line for line in (linked.stdout + linked.stderr).splitlines() if "undefined" in line]
    assert not faults and "not found" not in linked.stdout
    open_with_every_symbol([shared_object], environment)


def test_only_known_functions_of_the_driver_are_called(cross_build: CompileResult) -> None:
    shared_object = cross_build.out_dir / "graphs" / "decode-4" / "model.so"
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", shared_object], capture_output=True, text=True, check=True
    )
    names = {line.split()[-1] for line in listed.stdout.splitlines()}
    called = {name for name in names if name.startswith("cu") and not name.startswith("cuda")}
    assert called <= set(toolchain.DRIVER_CALLS) and "cuLaunchKernel" in called


def test_it_is_refused_here_before_anything_of_it_runs(
    cross_build: CompileResult, golden_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        ArtifactMismatchError, match="built for cuda sm_90, torch finds no graphics card here"
    ):
        load_artifact(cross_build.out_dir)
    assert diff_command.main([str(cross_build.out_dir), "--model", str(golden_dir), "-q"]) == 4
    assert "no graphics card" in capsys.readouterr().err
    assert read_certificate(cross_build.out_dir, "eager") is None


def test_a_second_build_gives_the_same_bytes(
    cross_build: CompileResult,
    cross_files: dict[str, bytes],
    golden_dir: Path,
    tmp_path: Path,
    new_cache: Callable[[Path], Path],
) -> None:
    """In another folder, without what the first one kept, with graphs built side by side."""
    options = msgspec.structs.replace(OPTIONS, jobs=2)
    again = compile_model(golden_dir, tmp_path / "again", options, cache_dir=new_cache(tmp_path / "cache"))
    assert again.artifact_id == cross_build.artifact_id
    assert not any(graph.from_cache for graph in again.graphs)
    assert tree(again.out_dir) == cross_files
