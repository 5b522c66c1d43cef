"""Operations as machine code in an artifact: bytes, the table, what is refused. Nothing runs."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from model_dirs import release_config
from v4_checkpoint import quantised_config

from deepinfer import gpu_kernels
from deepinfer.artifacts import TrustStore, open_artifact, read_report, render
from deepinfer.artifacts.inspect import describe
from deepinfer.cli.compile import main as compile_main
from deepinfer.errors import (
    ArtifactCorruptError,
    ArtifactFormatError,
    ArtifactMismatchError,
    SettingsError,
    UsageError,
)
from deepinfer.gpu_kernels import compile_kernels, model_calls
from deepinfer.graphs.config import parse_config
from deepinfer.kernels import OPS, moe_gate, rms_norm
from deepinfer.kernels.cuda import nvrtc
from deepinfer.kernels.signature import CallSignature
from deepinfer.runtime.loader import load_artifact
from deepinfer.settings import CompileConfig

pytest.importorskip("triton")
compiles = pytest.mark.skipif(not nvrtc.is_available(), reason="needs nvidia-cuda-nvrtc")
CARD = CompileConfig(target="cuda:sm_90")
V4_TINY = Path(__file__).parents[1] / "golden_data" / "v4-tiny"
V41_TINY = Path(__file__).parents[2] / "examples" / "v41-tiny"


@pytest.fixture(scope="module")
def config_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model") / "release.json"
    path.write_text(json.dumps(release_config()))
    return path


@pytest.fixture
def two_calls(monkeypatch):
    """A model that calls two operations."""
    calls = [CallSignature.of(op, op.make_inputs(2, torch.bfloat16, 0)) for op in (rms_norm, moe_gate)]
    monkeypatch.setattr(gpu_kernels, "model_calls", lambda config, options: calls)


@pytest.fixture
def artifact(two_calls, config_file, tmp_path) -> Path:
    compile_kernels(config_file, tmp_path / "k.di", CARD, trust_store=TrustStore(tmp_path / "trust"))
    return tmp_path / "k.di"


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@compiles
def test_every_kernel_has_its_machine_code_its_texts_and_its_resources(artifact):
    with open_artifact(artifact) as opened:
        table = opened.kernels
        assert opened.manifest.target.arch == "sm_90" and opened.manifest.graphs == ()
    assert [(entry.op, entry.kernel, entry.language, entry.chosen) for entry in table.kernels] == [
        ("rms_norm", "rms_norm_kernel", "triton", True),
        ("moe_gate", "linear_kernel", "triton", False),
        ("moe_gate", "route_kernel", "triton", False),
        ("moe_gate", "moe_gate_logits", "cuda", True),
        ("moe_gate", "moe_gate_route", "cuda", True),
    ]
    for entry in table.kernels:
        files = {path.suffix: path for path in artifact.glob(f"native/{entry.files}.*")}
        wanted = {".cubin", ".ptx"} | ({".ttir", ".ttgir"} if entry.language == "triton" else set())
        assert set(files) == wanted
        assert files[".cubin"].read_bytes()[:4] == b"\x7fELF"
        assert entry.kernel in files[".ptx"].read_text() and ".target sm_90a" in files[".ptx"].read_text()
        assert 0 < entry.registers <= 255 and entry.spill_bytes == 0
    assert table.kernels[0].form["SIZE"] == "128" and table.kernels[0].form["x"] == "*bf16"


@compiles
def test_inspect_shows_the_table_and_says_that_nothing_ran(artifact, tmp_path):
    facts = describe(artifact, trust_store=TrustStore(tmp_path / "trust"))
    assert facts["trust"] == "built"
    text = render(facts)
    assert "kernels     5, registers and spilled bytes per thread" in text
    assert "nothing of them ran yet" in text
    (line,) = (line for line in text.splitlines() if "rms_norm_kernel " in line)
    assert re.fullmatch(r" +rms_norm +rms_norm_kernel +triton +128 +\d+ +\d+ +0", line)
    assert text.count("not chosen") == 2
    assert read_report(artifact, gpu_kernels.REPORT_KIND).content["executed"] is False


@compiles
def test_equal_configs_give_equal_bytes_wherever_they_are_built(artifact, config_file, tmp_path, two_calls):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(config_file, elsewhere / "config.json")
    compile_kernels(elsewhere, elsewhere / "k.di", CARD, trust_store=TrustStore(tmp_path / "trust"))
    assert files_of(elsewhere / "k.di") == files_of(artifact)
    for data in files_of(artifact).values():
        assert str(Path(__file__).parents[2]).encode() not in data and str(tmp_path).encode() not in data


@compiles
def test_an_artifact_for_a_card_that_is_not_here_is_refused_at_load(artifact, tmp_path):
    with pytest.raises(ArtifactMismatchError, match=r"built for cuda sm_90"):
        load_artifact(artifact, TrustStore(tmp_path / "trust"))


@compiles
def test_a_table_without_its_code_and_a_changed_cubin_are_refused(artifact):
    cubin = artifact / "native" / "moe_gate.cubin"
    whole = cubin.read_bytes()
    cubin.write_bytes(whole[:-1] + b"x")
    with pytest.raises(ArtifactCorruptError, match="native/moe_gate.cubin"):
        open_artifact(artifact)
    cubin.unlink()
    with pytest.raises((ArtifactCorruptError, ArtifactFormatError), match="moe_gate"):
        open_artifact(artifact)


def test_targets_that_are_no_card_are_refused_with_those_that_are(config_file, tmp_path, capsys):
    with pytest.raises(SettingsError, match="compile.target: the CPU has no kernels of this kind"):
        compile_kernels(config_file, tmp_path / "k.di", CompileConfig())
    command = [str(config_file), "--kernels", "-o", str(tmp_path / "k.di"), "-q"]
    assert compile_main([*command, "--target", "cuda:sm_80"]) != 0
    error = capsys.readouterr().err
    assert "cuda:sm_80" in error and "cuda:sm_90" in error and "cuda:sm_100" in error
    assert compile_main([*command, "--target", "cuda:sm_90", "--dump", str(tmp_path / "dump")]) != 0
    assert "--kernels makes no graphs" in capsys.readouterr().err
    assert compile_main([str(tmp_path / "none"), *command[1:], "--target", "cuda:sm_90"]) != 0
    assert "does not exist" in capsys.readouterr().err
    assert not (tmp_path / "k.di").exists()


def test_without_triton_the_package_to_install_is_named(config_file, tmp_path, monkeypatch):
    find = gpu_kernels.importlib.util.find_spec
    monkeypatch.setattr(
        gpu_kernels.importlib.util, "find_spec", lambda name: None if name == "triton" else find(name)
    )
    with pytest.raises(UsageError, match=r"pip install 'deepinfer\[gpu\]'"):
        compile_kernels(config_file, tmp_path / "k.di", CARD)


def test_without_nvrtc_the_package_to_install_is_named(config_file, tmp_path, monkeypatch):
    def missing() -> str:
        raise UsageError("no NVRTC", where="nvrtc", action="pip install nvidia-cuda-nvrtc")

    monkeypatch.setattr(gpu_kernels, "compiler_version", missing)
    with pytest.raises(UsageError, match="pip install nvidia-cuda-nvrtc"):
        compile_kernels(config_file, tmp_path / "k.di", CARD)
    assert not (tmp_path / "k.di").exists()
    with pytest.raises(UsageError, match="does not exist"):  # the model is read before compilers are sought
        compile_kernels(tmp_path / "none", tmp_path / "k.di", CARD)


@compiles
def test_weights_without_quantisation_are_refused_with_the_field_that_they_need(tmp_path):
    with pytest.raises(UsageError, match="linear_fp8 in a form without a Triton kernel.*quantization_config"):
        compile_kernels(V4_TINY, tmp_path / "k.di", CARD)
    assert not (tmp_path / "k.di").exists()


def test_a_plan_is_of_the_cpu_alone_and_makes_no_kernels(config_file, capsys):
    assert compile_main([str(config_file), "--plan", "--target", "cuda:sm_90"]) == 2
    assert "compile.target: a plan is of the CPU's layouts, not of cuda:sm_90 (use cpu)" in (
        capsys.readouterr().err
    )
    assert compile_main([str(config_file), "--plan", "--kernels", "--target", "cuda:sm_90"]) == 2
    assert "--kernels makes no graphs: leave out --plan" in capsys.readouterr().err


def test_the_calls_of_a_model_are_those_of_its_steps_and_of_sampling():
    calls = model_calls(
        parse_config(release_config()), CompileConfig(target="cuda:sm_90", max_model_len=65536)
    )
    named = {call.op.name for call in calls}
    assert {"moe_gate", "compress", "index_topk", "sparse_attention", "sample", "verify_drafts"} <= named
    assert named <= {op.name for op in OPS} and len(calls) == len(set(calls))
    experts = [call.args[1].shape[0] for call in calls if call.op.name == "moe_gate"]
    assert set(experts) == {384}


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("target", ["cuda:sm_90", "cuda:sm_100"])
def test_the_released_model_becomes_machine_code_without_spills(config_file, tmp_path, target, capsys):
    out = tmp_path / "k.di"
    command = [str(config_file), "--kernels", "--target", target, "--max-model-len", "65536"]
    assert compile_main([*command, "-o", str(out), "-q", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["executed"] is False and len(facts["kernels"]) > 60
    assert [entry["kernel"] for entry in facts["kernels"] if entry["spill_bytes"]] == []


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("target", ["cuda:sm_90", "cuda:sm_100"])
@pytest.mark.parametrize("model", ["float32", "deepseek_v4"])
def test_other_precisions_and_generations_become_machine_code(model, target, tmp_path):
    folder, options = V41_TINY, CompileConfig(target=target, precision="float32")
    if model == "deepseek_v4":
        folder, options = tmp_path / "v4", CompileConfig(target=target)
        folder.mkdir()
        config = quantised_config(json.loads((V4_TINY / "config.json").read_text()))
        (folder / "config.json").write_text(json.dumps(config))
    result = compile_kernels(folder, tmp_path / "k.di", options, trust_store=TrustStore(tmp_path / "trust"))
    named = {entry.op for entry in result.table.kernels}
    own = {"moe_hash_gate", "compress_biased", "hadamard"}
    assert named >= {"sparse_attention", "sample"} and own & named == (
        own if model == "deepseek_v4" else set()
    )
    for entry in result.table.kernels:
        assert (tmp_path / "k.di" / "native" / f"{entry.files}.cubin").read_bytes()[:4] == b"\x7fELF"
