"""Compiled artifacts against the eager model: right ones pass, a wrong one fails, certificates tell."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
import torch
from model_dirs import SECOND_SHARD, copy_checkpoint
from torch import fx
from torch.export import ExportedProgram
from wrong_graphs import MISTAKES, ops

from deepinfer.artifacts import (
    ArtifactWriter,
    TrustStore,
    canonical_bytes,
    list_certificates,
    open_artifact,
    read_certificate,
)
from deepinfer.artifacts.inspect import describe, render
from deepinfer.build_worker import signature_of
from deepinfer.cli import diff as diff_command
from deepinfer.compile import compile_model
from deepinfer.diff import diff_artifact
from deepinfer.errors import ArtifactMismatchError
from deepinfer.graphs.cache_layout import cache_layout
from deepinfer.graphs.capture import GraphSpec, capture
from deepinfer.graphs.config import load_config
from deepinfer.graphs.records import PRECISIONS
from deepinfer.graphs.store import store_specs
from deepinfer.kernels.native import load_host_library
from deepinfer.passes import PASSES_EXACT, PassManager, lower_graph
from deepinfer.passes.text import graph_text
from deepinfer.settings import CompileConfig

SHORT_PROMPTS = [[7, 8, 9], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29]]


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt_token_ids": prompt}) for prompt in SHORT_PROMPTS))
    return path


@pytest.fixture(scope="module")
def certified(
    float32_artifact: Path,
    golden_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
    build_cache_dir: Path | None,
) -> Path:
    """The float32 artifact once more, as `deepinfer-compile` leaves it: with its certificate."""
    target = tmp_path_factory.mktemp("certified") / "artifact"
    options = CompileConfig(precision="float32", decode_rows=(4,), prefill_tokens=(16,))
    result = compile_model(golden_dir, target, options, cache_dir=build_cache_dir)
    assert result.certified and result.explanation == "every graph computes what the eager model computes"
    return target


def artifact_id(directory: Path) -> str:
    with open_artifact(directory) as artifact:
        return artifact.artifact_id


def test_float32_graphs_equal_the_eager_model(certified: Path) -> None:
    certificate = read_certificate(certified, "eager")
    assert certificate is not None and certificate.passed
    assert {result.graph for result in certificate.graphs} == {"decode-4", "logits-4", "prefill-16"}
    for result in certificate.graphs:
        assert result.max_abs_error is not None and result.max_abs_error <= 1e-4
        assert result.excluded_share <= 0.2 and result.rows_compared >= 9
        assert result.verdict == "pass" and result.first_differing_layer is None
        assert result.tolerances["logits_max_abs"] == 1e-4


def test_a_certificate_is_beside_the_artifact_and_not_of_it(certified: Path, float32_artifact: Path) -> None:
    assert read_certificate(float32_artifact, "eager") is None
    assert artifact_id(certified) == artifact_id(float32_artifact)
    certificates, ignored = list_certificates(certified)
    assert [certificate.artifact_id for certificate in certificates] == [
        artifact_id(certified)
    ] and not ignored
    facts = describe(certified)
    assert [entry["verdict"] for entry in facts["certificates"]] == ["pass"]
    assert "certificate eager: pass, 3 graphs" in render(facts)
    assert "certificate none" in render(describe(float32_artifact))


def test_a_certificate_of_another_artifact_is_none(
    certified: Path, native_artifact: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(native_artifact, other)
    shutil.copytree(certified / "reports", other / "reports", dirs_exist_ok=True)
    certificates, ignored = list_certificates(other)
    assert certificates == []
    assert ignored == sorted(path.name for path in (certified / "reports").iterdir())


def test_native_graphs_equal_the_eager_model_part_by_part(native_artifact: Path, golden_dir: Path) -> None:
    report = diff_artifact(native_artifact, golden_dir)
    assert report.passed, report.explanation
    content = report.to_dict()
    assert {part["graph"] for part in content["sublayers"]} == {"decode-4", "prefill-16"}
    assert len(content["sublayers"]) == 72
    for part in content["sublayers"]:
        assert part["passed"] and part["rms_ratio"] <= 2e-3, part
    for graph in content["graphs"]:
        assert graph["passed"] and graph["excluded_rows"] <= 0.2 * graph["rows"]
        positions = {entry["position"] for entry in graph["positions"]}
        assert graph["phase"] == "logits" or max(positions) > 128, "beyond a block of the cache"


class Page(HTMLParser):
    """The text of a page."""

    text = ""

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_command_reports_in_every_form(
    float32_artifact: Path,
    golden_dir: Path,
    prompts_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    page, junit = tmp_path / "diff.html", tmp_path / "diff.xml"
    arguments = [str(float32_artifact), "--model", str(golden_dir), "--prompts-file", str(prompts_file)]
    code = diff_command.main([*arguments, "--json", "--report", str(page), "--junit", str(junit)])
    assert code == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] and report["artifact_id"] == artifact_id(float32_artifact)
    rows = {graph["name"]: graph["rows"] for graph in report["graphs"]}
    tokens = sum(map(len, SHORT_PROMPTS))
    assert rows["prefill-16"] >= tokens + max(map(len, SHORT_PROMPTS))
    reader = Page()
    reader.feed(page.read_text())
    assert report["artifact_id"] in reader.text and "prefill-16" in reader.text
    suite = ElementTree.parse(junit).getroot().find("testsuite")
    assert suite is not None and (suite.get("tests"), suite.get("failures")) == ("3", "0")


def test_usage_errors_exit_with_2(
    float32_artifact: Path, golden_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps({"prompt_token_ids": [512]}))
    arguments = [str(float32_artifact), "--model", str(golden_dir)]
    for extra in (
        ["--no-such-flag"],
        ["--prompts-file", str(bad)],
        ["--prompts-file", str(tmp_path / "none")],
    ):
        try:
            code: Any = diff_command.main([*arguments, *extra])
        except SystemExit as error:
            code = error.code
        assert code == 2, extra
        assert "Traceback" not in capsys.readouterr().err


def test_another_checkpoint_is_refused(float32_artifact: Path, golden_dir: Path, tmp_path: Path) -> None:
    other = copy_checkpoint(golden_dir, tmp_path / "weights")
    shard = other / SECOND_SHARD
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ArtifactMismatchError, match="other weights"):
        diff_artifact(float32_artifact, other)
    other = copy_checkpoint(golden_dir, tmp_path / "config")
    config = json.loads((other / "config.json").read_text())
    config["text_config"]["routed_scaling_factor"] = 1.25
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArtifactMismatchError, match="another config"):
        diff_artifact(float32_artifact, other)


def with_graph(source: Path, target: Path, program: ExportedProgram, spec: GraphSpec, work_dir: Path) -> str:
    """Write `source` again as `target` with one graph compiled from `program`; returns the new id."""
    lowered = lower_graph(program, name=spec.name, work_dir=work_dir)
    with open_artifact(source) as artifact, ArtifactWriter(target) as writer:
        replaced = {
            "model.so": lowered.shared_object.read_bytes(),
            "signature.json": canonical_bytes(signature_of(lowered)),
            "graph.txt": graph_text(program.graph_module).encode(),
        }
        if lowered.extern_json is not None:
            replaced["model.json"] = lowered.extern_json.read_bytes()
        for path in sorted(artifact.paths):
            folder, _, name = path.rpartition("/")
            new = replaced.get(name) if folder == f"graphs/{spec.name}" else None
            writer.add_file(path, artifact.read_file(path) if new is None else new)
        manifest = msgspec.structs.replace(artifact.manifest, files=())
        identity = writer.finish(manifest)
    TrustStore().record_built(identity)
    return identity


def compiled_wrong(
    source: Path, model_dir: Path, folder: Path, spec: GraphSpec, change: Callable[[fx.GraphModule], None]
) -> Path:
    """A whole and trusted float32 artifact, one of whose graphs was compiled from a wrong program."""
    load_host_library()
    config = load_config(model_dir)
    with open_artifact(source) as artifact:
        bounds = artifact.manifest.limits
    layout = cache_layout(
        config, "float32", max_num_seqs=bounds.max_num_seqs, max_model_len=bounds.max_model_len
    )
    weights = store_specs(config, bounds.max_model_len, packed=True)
    program = capture(spec, config, PRECISIONS["float32"], layout, weights, fused=False)
    PassManager(PASSES_EXACT, ["check_invariance"]).run(program)
    change(program.graph_module)
    with_graph(source, folder / "wrong", program, spec, folder / "work")
    return folder / "wrong"


def head_slightly_scaled(module: fx.GraphModule) -> None:
    (head,) = (node for node in module.graph.nodes if node.target == ops.linear.default)
    with module.graph.inserting_after(head):
        scaled = module.graph.call_function(torch.ops.aten.mul.Tensor, (head, 1.001))
    scaled.meta = dict(head.meta)
    head.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)
    module.recompile()


def test_a_wrong_graph_on_disk_makes_the_command_fail(
    float32_artifact: Path, golden_dir: Path, prompts_file: Path, tmp_path: Path
) -> None:
    spec = GraphSpec("logits", 4, 0)
    wrong = compiled_wrong(float32_artifact, golden_dir, tmp_path, spec, head_slightly_scaled)
    junit = tmp_path / "diff.xml"
    code = "import sys; from deepinfer.cli.diff import main; sys.exit(main())"
    arguments = [str(wrong), "--model", str(golden_dir), "--prompts-file", str(prompts_file), "--json"]
    ran = subprocess.run(
        [sys.executable, "-c", code, *arguments, "--junit", str(junit)], capture_output=True, text=True
    )
    assert ran.returncode == 1, ran.stderr
    report = json.loads(ran.stdout)
    assert not report["passed"] and report["first_differing_layer"] is None
    assert "the final norm or the head" in report["explanation"]
    by_name = {graph["name"]: graph for graph in report["graphs"]}
    assert not by_name["logits-4"]["passed"] and by_name["logits-4"]["max_abs_error"] > 1e-3
    suite = ElementTree.parse(junit).getroot().find("testsuite")
    assert suite is not None and int(suite.get("failures", "0")) >= 1


SLOW = ("no inverse rope", "no sink", "window one shorter", "router without its scale", "router sigmoid",
        "index without relu", "swiglu gate clamped below too", "Sinkhorn one iteration fewer",
        "engram plain sigmoid", "router bias in the weights")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_a_wrong_graph_that_is_really_compiled_fails_and_names_the_layer(
    name: str, float32_artifact: Path, golden_dir: Path, tmp_path: Path
) -> None:
    mistake = next(mistake for mistake in MISTAKES if mistake.name == name)
    spec = GraphSpec("decode", 4, 4)
    wrong = compiled_wrong(float32_artifact, golden_dir, tmp_path, spec, mistake.apply)
    report = diff_artifact(wrong, golden_dir)
    assert not report.passed
    content = report.to_dict()
    assert [graph["name"] for graph in content["graphs"] if not graph["passed"]] == ["decode-4"]
    assert content["first_differing_layer"] == mistake.first_differing
