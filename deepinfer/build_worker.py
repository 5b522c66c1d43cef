"""One graph built in a process of its own: capture, passes, lowering, and the files an artifact keeps of it.

Run as `python -m deepinfer.build_worker JOB.json`. The parent reads the files that this leaves in the job's
work directory; `result.json` comes last, so that its presence says that the others are whole. An error is
written to `error.json` as plain data. Nothing is exchanged but JSON and files.
"""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
from torch.export import ExportedProgram

from deepinfer.artifacts import (
    BuildCache,
    ConstantSpec,
    GraphSignature,
    InputSpec,
    OutputSpec,
    PassReport,
    PassResult,
    canonical_bytes,
    pack_texts,
)
from deepinfer.build_key import lowering_key
from deepinfer.errors import DeepInferError
from deepinfer.graphs.cache_layout import CacheLayout, cache_layout
from deepinfer.graphs.capture import GraphSpec, WeightSpecs, capture, recorded_step, weight_name
from deepinfer.graphs.config import ModelConfig, parse_config
from deepinfer.graphs.fusions import fused_calls
from deepinfer.graphs.records import PRECISIONS, Precision
from deepinfer.graphs.rows import StepInputs
from deepinfer.graphs.store import store_specs
from deepinfer.kernels.native import load_host_library
from deepinfer.passes.capture_safety import check_captured
from deepinfer.passes.cuda_graph import ALIGNMENT_BYTES
from deepinfer.passes.frozen_values import check_same_trace
from deepinfer.passes.fuse import PREFIX as FUSION_PREFIX
from deepinfer.passes.lower import LoweredGraph, lower_graph
from deepinfer.passes.manager import PassManager, Record
from deepinfer.passes.manager import PassReport as ManagerReport
from deepinfer.passes.pipeline import exact_passes
from deepinfer.passes.same_calls import check_same_calls
from deepinfer.passes.text import graph_text

ARTIFACT_FILES = ("model.so", "model.json", "signature.json", "graph.txt", "passes.json")
PASS_TEXTS_FILE = "pass_texts.json"  # for a sidecar: the artifact's identity does not depend on it


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything that one graph's build depends on, and where its files go."""

    config: dict[str, Any]  # content of config.json
    precision: str
    max_num_seqs: int
    max_model_len: int
    num_blocks: int
    phase: str
    bucket: int
    request_rows: int
    taps: bool
    isa: str
    arch: str | None = None  # of a graphics card; `isa` is then that of the code around its kernels
    disabled_passes: tuple[str, ...]
    cache_dir: str  # of the op library that tracing needs, and of what graphs were lowered to
    dump_dir: str | None
    work_dir: str

    @property
    def spec(self) -> GraphSpec:
        """The graph to build."""
        return GraphSpec(self.phase, self.bucket, self.request_rows, self.taps)


def build_graph(job: Job) -> None:
    """Build the job's graph into its work directory. Raises BuildError (and its subclasses)."""
    work_dir = Path(job.work_dir)
    load_host_library(Path(job.cache_dir) / "native")
    program = captured_program(job)
    nodes_captured = len(program.graph.nodes)
    texts: list[tuple[str, str]] = []
    report = run_passes(job, program, lambda after, text: texts.append((after, text)))
    text = graph_text(program.graph_module)
    for name, data in lowered_files(job, program, text).items():
        (work_dir / name).write_bytes(data)
    (work_dir / "graph.txt").write_text(text)
    (work_dir / "passes.json").write_bytes(canonical_bytes(pass_results(report)))
    if (packed := pack_texts(texts)) is not None:
        (work_dir / PASS_TEXTS_FILE).write_bytes(packed)
    facts = {
        "nodes_captured": nodes_captured,
        "nodes": len(program.graph.nodes),
        "rewrites": sum(result.rewrites or 0 for result in report.results),
    }
    (work_dir / "result.json").write_text(json.dumps(facts))


def lowered_files(job: Job, program: ExportedProgram, text: str) -> dict[str, bytes]:
    """Lower a graph, or take what an equal graph was lowered to: shared object, its JSON, signature.

    Most changes of the sources leave most graphs as they are; those need no compiler.
    """
    cache = BuildCache(Path(job.cache_dir) / "lowered")
    names, unaligned = [node.name for node in program.graph.nodes], _unaligned_inputs(job)
    key = lowering_key(text, names, job.spec.name, job.isa, job.arch, unaligned)
    files = cache.get(key)
    if files is None:
        lowered = lower_graph(
            program,
            name=job.spec.name,
            work_dir=Path(job.work_dir),
            isa=job.isa,
            arch=job.arch,
            unaligned=unaligned,
        )
        files = {"model.so": lowered.shared_object.read_bytes()}
        if lowered.extern_json is not None:
            files["model.json"] = lowered.extern_json.read_bytes()
        files["signature.json"] = canonical_bytes(signature_of(lowered))
        cache.put(key, files)
    return files


