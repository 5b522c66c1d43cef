"""The plan of a build: what `compile_model` would make of a config, found without weights or lowering.

Graphs are traced on fake tensors, so the plan of a model of any size fits on a laptop. Nothing is written but
the op library in the cache, which tracing needs.
"""

import hashlib
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import fx

from deepinfer.artifacts import canonical_bytes
from deepinfer.build_worker import ARTIFACT_FILES
from deepinfer.cache_sizes import resolve_sizes
from deepinfer.compile import graph_specs
from deepinfer.errors import ConfigError, UsageError
from deepinfer.graph_costs import fusions, op_calls, row_terms, workspace_bytes
from deepinfer.graphs.cache_layout import CacheLayout
from deepinfer.graphs.capture import GraphSpec, WeightSpecs, capture
from deepinfer.graphs.config import MAX_CONFIG_BYTES, ModelConfig, load_config, parse_config
from deepinfer.graphs.records import PRECISIONS
from deepinfer.graphs.store import store_specs
from deepinfer.graphs.strict_json import read_json_object
from deepinfer.kernels import native
from deepinfer.passes.manager import PassManager
from deepinfer.passes.pipeline import PASSES_EXACT
from deepinfer.plan_weights import ParameterPlan, WeightGroup, count_parameters, weight_groups
from deepinfer.progress import Progress
from deepinfer.settings import CompileConfig
from deepinfer.target import require_cpu
from deepinfer.tokenizer_files import tokenizer_files
from deepinfer.weight_file import file_bytes

# Layers traced for one plan: some 0.2 s each. Beyond it one graph of a phase stands for the others.
MAX_TRACED_LAYERS = 240


@dataclass(frozen=True)
class ModelPlan:
    """Which model it is. `config_sha256` is the one that an artifact records."""

    model_type: str
    config_sha256: str
    layers: int
    hidden_size: int
    vocab_size: int
    heads: int
    head_dim: int
    experts: int
    experts_per_token: int
    max_position_embeddings: int
    sliding_window: int
    kv_source_layers: tuple[int, ...]
    kv_source_ratios: tuple[int, ...]
    index_source_layers: tuple[int, ...]
    engram_layers: tuple[int, ...]


@dataclass(frozen=True)
class GraphPlan:
    """One graph of the build. Counts come from the trace of `counted_in`, which may be another bucket.

    `captured_nodes` are those of the trace with whole operations, before passes; `fusions` the calls that
    stand for several operations. `workspace_bytes` is None for a graph that was not traced itself.
    """

    name: str
    phase: str
    rows: int
    request_rows: int
    taps: bool
    counted_in: str
    captured_nodes: int
    fusions: int
    ops: dict[str, int]
    workspace_bytes: int | None


@dataclass(frozen=True)
class CachePlan:
    """The two cache arenas; `region_bytes` of a block or a slot, by kind of record."""

    block_tokens: int
    block_bytes: int
    num_blocks: int
    slot_bytes: int
    num_slots: int
    max_blocks_per_request: int
    arena_bytes: int
    region_bytes: dict[str, int]


@dataclass(frozen=True)
class FlopsPlan:
    """Work at a context of `tokens`: its last row in decode, all of a prompt that long, one row of logits.

    `not_counted` are calls that make products but have no formula.
    """

    tokens: int
    decode_row: int
    decode_row_by_op: dict[str, int]
    prompt: int
    prompt_by_op: dict[str, int]
    prompt_mean_row: float
    logits_row: int
    not_counted: dict[str, int]


@dataclass(frozen=True)
class FilePlan:
    """One file of the artifact; `size` is None where only the build can tell."""

    name: str
    size: int | None


