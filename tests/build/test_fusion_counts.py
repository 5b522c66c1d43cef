"""Every fusion fires as often as the config asks for, in each shipped model and in the release's config."""

import json
from pathlib import Path

import pytest
from model_dirs import release_config

from deepinfer import compile
from deepinfer.build_worker import Job, captured_program, run_passes
from deepinfer.errors import PassError
from deepinfer.graphs import moe as layer
from deepinfer.graphs.config import load_config
from deepinfer.graphs.fusions import fused_calls
from deepinfer.kernels.moe_gate import moe_gate_reference
from deepinfer.kernels.native import load_host_library
from deepinfer.passes.text import graph_text
from deepinfer.settings import CompileConfig

ROOT = Path(__file__).parents[2]
TRAINED = ROOT / "examples" / "tiny" / "checkpoint"


def job_of(model: Path, precision: str, phase: str) -> Job:
    options = CompileConfig(precision=precision, decode_rows=(1,), prefill_tokens=(16,), jobs=1)  # type: ignore[arg-type]
    build = compile._resolve(model, options)
    (spec,) = [spec for spec in build.specs if spec.phase == phase]
    return compile._job(build, spec, Path("unused"), None)


def fired(job: Job) -> tuple[dict[str, int], str]:
    load_host_library()
    program = captured_program(job)
    report = run_passes(job, program)
    counts = {
        result.name.removeprefix("fuse_"): result.rewrites or 0
        for result in report.results
        if result.name.startswith("fuse_")
    }
    return counts, graph_text(program.graph_module)


def check(model: Path, precision: str, phase: str) -> dict[str, int]:
    counts, text = fired(job_of(model, precision, phase))
    assert counts == fused_calls(load_config(model), phase)
    for name, count in counts.items():
        assert text.count(f"deepinfer.{name}.default(") == count
    # nothing of a definition is left: no arithmetic but the scaling of index weights
    left = {
        line.partition(" = aten.")[2].partition(".")[0] for line in text.splitlines() if " = aten." in line
    }
    assert not left & {"sort", "mm", "bmm", "sum", "exp", "softplus", "index_put_", "cumsum", "topk", "rsqrt"}
    return counts


@pytest.mark.parametrize(
    ("precision", "phase"),
    [
        ("native", "decode"),
        pytest.param("native", "prefill", marks=pytest.mark.slow),
        pytest.param("float32", "decode", marks=pytest.mark.slow),
        pytest.param("float32", "prefill", marks=pytest.mark.slow),
    ],
)
def test_the_trained_model(precision: str, phase: str) -> None:
    counts = check(TRAINED, precision, phase)
    assert counts["moe_gate"] == 6 and counts["mhc_collapse"] == 13 and counts["index_topk"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_the_golden_model_in_native_precision(phase: str, golden_dir: Path) -> None:
    counts = check(golden_dir, "native", phase)
    assert counts["moe_gate"] == 8 and counts["compress"] == 3 and counts["engram_gate"] == 2


@pytest.mark.slow
def test_the_config_of_the_release(tmp_path: Path) -> None:
    """Forty layers, traced without a weight."""
    (tmp_path / "config.json").write_text(json.dumps(release_config()))
    counts = check(tmp_path, "native", "decode")
    assert counts["moe_gate"] == counts["moe_experts"] == counts["sparse_attention"] == 40
    assert counts["compress"] == counts["index_key"] == 4
    assert counts["index_topk"] == 8
    assert counts["mhc_expand"] == 80 and counts["mhc_collapse"] == 81


def test_a_layer_that_calls_another_op_fails_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number comes from the config, not from a trace that would change with the model."""
    monkeypatch.setattr(layer, "moe_gate", lambda *args: moe_gate_reference(*args))
    with pytest.raises(PassError, match="fuse_moe_gate fired 0 times where the model asks for 6"):
        fired(job_of(TRAINED, "native", "decode"))


def test_logits_have_no_fusion() -> None:
    assert fused_calls(load_config(TRAINED), "logits") == {}