def run_passes(job: Job, program: ExportedProgram, record: Record | None = None) -> ManagerReport:
    """Run the pipeline on the job's graph, in place. Fusions must fire as often as the config asks for.

    With a fusion switched off, others may find more than they should, in what it leaves: nothing is counted.
    """
    forms = recorded_step(*_what_to_trace(job))
    counts = None
    if not any(name.startswith(FUSION_PREFIX) for name in job.disabled_passes):
        counts = fused_calls(parse_config(job.config), job.phase)
    dump_dir = Path(job.dump_dir) if job.dump_dir else None
    passes = exact_passes(forms)
    manager = PassManager(passes, job.disabled_passes, dump_dir)
    report = manager.run(program, counts, name=job.spec.name, record=record)
    # a second trace, with every op as one call, must come out the same
    if not job.disabled_passes:
        again = capture(*_what_to_trace(job))
        PassManager(passes).run(again, name=job.spec.name)
        check_same_calls(program.graph, again.graph, job.spec.name)
    return report


def captured_program(job: Job) -> ExportedProgram:
    """Trace the job's graph and refuse what may not be compiled.

    Where passes are switched off, the graph is traced twice to find values that tracing froze; else
    `run_passes` makes the second trace.
    """
    program = capture(*_what_to_trace(job), fused=False)
    if job.disabled_passes:
        check_same_trace(program, capture(*_what_to_trace(job), fused=False), job.spec.name)
    check_captured(program, job.spec.name)
    return program


def _what_to_trace(job: Job) -> tuple[GraphSpec, ModelConfig, Precision, CacheLayout, WeightSpecs]:
    config = parse_config(job.config)
    specs = store_specs(config, job.max_model_len, packed=job.arch is None)
    return job.spec, config, PRECISIONS[job.precision], _layout(job), specs


def _layout(job: Job) -> CacheLayout:
    return cache_layout(
        parse_config(job.config),
        job.precision,
        max_num_seqs=job.max_num_seqs,
        max_model_len=job.max_model_len,
        num_blocks=job.num_blocks,
    )


def _unaligned_inputs(job: Job) -> tuple[int, ...]:
    """Inputs of the graph that are views into larger memory and may start at any address."""
    if job.arch is None or job.phase == "logits":
        return ()
    count = len(StepInputs._fields)  # all in one buffer
    regions = enumerate(_layout(job).regions, count)
    return (
        *range(count),
        *(index for index, region in regions if region.offset_bytes % ALIGNMENT_BYTES),
    )


def signature_of(lowered: LoweredGraph) -> GraphSignature:
    """The artifact's record of how to call a lowered graph."""
    return GraphSignature(
        inputs=tuple(
            InputSpec(
                name=spec.name,
                dtype=spec.dtype,  # type: ignore[arg-type]
                shape=spec.shape,
                strides=spec.stride,
            )
            for spec in lowered.inputs
        ),
        outputs=tuple(
            OutputSpec(name=spec.name, dtype=spec.dtype, shape=spec.shape)  # type: ignore[arg-type]
            for spec in lowered.outputs
        ),
        constants=tuple(
            ConstantSpec(name=spec.name, weight=weight_name(spec.weight)) for spec in lowered.constants
        ),
    )


def pass_results(report: ManagerReport) -> PassReport:
    """The artifact's record of what every pass did."""
    return PassReport(
        passes=tuple(
            PassResult(
                name=result.name,
                rewrites=result.rewrites or 0,
                nodes_before=result.nodes_before,
                nodes_after=result.nodes_after,
            )
            for result in report.results
        )
    )


def main(arguments: list[str]) -> int:
    """Build the graph of the job file named on the command line."""
    job = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=Job)
    try:
        build_graph(job)
    except DeepInferError as error:
        fault = {
            "kind": type(error).__name__,
            "what": error.what,
            "where": error.where,
            "action": error.action,
        }
        (Path(job.work_dir) / "error.json").write_text(json.dumps(fault))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