@dataclass(frozen=True)
class BuildPlan:
    """Everything that a build with these settings would make."""

    model: ModelPlan
    settings: dict[str, Any]
    graphs: tuple[GraphPlan, ...]
    weights: tuple[WeightGroup, ...]
    weights_bytes: int
    parameters: ParameterPlan
    cache: CachePlan
    flops: FlopsPlan
    files: tuple[FilePlan, ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON values."""
        return asdict(self)


def plan_model(
    model: str | Path,
    options: CompileConfig | None = None,
    *,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> BuildPlan:
    """Plan the build of `model`, a folder with config.json or that file itself; no weights are needed.

    `cache_dir` is the build cache, for the op library. Raises UsageError when there is no such file,
    ModelError for a config that cannot be built, SettingsError for options that do not suit it, BuildError
    when a graph cannot be traced.
    """
    started = time.perf_counter()
    folder, config = read_model_config(Path(model))
    options = options or CompileConfig()
    require_cpu(options.target)
    PassManager(PASSES_EXACT, options.disabled_passes)  # refuses names that no pass has
    options, layout = resolve_sizes(options, config)
    assert options.max_model_len is not None
    plain = store_specs(config, options.max_model_len)
    packed = store_specs(config, options.max_model_len, packed=True)
    text_files = tokenizer_files(folder)
    specs = graph_specs(config, options)
    native.load_host_library(cache_dir / "native" if cache_dir is not None else None)
    traces = _trace(specs, config, options.precision, layout, packed, progress or Progress())
    groups = weight_groups(plain, packed)
    return BuildPlan(
        model=_model(config),
        settings=options.effective(),
        graphs=tuple(_graph(spec, traces) for spec in specs),
        weights=groups,
        weights_bytes=sum(group.bytes for group in groups),
        parameters=count_parameters(config, plain),
        cache=_cache(layout),
        flops=_flops(traces, options.max_model_len),
        files=_files(specs, packed, text_files),
        seconds=time.perf_counter() - started,
    )


def read_model_config(model: Path) -> tuple[Path, ModelConfig]:
    """The folder of the config `model`, or of the folder `model`, and what it says.

    Raises UsageError when there is none, ModelError for one that cannot be built.
    """
    if not model.exists():
        raise UsageError("does not exist", where=f"MODEL {model}")
    folder = model if model.is_dir() else model.parent
    if model.is_dir() or model.name == "config.json":
        return folder, load_config(folder)
    return folder, parse_config(read_json_object(model, MAX_CONFIG_BYTES, ConfigError))


# ---- graphs ---------------------------------------------------------------------------------------------


def _trace(
    specs: list[GraphSpec],
    config: ModelConfig,
    precision: str,
    layout: CacheLayout,
    weights: WeightSpecs,
    progress: Progress,
) -> dict[str, fx.Graph]:
    """Graphs by name: all of them, or the largest of each phase where that would take minutes."""
    steps = sum(spec.phase != "logits" for spec in specs)
    chosen = specs
    if steps * config.num_hidden_layers > MAX_TRACED_LAYERS:
        largest = {spec.phase: spec for spec in sorted(specs, key=lambda spec: spec.bucket)}
        chosen = list(largest.values())
    progress.start("tracing", len(chosen))
    traces = {}
    for spec in chosen:
        traces[spec.name] = capture(spec, config, PRECISIONS[precision], layout, weights, fused=True).graph
        progress.advance(spec.name)
    progress.finish()
    return traces


def _graph(spec: GraphSpec, traces: dict[str, fx.Graph]) -> GraphPlan:
    own = traces.get(spec.name)
    name = spec.name if own is not None else _of_phase(traces, spec.phase)
    graph = traces[name]
    calls = op_calls(graph)
    return GraphPlan(
        name=spec.name,
        phase=spec.phase,
        rows=spec.bucket,
        request_rows=spec.request_rows,
        taps=spec.taps,
        counted_in=name,
        captured_nodes=len(graph.nodes),
        fusions=fusions(calls),
        ops=calls,
        workspace_bytes=workspace_bytes(own) if own is not None else None,
    )


def _of_phase(traces: dict[str, fx.Graph], phase: str) -> str:
    """Name of a traced graph of the phase."""
    return next(name for name in traces if name.startswith(f"{phase}-"))


def _flops(traces: dict[str, fx.Graph], tokens: int) -> FlopsPlan:
    """Every bucket of a phase does the same for a row, so one trace of it tells."""
    decode, unknown_decode = row_terms(traces[_of_phase(traces, "decode")])
    prefill, unknown_prefill = row_terms(traces[_of_phase(traces, "prefill")])
    logits, unknown_logits = row_terms(traces[_of_phase(traces, "logits")])
    row = {name: sum(term.row(tokens) for term in terms) for name, terms in decode.items()}
    prompt = {name: sum(term.prompt(tokens) for term in terms) for name, terms in prefill.items()}
    unknown = {f"{graph}: {name}": count for graph, found in (
        ("decode", unknown_decode), ("prefill", unknown_prefill), ("logits", unknown_logits)
    ) for name, count in found.items()}  # fmt: skip
    return FlopsPlan(
        tokens=tokens,
        decode_row=sum(row.values()),
        decode_row_by_op=row,
        prompt=sum(prompt.values()),
        prompt_by_op=prompt,
        prompt_mean_row=sum(prompt.values()) / tokens,
        logits_row=sum(term.row(tokens) for terms in logits.values() for term in terms),
        not_counted=unknown,
    )


# ---- sizes ----------------------------------------------------------------------------------------------


def _model(config: ModelConfig) -> ModelPlan:
    return ModelPlan(
        model_type=config.model_type,
        config_sha256=hashlib.sha256(canonical_bytes(config.to_canonical_dict())).hexdigest(),
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        heads=config.num_attention_heads,
        head_dim=config.head_dim,
        experts=config.n_routed_experts,
        experts_per_token=config.num_experts_per_tok,
        max_position_embeddings=config.max_position_embeddings,
        sliding_window=config.sliding_window,
        kv_source_layers=config.kv_source_layer_ids,
        kv_source_ratios=tuple(config.ratio(layer) for layer in config.kv_source_layer_ids),
        index_source_layers=config.index_source_layer_ids,
        engram_layers=config.engram_layer_ids,
    )


def _cache(layout: CacheLayout) -> CachePlan:
    region_bytes: dict[str, int] = {}
    for region in layout.regions:
        kind = region.name.rpartition(".")[2]
        region_bytes[kind] = region_bytes.get(kind, 0) + region.total_bytes
    return CachePlan(
        block_tokens=layout.block_tokens,
        block_bytes=layout.block_bytes,
        num_blocks=layout.num_blocks,
        slot_bytes=layout.slot_bytes,
        num_slots=layout.num_slots,
        max_blocks_per_request=layout.max_blocks_per_request,
        arena_bytes=layout.num_blocks * layout.block_bytes + layout.num_slots * layout.slot_bytes,
        region_bytes=region_bytes,
    )


def _files(
    specs: list[GraphSpec], weights: WeightSpecs, text_files: dict[str, bytes]
) -> tuple[FilePlan, ...]:
    files: dict[str, int | None] = {
        f"graphs/{spec.name}/{name}": None for spec in specs for name in ARTIFACT_FILES
    }
    files |= {f"tokenizer/{name}": len(data) for name, data in text_files.items()}
    files["weights/model.safetensors"] = file_bytes(weights)
    files[f"native/{native.LIBRARY_NAME}"] = None
    files["manifest.json"] = None
    return tuple(FilePlan(name, files[name]) for name in sorted(files))
