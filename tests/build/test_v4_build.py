"""deepseek_v4 compiled: every fusion as often as the config asks, close to eager, the same bytes."""

from pathlib import Path

import numpy as np
import pytest
import tiny_build
from end_to_end import Recorder, greedy
from safetensors.torch import load_file

from deepinfer.build_worker import captured_program, run_passes
from deepinfer.compile import compile_model
from deepinfer.diff import diff_artifact
from deepinfer.graph_costs import op_calls
from deepinfer.graphs.config import load_config
from deepinfer.graphs.eager import eager_logits
from deepinfer.graphs.fusions import fused_calls
from deepinfer.kernels.native import load_host_library
from deepinfer.passes.fuse import FUSED_OPS
from deepinfer.runtime.llm import LLM
from deepinfer.settings import CompileConfig

LENGTHS = (1, 3, 16, 17, 45, 70)


def options(precision: str) -> CompileConfig:
    """One graph of each kind."""
    return CompileConfig(
        precision=precision,
        decode_rows=(4,),
        prefill_tokens=(16,),
        logits_rows=(4,),
        max_num_seqs=4,
        max_model_len=256,
    )


@pytest.fixture(
    scope="module", params=["float32", pytest.param("native", marks=pytest.mark.slow)], ids=lambda name: name
)
def artifact(
    request, v4_golden_dir: Path, build_cache_dir: Path | None, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    target = tmp_path_factory.mktemp("v4") / request.param
    compile_model(v4_golden_dir, target, options(request.param), cache_dir=build_cache_dir, certify=False)
    return target


@pytest.fixture(scope="module")
def prompts(v4_golden_dir: Path) -> list[list[int]]:
    tokens = load_file(v4_golden_dir / "golden_logits.safetensors")["n130.tokens"].tolist()
    return [tokens[:length] for length in LENGTHS]


def test_counts_follow_from_the_config(v4_golden_dir):
    """Two hash-routed layers of six, four compressions of keys and values and two of index keys."""
    counts = fused_calls(load_config(v4_golden_dir), "decode")
    assert (counts["moe_hash_gate"], counts["moe_gate"]) == (2, 4)
    assert (counts["compress_biased"], counts["index_topk"], counts["rope"]) == (6, 2, 14)
    assert (counts["compress"], counts["index_key"], counts["ring_write"]) == (0, 0, 6)


@pytest.mark.parametrize(
    ("precision", "name"),
    [("float32", "prefill-16"), pytest.param("native", "decode-4", marks=pytest.mark.slow)],
)
def test_passes_find_every_operation(v4_golden_dir, precision, name):
    load_host_library()
    job = tiny_build.jobs_of(v4_golden_dir, options(precision))[name]
    program = captured_program(job)
    report = {result.name: result.rewrites for result in run_passes(job, program).results}
    expected = fused_calls(load_config(v4_golden_dir), job.phase)
    assert {op.name: report[f"fuse_{op.name}"] for op in FUSED_OPS} == {
        op.name: expected.get(op.name, 0) for op in FUSED_OPS
    }
    calls = op_calls(program.graph_module.graph)
    assert {name: calls[name] for name in ("compress_biased", "moe_hash_gate", "mhc_mix")} == {
        "compress_biased": 6,
        "moe_hash_gate": 2,
        "mhc_mix": 13,  # two a layer, and that of the head
    }


def test_graphs_compute_what_the_eager_model_computes(artifact, v4_golden_dir):
    report = diff_artifact(artifact, v4_golden_dir)
    assert report.passed, report.explanation
    if artifact.name == "float32":
        assert all(graph["max_abs_error"] <= 1e-4 for graph in report.to_dict()["graphs"])


def test_compiled_logits_are_close_to_eager_ones(artifact, v4_golden_dir, prompts):
    if artifact.name != "float32":
        pytest.skip("of native precision a flipped rounding is amplified by every later quantiser")
    recorder = Recorder(LLM(artifact, num_threads=1))
    for prompt in prompts:
        (result,) = recorder.generate([prompt], greedy(4))
        eager = eager_logits(v4_golden_dir, [*prompt, *result.token_ids[:-1]], "float32")
        assert np.abs(result.logits - eager[-4:]).max() <= 1e-4


def test_a_crowd_gives_the_bytes_of_each_alone(artifact, prompts):
    recorder = Recorder(LLM(artifact, num_threads=1))
    alone = recorder.alone(prompts, [greedy(9)] * len(prompts))
    for order in (range(6), [4, 1, 5, 0, 3, 2]):
        crowd = recorder.generate([prompts[i] for i in order], greedy(9))
        assert [result.digest for result in crowd] == [alone[i].digest for i in order]


def test_a_token_gets_the_same_logits_prefilled_or_decoded(artifact, prompts):
    """Across the edges of chunks, and of windows of four and of sixteen tokens."""
    recorder = Recorder(LLM(artifact, num_threads=1))
    for prompt in prompts:
        (decoded,) = recorder.generate([prompt], greedy(18))
        for cut in (1, 2, 3, 4, 7, 15, 16, 17):
            (scored,) = recorder.generate([prompt + list(decoded.token_ids[:cut])], greedy(1))
            assert np.array_equal(scored.logits[0], decoded.logits[cut]), (len(prompt), cut)
