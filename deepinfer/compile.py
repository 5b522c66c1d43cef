"""From a checkpoint to an artifact: read, capture and lower every graph, pack the weights, write, prove.

The output directory appears complete or not at all. What is built depends on the checkpoint, the settings and
the toolchain alone, so that the same inputs give the same bytes.
"""

import hashlib
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepinfer import __version__
from deepinfer.artifacts import (
    ArtifactWriter,
    CacheLayout,
    CacheRegion,
    GraphEntry,
    Limits,
    Manifest,
    ModelInfo,
    PassInfo,
    Target,
    Toolchain,
    TrustStore,
    WeightsInfo,
    canonical_bytes,
    pass_texts_kind,
)
from deepinfer.build_graphs import BuiltGraph, build_graphs
from deepinfer.build_worker import Job
from deepinfer.cache_sizes import resolve_sizes
from deepinfer.certification import certified_once
from deepinfer.errors import ConfigError
from deepinfer.graphs import cache_layout as declared
from deepinfer.graphs.capture import GraphSpec, residual_taps
from deepinfer.graphs.checkpoint import Checkpoint
from deepinfer.graphs.config import MAX_CONFIG_BYTES, ModelConfig, load_config, parse_config
from deepinfer.graphs.records import PRECISIONS
from deepinfer.graphs.store import store_loaders, store_specs
from deepinfer.graphs.strict_json import read_json_object
from deepinfer.kernels import native
from deepinfer.passes.cuda_target import check_builder
from deepinfer.passes.manager import PassManager
from deepinfer.passes.pipeline import PASSES_EXACT
from deepinfer.passes.toolchain import toolchain_identity
from deepinfer.progress import Progress
from deepinfer.settings import CompileConfig
from deepinfer.target import parse_target
from deepinfer.tokenizer_files import eos_token_ids, tokenizer_files
from deepinfer.tolerances import TOLERANCES
from deepinfer.weight_file import file_bytes, write_weight_file

# exporting residuals costs their bytes at every step: by default only where that is next to nothing
AUTO_TAPS_BYTES = 16 << 20


@dataclass(frozen=True)
class GraphSummary:
    """What there is to tell of one graph of a build."""

    name: str
    nodes_captured: int
    nodes: int
    rewrites: int
    seconds: float
    from_cache: bool


@dataclass(frozen=True)
class CompileResult:
    """What a build made. `certified` is False when the compiled graphs differ from the eager model."""

    artifact_id: str
    out_dir: Path
    graphs: list[GraphSummary]
    weights_bytes: int
    seconds: float
    certified: bool | None
    explanation: str


@dataclass(frozen=True)
class _Build:
    """A build with every setting resolved."""

    model_dir: Path
    config_json: dict[str, Any]
    config: ModelConfig
    options: CompileConfig
    isa: str
    arch: str | None  # of a graphics card; None for the CPU
    layout: declared.CacheLayout
    specs: list[GraphSpec]


@dataclass(frozen=True)
class _Sources:
    """What a build takes from the model directory, opened and checked; weights are made when asked for."""

    checkpoint: Checkpoint
    weights: dict[str, Callable[[], Tensor]]
    text_files: dict[str, bytes]
    eos_token_id: int | tuple[int, ...] | None


