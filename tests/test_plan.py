"""`deepinfer-compile --plan`: its numbers against formulas, a real store and work counted by hand."""

import json
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from end_to_end import tree_state
from model_dirs import release_config
from tiny_checkpoint import tiny_config

from deepinfer import plan as plan_module
from deepinfer.cli import compile as compile_command
from deepinfer.errors import SettingsError
from deepinfer.graph_costs import FORMULAS, WITHOUT_PRODUCTS, Term, row_terms, workspace_bytes
from deepinfer.graphs.cache_layout import cache_layout
from deepinfer.graphs.checkpoint import Checkpoint
from deepinfer.graphs.config import load_config
from deepinfer.graphs.store import build_store, store_specs
from deepinfer.kernels import OPS
from deepinfer.plan import BuildPlan, plan_model
from deepinfer.plan_report import plan_text
from deepinfer.settings import CompileConfig
from deepinfer.weight_file import file_bytes


def options(**changes: Any) -> CompileConfig:
    sizes = {"max_model_len": 64, "max_num_seqs": 2, "decode_rows": (4,), "prefill_tokens": (16,)}
    return CompileConfig(**{**sizes, **changes})


def write_config(folder: Path, content: dict[str, Any], name: str = "config.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(content))
    return path


def two_layers() -> dict[str, Any]:
    """The config of two layers, one key source each; the last one chooses candidates, for nobody."""
    return tiny_config(candidate_source_layer_id=1, candidate_topk_blocks=2, candidate_block_size=4)


@pytest.fixture(scope="module")
def golden_plan(golden_dir: Path, build_cache_dir: Path | None) -> BuildPlan:
    """The plan of the golden model at one size per phase."""
    sizes = CompileConfig(decode_rows=(4,), prefill_tokens=(16,))
    return plan_model(golden_dir, sizes, cache_dir=build_cache_dir)


@pytest.fixture(scope="module")
def tiny_plan(tmp_path_factory: pytest.TempPathFactory, build_cache_dir: Path | None) -> BuildPlan:
    """The plan of the two-layer model, whose work is counted by hand below."""
    path = write_config(tmp_path_factory.mktemp("plan"), two_layers())
    return plan_model(path, options(), cache_dir=build_cache_dir)


def test_weights_are_those_of_a_real_packed_store(golden_plan: BuildPlan, golden_dir: Path) -> None:
    config = load_config(golden_dir)
    store = build_store(Checkpoint(golden_dir, config), config, 1024, packed=True)
    assert golden_plan.weights_bytes == sum(tensor.nbytes for tensor in store.values())
    assert sum(group.tensors for group in golden_plan.weights) == len(store)
    sizes = {file.name: file.size for file in golden_plan.files}
    assert sizes["weights/model.safetensors"] == file_bytes(store_specs(config, 1024, packed=True))
    assert sizes["tokenizer/tokenizer.json"] == (golden_dir / "tokenizer.json").stat().st_size
    experts = [group for group in golden_plan.weights if group.purpose == "routed experts"]
    count = 8 * 16 * 3 * 64 * 128  # layers, experts, matrices of width x inner
    assert {group.format: group.bytes for group in experts} == {
        "fp4": count // 2,
        "e8m0 scales": count // 32,
    }
    assert all(group.packed for group in experts)


def test_cache_is_that_of_the_layout(golden_plan: BuildPlan, golden_dir: Path) -> None:
    layout = cache_layout(load_config(golden_dir), "native", max_num_seqs=8, max_model_len=1024)
    cache = golden_plan.cache
    assert (cache.block_bytes, cache.num_blocks) == (layout.block_bytes, layout.num_blocks)
    assert (cache.slot_bytes, cache.num_slots) == (layout.slot_bytes, layout.num_slots)
    blocks, slots = layout.num_blocks * layout.block_bytes, layout.num_slots * layout.slot_bytes
    assert cache.arena_bytes == blocks + slots
    assert cache.region_bytes["index_key"] + cache.region_bytes["compressed_kv"] == (
        layout.record_bytes_per_block()
    )


def expected_calls(config: Any) -> dict[str, int]:
    """Calls of the operations whose number follows from the config alone."""
    layers, engrams = config.num_hidden_layers, len(config.engram_layer_ids)
    sources, indexers = len(config.kv_source_layer_ids), len(config.index_source_layer_ids)
    return {
        "moe_gate": layers,
        "moe_experts": layers,
        "shared_expert": layers,
        "sparse_attention": layers,
        "window_record": layers,
        "rms_norm": layers,
        "compress": sources,
        "index_key": sources,
        "index_topk": indexers,
        "linear": indexers,
        "linear_fp8": 5 * layers + indexers + engrams,
        "rope": 2 * layers + indexers,
        "ring_write": layers + (engrams > 0),
        "mhc_mix": 2 * layers,
        "mhc_expand": 2 * layers,
        "mhc_collapse": 2 * layers + 1,
        "engram_ids": engrams,
        "engram_gather": engrams,
        "engram_gate": engrams,
    }


def test_calls_of_operations_follow_from_the_config(golden_plan: BuildPlan, golden_dir: Path) -> None:
    expected = expected_calls(load_config(golden_dir))
    prefill, decode, logits = golden_plan.graphs
    assert prefill.ops == decode.ops == expected
    assert logits.ops == {"linear": 1} and logits.fusions == 0
    parts = ("linear", "linear_fp8", "rms_norm", "mhc_mix")
    assert decode.fusions == sum(expected.values()) - sum(expected[name] for name in parts)
    assert [
        (graph.name, graph.rows, graph.request_rows, graph.counted_in) for graph in golden_plan.graphs
    ] == [
        ("prefill-16", 16, 8, "prefill-16"),
        ("decode-4", 4, 4, "decode-4"),
        ("logits-4", 4, 0, "logits-4"),
    ]
    assert decode.captured_nodes > sum(decode.ops.values())


def test_parameters_are_counted_and_those_of_a_token_apart(tiny_plan: BuildPlan) -> None:
    expert, matrix, layer_norms = 3 * 32 * 64, 64 * 32, 2 * 64
    attention = 5 * matrix + 32 + 32 + 2  # five projections, two norms, a sink per head
    compression = {"ratio 2": 2 * matrix + 32, "ratio 1": matrix + 32}
    indexer = 64 * 32 + 2 * 64 + 32 * 32 + 32  # query, head weights, key and its norm
    router, streams = 4 * 64 + 4, 2 * (8 * 128 + 8 + 3)
    each = attention + indexer + router + streams + layer_norms + expert  # the shared expert
    common = 2 * each + sum(compression.values()) + 64 + 64 * 64  # last norm, head
    assert tiny_plan.parameters.total == common + 2 * 4 * expert + 64 * 64
    assert tiny_plan.parameters.per_token == common + 2 * 2 * expert + 64
    assert tiny_plan.parameters.engram_tables == 0


def test_work_is_what_a_hand_counts(tiny_plan: BuildPlan) -> None:
    fixed = {
        "linear_fp8": 2 * (2 * 5 * 2048 + 2 * 2048),  # five projections and the index query, two layers
        "linear": 2 * 2 * 2 * 64,
        "moe_gate": 2 * 2 * 4 * 64,
        "moe_experts": 2 * 2 * 2 * 3 * 32 * 64,
        "shared_expert": 2 * 2 * 3 * 32 * 64,
        "compress": 2 * 3 * 32 * 64,  # value and gate at ratio 2, value at ratio 1
        "mhc_mix": 4 * 2 * 8 * 128,
        "mhc_collapse": 5 * 2 * 2 * 64,
        "mhc_expand": 4 * 2 * 6 * 64,
    }
    flops = tiny_plan.flops
    assert flops.tokens == 64 and flops.not_counted == {}
    assert flops.decode_row_by_op == fixed | {
        "index_key": 2 * 2048,  # token 64 closes a group of either ratio
        "index_topk": 132 * (32 + 64),
        "sparse_attention": 256 * 2 * (8 + 4),
    }
    assert flops.prompt_by_op == {name: 64 * count for name, count in fixed.items()} | {
        "index_key": 2048 * (32 + 64),
        "index_topk": 132 * (1024 + 2080),
        "sparse_attention": 256 * (2 * 484 + 240 + 250),
    }
    assert flops.decode_row == sum(flops.decode_row_by_op.values()) == 172160
    assert flops.prompt_mean_row == flops.prompt / 64
    assert flops.logits_row == 2 * 64 * 64


def test_candidates_limit_the_entries_that_a_row_scores(golden_plan: BuildPlan, golden_dir: Path) -> None:
    config = load_config(golden_dir)
    limit = config.candidate_topk_blocks * config.candidate_block_size
    assert [config.ratio(layer) for layer in config.index_source_layer_ids] == [2, 2, 1, 1] and limit < 1024
    entries = 512 + 512 + 1024 + limit
    per_entry = 2 * config.index_n_heads * (config.index_head_dim + 1)
    assert golden_plan.flops.decode_row_by_op["index_topk"] == per_entry * entries


@pytest.mark.parametrize(
    "term",
    [Term(3), Term(3, 1), Term(3, 2), Term(3, 1, 5), Term(3, 2, 5), Term(3, 2, 0), Term(3, 2, closing=True)],
)
def test_a_prompt_is_the_sum_of_its_rows(term: Term) -> None:
    for tokens in range(1, 40):
        assert term.prompt(tokens) == sum(term.row(each) for each in range(1, tokens + 1))


def test_every_operation_has_a_formula_or_needs_none() -> None:
    assert FORMULAS.keys() | WITHOUT_PRODUCTS == {op.name for op in OPS}
    assert not FORMULAS.keys() & WITHOUT_PRODUCTS


class Small(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.cat([x, x])  # 128 bytes
        view = wide.reshape(4, 8)
        doubled = view * 2  # 128 bytes more, the first use of the view
        small = doubled.sum(dim=1)  # 16 bytes, while `doubled` and, for its last use below, `wide` live
        return torch.mv(view.T, small)  # 32 bytes, with `wide` and `small`


def test_workspace_counts_what_lives_at_once_and_products_without_a_formula_are_named() -> None:
    graph = torch.export.export(Small(), (torch.zeros(16),), strict=False).graph
    assert workspace_bytes(graph) == 128 + 128 + 16
    assert row_terms(graph) == ({}, {"aten.mv": 1})


def test_beyond_the_limit_the_largest_graph_of_a_phase_stands_for_the_others(
    tmp_path: Path, build_cache_dir: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_config(tmp_path, two_layers(), "other.json")
    chosen = options(decode_rows=(1, 2), prefill_tokens=(4, 8), precision="float32", taps="on")
    whole = plan_model(path, chosen, cache_dir=build_cache_dir)
    monkeypatch.setattr(plan_module, "MAX_TRACED_LAYERS", 7)
    plan = plan_model(path, chosen, cache_dir=build_cache_dir)
    counted = {graph.name: graph.counted_in for graph in plan.graphs}
    assert counted == {
        "prefill-8": "prefill-8",
        "prefill-4": "prefill-8",
        "decode-2": "decode-2",
        "decode-1": "decode-2",
        "logits-2": "logits-2",
        "logits-1": "logits-2",
    }
    assert [graph.ops for graph in plan.graphs] == [graph.ops for graph in whole.graphs]
    untraced = [graph.name for graph in plan.graphs if graph.workspace_bytes is None]
    assert untraced == ["prefill-4", "decode-1", "logits-1"]
    assert all(graph.workspace_bytes for graph in whole.graphs)
    assert plan.flops == whole.flops
    assert "traced: prefill-8, decode-2, logits-2;" in plan_text(plan)
    assert "traced:" not in plan_text(whole)


def test_settings_of_a_build_hold_for_a_plan(golden_dir: Path) -> None:
    with pytest.raises(SettingsError, match="beyond the model's 4096"):
        plan_model(golden_dir, CompileConfig(max_model_len=5000))
    with pytest.raises(SettingsError, match="there is no pass"):
        plan_model(golden_dir, CompileConfig(disabled_passes=("no_such_pass",)))


# ---- the command ----------------------------------------------------------------------------------------


def refuse_constant(name: str) -> NoReturn:
    raise AssertionError(f"{name} is not JSON")


def test_the_command_prints_text_or_one_strict_object_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path, tiny_config(window_only=True))
    monkeypatch.chdir(tmp_path)
    before = tree_state(tmp_path)
    flags = ["--decode-rows", "1", "--prefill-tokens", "8", "--max-model-len", "64", "--max-num-seqs", "2"]
    assert compile_command.main(["--plan", str(path), *flags, "--precision", "float32", "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("\n") == 1 and printed.err == ""
    found = json.loads(printed.out, parse_constant=refuse_constant)
    assert [graph["name"] for graph in found["graphs"]] == ["prefill-8", "decode-1", "logits-1"]
    assert found["settings"]["precision"] == "float32" and found["settings"]["max_model_len"] == 64
    assert found["model"]["layers"] == 1 and found["cache"]["num_slots"] == 3
    assert compile_command.main([str(tmp_path), "--plan", *flags]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0].startswith("model      deepseek_v41 ") and printed.err == ""
    assert any(line.startswith("graph      decode-1 ") for line in lines)
    assert all(len(line) <= 110 for line in lines)
    assert tree_state(tmp_path) == before


@pytest.mark.parametrize("extra", [["-o", "x"], ["--force"]])
def test_a_plan_takes_no_output(
    extra: list[str], golden_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compile_command.main(["--plan", str(golden_dir), *extra]) == 2
    fault = capsys.readouterr().err
    assert fault.count("\n") == 1 and "--plan writes nothing" in fault


def test_without_a_plan_an_output_is_required(golden_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compile_command.main([str(golden_dir)]) == 2
    assert "required: -o/--output" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "code", "fault"),
    [
        ({"model_type": "llama"}, 3, "model type 'llama' is not supported"),
        (tiny_config(hidden_size=0), 3, "config.json hidden_size: 0 must be between"),
        (tiny_config(new_key=1), 3, "config.json new_key: this key is not known"),
        ([1], 3, "[DI201]"),
    ],
)
def test_a_config_that_cannot_be_built_is_refused_as_by_a_build(
    content: Any, code: int, fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("config.json", "other.json"):
        assert compile_command.main(["--plan", str(write_config(tmp_path, content, name))]) == code
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and fault in error


def test_a_missing_config_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compile_command.main(["--plan", str(tmp_path / "no.json")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert compile_command.main(["--plan", str(tmp_path)]) == 3
    assert "config.json: the file is missing" in capsys.readouterr().err


@pytest.mark.slow
def test_the_released_model_is_planned_without_its_weights(
    tmp_path: Path, build_cache_dir: Path | None
) -> None:
    path = write_config(tmp_path, release_config())
    plan = plan_model(path, CompileConfig(decode_rows=(4,), prefill_tokens=(16,)), cache_dir=build_cache_dir)
    prefill, decode, _ = plan.graphs
    assert prefill.ops == decode.ops == expected_calls(load_config(tmp_path))
    known = {"moe_gate": 40, "compress": 4, "index_topk": 8, "mhc_mix": 80}
    assert {name: decode.ops[name] for name in known} == known
    assert sorted(plan.model.kv_source_ratios) == [1, 2, 2, 2]
    experts = sum(group.bytes for group in plan.weights if group.purpose == "routed experts")
    tables = sum(group.bytes for group in plan.weights if group.purpose == "engram tables")
    assert (experts, tables) == (288_777_830_400, 202_758_032_400)
    assert (plan.cache.block_bytes, plan.cache.num_blocks) == (114_048, 65)
    assert plan.parameters.engram_tables == (384006168 + 384016682) * 256
    assert round((plan.parameters.total - plan.parameters.engram_tables) / 1e9) == 552
    assert round(plan.parameters.per_token / 1e9) == 16
    # most products use a parameter once: two operations each, and attention on top
    assert 2 * plan.parameters.per_token < plan.flops.decode_row + plan.flops.logits_row < 36e9
    assert plan.flops.not_counted == {}
