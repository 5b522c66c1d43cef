"""The golden tree: what the golden checkpoint is compiled to, as text that a review can read.

Made by capture and passes alone, in seconds: nothing is lowered. It leaves out what depends on the machine,
on versions of tools, or on sources whose effect is visible otherwise, so that it differs only when the
compiled result does.
"""

import difflib
import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec

from deepinfer import compile
from deepinfer.artifacts import Manifest, PassReport, canonical_bytes
from deepinfer.build_worker import Job, captured_program, pass_results, run_passes
from deepinfer.kernels.native import load_host_library
from deepinfer.passes.text import graph_text
from deepinfer.settings import CompileConfig
from deepinfer.weight_file import write_weight_file

# Any x86-64-v3 machine gives the same.
OPTIONS = CompileConfig(precision="float32", isa="avx2", decode_rows=(4,), prefill_tokens=(16,))
WEIGHTS = "weights/model.safetensors"


def planned_jobs(model_dir: Path) -> list[Job]:
    """The jobs of a build with OPTIONS."""
    build = compile._resolve(model_dir, OPTIONS)
    return [compile._job(build, spec, Path("unused"), None) for spec in build.specs]


def graph_files(job: Job) -> dict[str, bytes]:
    """`graph.txt` and `passes.json` of one graph, as a build would write them."""
    load_host_library()
    program = captured_program(job)
    report = run_passes(job, program)
    return {
        "graph.txt": graph_text(program.graph_module).encode(),
        "passes.json": readable(canonical_bytes(pass_results(report))),
    }


def readable(data: bytes) -> bytes:
    """Canonical JSON with a line per value, for a diff."""
    return json.dumps(json.loads(data), indent=1).encode() + b"\n"


def manifest_facts(manifest: Manifest, weights_sha256: str) -> bytes:
    """What of a manifest is the same wherever it is built."""
    facts: dict[str, Any] = msgspec.to_builtins(manifest)
    for name in ("files", "toolchain"):
        del facts[name]
    del facts["target"]["arch"]
    for step in facts["passes"]:
        del step["sha256"]  # of a source file: a comment would change it
    facts["weight_file_sha256"] = weights_sha256
    return readable(json.dumps(facts, sort_keys=True).encode())


def planned_manifest(model_dir: Path) -> bytes:
    """`manifest.json` of the tree, without building a graph."""
    build = compile._resolve(model_dir, OPTIONS)
    sources = compile._open_sources(build)
    digest = hashlib.sha256()
    specs = compile.store_specs(build.config, build.options.max_model_len or 0, packed=True)
    size = write_weight_file(digest.update, specs, sources.weights)
    manifest = compile._manifest(build, sources, load_host_library(), size)
    return manifest_facts(manifest, digest.hexdigest())


def golden_tree(model_dir: Path) -> dict[str, bytes]:
    """The whole tree, by relative path."""
    files = {"manifest.json": planned_manifest(model_dir)}
    for job in planned_jobs(model_dir):
        for name, data in graph_files(job).items():
            files[f"graphs/{job.spec.name}/{name}"] = data
    return files


def differences(recorded: dict[str, bytes], found: dict[str, bytes], lines: int = 40) -> list[str]:
    """What moved from the recorded tree to the one found, a few lines per file."""
    report = []
    for path in sorted(recorded.keys() | found.keys()):
        old, new = (tree.get(path, b"").decode().splitlines() for tree in (recorded, found))
        changes = list(difflib.unified_diff(old, new, f"recorded/{path}", f"found/{path}", lineterm="", n=1))
        report += changes[:lines]
        if len(changes) > lines:
            report.append(f"... {len(changes) - lines} more lines of {path}")
    return report


def pass_counts(data: bytes) -> dict[str, int]:
    """Rewrites by pass of a `passes.json`."""
    return {result.name: result.rewrites for result in msgspec.json.decode(data, type=PassReport).passes}