def compile_model(
    model_dir: str | Path,
    out_dir: str | Path,
    config: CompileConfig | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
    cache_dir: Path | None = None,
    dump_dir: Path | None = None,
    certify: bool = True,
    trust_store: TrustStore | None = None,
) -> CompileResult:
    """Compile the checkpoint in `model_dir` into the artifact `out_dir`.

    `force` replaces an artifact that is there. `cache_dir` keeps finished graphs for later builds; `dump_dir`
    gets every graph's text before its first pass and after every one. With `certify` the artifact is
    compared with the eager model and the result is written beside it. The artifact's id is recorded as built
    by this user.

    Raises ModelError for an unusable checkpoint, SettingsError for options that do not suit it, BuildError
    when a graph cannot be compiled, ArtifactWriteError when the output cannot be written, and
    ArtifactUntrustedError when the trust store cannot be used; `out_dir` is then as it was before.
    """
    started = time.perf_counter()
    progress = progress or Progress()
    trust_store = trust_store or TrustStore()
    trust_store.entries()  # one that is unusable is named now, not after the work
    cache_dir = (cache_dir or native.user_cache_dir().parent).absolute()
    dump_dir = dump_dir.absolute() if dump_dir is not None else None
    out_dir = Path(out_dir)
    build = _resolve(Path(model_dir), config or CompileConfig())
    with ArtifactWriter(out_dir, force=force) as writer:
        sources = _open_sources(build)
        native.make_cache_dir(cache_dir)
        library = native.build_op_library(build.isa, cache_dir / "native")
        jobs = [_job(build, spec, cache_dir, dump_dir) for spec in build.specs]
        graphs = build_graphs(jobs, cache_dir, build.options.jobs or 1, progress)
        for graph in graphs:
            for name, data in sorted(graph.files.items()):
                writer.add_file(f"graphs/{graph.name}/{name}", data)
        writer.add_file_from(f"native/{native.LIBRARY_NAME}", library)
        for name, data in sorted(sources.text_files.items()):
            writer.add_file(f"tokenizer/{name}", data)
        weights_bytes = _write_weights(writer, build, sources, progress)
        artifact_id = writer.finish(_manifest(build, sources, library, weights_bytes), _sidecars(graphs))
    trust_store.record_built(artifact_id)
    certified, explanation = None, "not compared with the eager model"
    if certify:
        try:
            certified, explanation = certified_once(
                out_dir,
                artifact_id,
                build.model_dir,
                build.isa,
                cache_dir,
                trust_store=trust_store,
                progress=progress,
                arch=build.arch,
            )
        except BaseException:
            progress.say(f"{out_dir} is complete, but was not compared: deepinfer-diff does that")
            raise
    return CompileResult(
        artifact_id=artifact_id,
        out_dir=out_dir,
        graphs=[_summary(graph) for graph in graphs],
        weights_bytes=weights_bytes,
        seconds=time.perf_counter() - started,
        certified=certified,
        explanation=explanation,
    )


def _sidecars(graphs: list[BuiltGraph]) -> dict[str, dict[str, Any]]:
    """What is kept beside the artifact's identity, by kind: the text of every graph after every pass."""
    kept = ((graph.name, graph.pass_texts) for graph in graphs)
    return {pass_texts_kind(name): json.loads(data) for name, data in kept if data is not None}


def _resolve(model_dir: Path, options: CompileConfig) -> _Build:
    arch = parse_target(options.target).arch
    if arch is not None:
        check_builder()  # what is missing is named now, not by a worker
    load_config(model_dir)  # says what is wrong, and what is ignored
    config_json = read_json_object(model_dir / "config.json", MAX_CONFIG_BYTES, ConfigError)
    config = parse_config(config_json)  # of the very content that the workers get
    PassManager(PASSES_EXACT, options.disabled_passes)  # refuses names that no pass has
    options, layout = resolve_sizes(options, config)
    assert options.max_model_len is not None and options.logits_rows is not None
    isa = native.host_isa() if options.isa == "auto" else options.isa
    return _Build(model_dir, config_json, config, options, isa, arch, layout, graph_specs(config, options))


def graph_specs(config: ModelConfig, options: CompileConfig) -> list[GraphSpec]:
    """Return the graphs of a build, largest first, since the largest takes longest to compile."""
    prefill, decode = options.prefill_tokens, options.decode_rows
    itemsize = PRECISIONS[options.precision].dtype.itemsize
    row_bytes = len(residual_taps(config)) * config.hc_mult * config.hidden_size * itemsize
    small = max(*prefill, *decode) * row_bytes <= AUTO_TAPS_BYTES
    taps = options.taps == "on" or (options.taps == "auto" and options.precision == "native" and small)
    specs = [GraphSpec("prefill", rows, options.max_num_seqs, taps) for rows in reversed(prefill)]
    specs += [GraphSpec("decode", rows, rows, taps) for rows in reversed(decode)]
    return specs + [GraphSpec("logits", rows, 0) for rows in reversed(options.logits_rows or ())]


def _open_sources(build: _Build) -> _Sources:
    """Open all that is read of the model directory: what is wrong with it is named before any work."""
    checkpoint = Checkpoint(build.model_dir, build.config)
    files = tokenizer_files(build.model_dir)
    return _Sources(
        checkpoint=checkpoint,
        weights=store_loaders(
            checkpoint, build.config, build.options.max_model_len or 0, packed=build.arch is None
        ),
        text_files=files,
        eos_token_id=eos_token_ids(build.config, files),
    )


def _job(build: _Build, spec: GraphSpec, cache_dir: Path, dump_dir: Path | None) -> Job:
    options = build.options
    return Job(
        config=build.config_json,
        precision=options.precision,
        max_num_seqs=options.max_num_seqs,
        max_model_len=options.max_model_len or 0,
        num_blocks=build.layout.num_blocks,
        phase=spec.phase,
        bucket=spec.bucket,
        request_rows=spec.request_rows,
        taps=spec.taps,
        isa=build.isa,
        arch=build.arch,
        disabled_passes=options.disabled_passes,
        cache_dir=str(cache_dir),
        dump_dir=str(dump_dir) if dump_dir else None,
        work_dir="",
    )


def _write_weights(writer: ArtifactWriter, build: _Build, sources: _Sources, progress: Progress) -> int:
    specs = store_specs(build.config, build.options.max_model_len or 0, packed=build.arch is None)
    progress.start("weights", file_bytes(specs))
    with writer.create_file("weights/model.safetensors") as file:

        def write(data: memoryview | bytes) -> None:
            file.write(data)
            progress.advance(units=len(data))

        return write_weight_file(write, specs, sources.weights)


def _manifest(build: _Build, sources: _Sources, library: Path, weights_bytes: int) -> Manifest:
    config, options, layout = build.config, build.options, build.layout
    checkpoint, tokenizer = sources.checkpoint, sources.text_files.get("tokenizer.json")
    toolchain = toolchain_identity(build.isa, build.arch)
    return Manifest(
        model=ModelInfo(
            model_type=config.model_type,
            architecture=config.generation.architecture,
            vocab_size=config.vocab_size,
            num_hidden_layers=config.num_hidden_layers,
            bos_token_id=config.bos_token_id,
            eos_token_id=sources.eos_token_id,
            pad_token_id=config.pad_token_id,
            image_token_id=config.image_token_id,
            config_sha256=hashlib.sha256(canonical_bytes(config.to_canonical_dict())).hexdigest(),
        ),
        weights=WeightsInfo(
            sha256=checkpoint.digest(), tensor_count=len(checkpoint.names), total_bytes=weights_bytes
        ),
        tokenizer_sha256=hashlib.sha256(tokenizer).hexdigest() if tokenizer is not None else None,
        toolchain=Toolchain(
            deepinfer=__version__,
            torch=str(torch.__version__),
            python=".".join(platform.python_version_tuple()[:2]),
            compiler=toolchain["compiler"],
            op_library_sha256=hashlib.sha256(library.read_bytes()).hexdigest(),
        ),
        target=Target(
            device="cpu" if build.arch is None else "cuda",
            arch=build.arch or platform.machine(),
            isa=build.isa,
        ),
        precision=options.precision,
        passes=tuple(
            PassInfo(name=step.name, sha256=step.source_sha256, exact=step.exact) for step in PASSES_EXACT
        ),
        disabled_passes=options.disabled_passes,
        options={**options.effective(), "isa": build.isa},
        cache=cache_section(layout),
        limits=Limits(max_model_len=options.max_model_len or 0, max_num_seqs=options.max_num_seqs),
        tolerances=TOLERANCES[options.precision],
        graphs=tuple(
            GraphEntry(
                name=spec.name,
                phase=spec.phase,  # type: ignore[arg-type]
                bucket=spec.bucket,
                request_rows=spec.request_rows,
                taps=spec.taps,
            )
            for spec in sorted(build.specs, key=lambda spec: (spec.phase, spec.bucket))
        ),
    )


def cache_section(layout: declared.CacheLayout) -> CacheLayout:
    """The layout as a manifest records it."""
    return CacheLayout(
        block_tokens=layout.block_tokens,
        block_bytes=layout.block_bytes,
        num_blocks=layout.num_blocks,
        slot_bytes=layout.slot_bytes,
        num_slots=layout.num_slots,
        max_blocks_per_request=layout.max_blocks_per_request,
        regions=tuple(
            CacheRegion(
                name=region.name,
                kind=region.kind,
                offset_bytes=region.offset_bytes,
                entries=region.entries,
                record_shape=region.record_shape,
                dtype=region.dtype,  # type: ignore[arg-type]
                tokens_per_entry=region.tokens_per_entry,
            )
            for region in layout.regions
        ),
    )


def _summary(graph: BuiltGraph) -> GraphSummary:
    return GraphSummary(
        name=graph.name,
        nodes_captured=graph.nodes_captured,
        nodes=graph.nodes,
        rewrites=graph.rewrites,
        seconds=graph.seconds,
        from_cache=graph.from_cache,
    )
