"""Is what was compiled equal to the eager model it came from? The proof behind `deepinfer-diff`.

Runs every graph of an artifact beside the eager model over prompts, judges the measurements by the tolerances
in the manifest, and finds the first layer that differs. A certificate is the same proof written beside the
artifact.
"""

import hashlib
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepinfer import diff_report
from deepinfer import tolerances as limits
from deepinfer.artifacts import (
    Certificate,
    GraphEntry,
    GraphResult,
    Manifest,
    TrustStore,
    canonical_bytes,
    write_certificate,
)
from deepinfer.comparison import QUANTIZED_PARTS, Graph, RowMeasures, SideBySide
from deepinfer.diff_steps import SEED, default_lengths, run_steps
from deepinfer.errors import ArtifactMismatchError, RequestError
from deepinfer.graphs.cache_layout import cache_layout
from deepinfer.graphs.checkpoint import Checkpoint
from deepinfer.graphs.config import ModelConfig, load_config
from deepinfer.graphs.eager import EagerModel, check_token_ids
from deepinfer.graphs.records import PRECISIONS
from deepinfer.graphs.rows import StepInputs
from deepinfer.graphs.store import build_store, dequantized_store
from deepinfer.progress import Progress
from deepinfer.runtime.caches import CacheArenas
from deepinfer.runtime.card import HostGraph
from deepinfer.runtime.loader import LoadedArtifact, load_artifact

# memory for matrices that would otherwise be dequantised at every step, most of the time of a comparison
DEQUANTIZED_BYTES = 1 << 30


@dataclass(frozen=True)
class DiffReport:
    """The result of a comparison; `content` is plain data in the shape that the report writers take."""

    content: dict[str, Any]

    @property
    def passed(self) -> bool:
        """Whether every graph and every sublayer is within its tolerance."""
        return bool(self.content["passed"])

    @property
    def explanation(self) -> str:
        """The verdict in words; where it failed, where to look."""
        return str(self.content["explanation"])

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return self.content

    def to_text(self) -> str:
        """The report for a terminal."""
        return diff_report.to_text(self.content)


def diff_artifact(
    artifact: str | Path,
    model_dir: str | Path,
    prompts: Sequence[Sequence[int]] | None = None,
    *,
    progress: Progress | None = None,
    trust_store: TrustStore | None = None,
) -> DiffReport:
    """Compare every graph of `artifact` with the eager model of the checkpoint in `model_dir`.

    `prompts` are token ids; by default a fixed set that covers short and long contexts. Raises ArtifactError
    for an artifact that cannot be loaded, ModelError for an unusable checkpoint, ArtifactMismatchError when
    the artifact was built from another checkpoint, and RequestError for an unusable prompt.
    """
    loaded = load_artifact(artifact, trust_store)
    manifest = loaded.manifest
    eager = eager_model(manifest, Path(model_dir))
    chosen = default_prompts(eager.config, manifest) if prompts is None else [list(p) for p in prompts]
    check_prompts(chosen, manifest)
    graphs, regions = _on_host(loaded)
    content = compare(manifest, graphs, regions, eager, chosen, progress or Progress())
    return DiffReport({"artifact_id": loaded.artifact_id, **content})


def _on_host(loaded: LoadedArtifact) -> tuple[Mapping[str, Graph], Mapping[str, Tensor]]:
    """The graphs as functions of host tensors, and cache regions on the host."""
    device = torch.device(loaded.manifest.target.device)
    if device.type == "cpu":
        return loaded.graphs, loaded.arenas.regions
    regions = CacheArenas.allocate(loaded.manifest.cache).regions
    count = len(StepInputs._fields)
    written = range(count, count + len(regions))
    graphs = {
        entry.name: HostGraph(loaded.graphs[entry.name], device, () if entry.phase == "logits" else written)
        for entry in loaded.manifest.graphs
    }
    return graphs, regions


def certify_artifact(
    artifact: str | Path,
    model_dir: str | Path,
    *,
    progress: Progress | None = None,
    trust_store: TrustStore | None = None,
) -> DiffReport:
    """Compare as `diff_artifact` does with the default prompts; write the certificate beside the artifact."""
    report = diff_artifact(artifact, model_dir, progress=progress, trust_store=trust_store)
    content = report.content
    results = tuple(
        GraphResult(
            graph=graph["name"],
            rows_compared=graph["rows"],
            max_abs_error=graph["max_abs_error"],
            mean_kl=graph["mean_kl"],
            top1_agreement=graph["top1_agreement"],
            excluded_share=graph["excluded_rows"] / max(graph["rows"], 1),
            verdict="pass" if graph["passed"] else "fail",
            tolerances=content["tolerances"],
            first_differing_layer=_layer_text(content["first_differing_layer"]),
        )
        for graph in content["graphs"]
    )
    environment = {"torch": str(torch.__version__), "threads": str(torch.get_num_threads())}
    certificate = Certificate(
        artifact_id=content["artifact_id"],
        kind="eager",
        created_by="deepinfer-compile",
        environment=environment,
        graphs=results,
    )
    write_certificate(artifact, certificate)
    return report


def eager_model(manifest: Manifest, model_dir: Path) -> EagerModel:
    """Return the eager model with the artifact's precision and cache layout.

    Raises ArtifactMismatchError when the checkpoint is not the one that the artifact was built from.
    """
    config = load_config(model_dir)
    described = hashlib.sha256(canonical_bytes(config.to_canonical_dict())).hexdigest()
    if described != manifest.model.config_sha256:
        raise ArtifactMismatchError(
            "the artifact was built from another config",
            where=str(model_dir / "config.json"),
            action="compare it with the checkpoint that it was compiled from, or compile it again",
        )
    checkpoint = Checkpoint(model_dir, config)
    if checkpoint.digest() != manifest.weights.sha256:
        raise ArtifactMismatchError(
            "the artifact was built from other weights",
            where=str(model_dir),
            action="compare it with the checkpoint that it was compiled from, or compile it again",
        )
    layout = cache_layout(
        config,
        manifest.precision,
        max_num_seqs=manifest.limits.max_num_seqs,
        max_model_len=manifest.limits.max_model_len,
        num_blocks=manifest.cache.num_blocks,
    )
    store = build_store(checkpoint, config, manifest.limits.max_model_len)
    weights = dequantized_store(store, DEQUANTIZED_BYTES)
    return EagerModel(config, PRECISIONS[manifest.precision], weights, layout)


def default_prompts(config: ModelConfig, manifest: Manifest) -> list[list[int]]:
    """Return prompts of random tokens, in lengths from one token to beyond a block of the cache."""
    rng = random.Random(SEED)
    allowed = [token for token in range(config.vocab_size) if token != config.image_token_id]
    lengths = default_lengths(
        config.sliding_window, manifest.cache.block_tokens, manifest.limits.max_model_len
    )
    return [rng.choices(allowed, k=length) for length in lengths]


def check_prompts(prompts: Sequence[Sequence[int]], manifest: Manifest) -> None:
    """Raise RequestError for an empty or too long prompt, or a token id outside the vocabulary."""
    if not prompts:
        raise RequestError("there is no prompt to compare on", action="give at least one")
    for index, prompt in enumerate(prompts):
        if not 1 <= len(prompt) <= manifest.limits.max_model_len:
            raise RequestError(
                f"prompt {index} has {len(prompt)} tokens; 1 to {manifest.limits.max_model_len} are possible"
            )
        check_token_ids(prompt, manifest.model.vocab_size)


def compare(
    manifest: Manifest,
    graphs: Mapping[str, Graph],
    regions: Mapping[str, Tensor],
    eager: EagerModel,
    prompts: Sequence[list[int]],
    progress: Progress,
) -> dict[str, Any]:
    """Run every graph beside the eager model and judge it; returns the report's content without the id."""
    tolerances = limits.strictest(manifest.tolerances, manifest.precision)
    sides = SideBySide(graphs, regions, manifest.graphs, eager, tolerances[limits.MARGIN])
    steps = [entry for entry in manifest.graphs if entry.phase in ("prefill", "decode")]
    progress.start("compare", len(steps))
    for name in run_steps(sides, manifest, prompts):
        progress.advance(name)
    # one more than whole buckets, so that every head also meets padding rows
    sides.compare_heads(_hidden_rows(eager, 2 * max(entry.bucket for entry in manifest.graphs) + 1))
    judged = [
        judge_graph(entry, sides.rows[entry.name], manifest.precision, tolerances)
        for entry in manifest.graphs
    ]
    sublayers = _judge_sublayers(sides, tolerances)
    for graph in judged:
        graph["passed"] &= all(part["passed"] for part in sublayers if part["graph"] == graph["name"])
    passed = all(graph["passed"] for graph in judged)
    first = None if passed else _first_differing_layer(sides, sublayers, tolerances[limits.WINDOW_RMS])
    return {
        "model": manifest.model.model_type,
        "precision": manifest.precision,
        "passed": passed,
        "tolerances": dict(tolerances),
        "graphs": judged,
        "sublayers": sublayers,
        "first_differing_layer": first,
        "explanation": _explain(passed, first, judged, sublayers, manifest),
    }


def _hidden_rows(eager: EagerModel, count: int) -> Tensor:
    """Return random rows `[count, D]` of the size of real ones, for the head alone."""
    generator = torch.Generator().manual_seed(SEED)
    rows = torch.randn(count, eager.config.hidden_size, generator=generator)
    return (rows * eager.weights["norm"].float()).to(eager.precision.dtype)


def judge_graph(
    entry: GraphEntry, rows: RowMeasures, precision: str, tolerances: Mapping[str, float]
) -> dict[str, Any]:
    """Return one graph's entry of the report. A result that is not finite fails, wherever it is."""
    clear = [index for index, margin in enumerate(rows.margins) if margin >= tolerances[limits.MARGIN]]
    excluded = len(rows.margins) - len(clear)
    finite = all(_finite(value) for value in rows.max_abs_errors)
    largest = max((rows.max_abs_errors[index] for index in clear), default=0.0)
    close = bool(clear) and finite and excluded <= tolerances[limits.EXCLUDED_SHARE] * len(rows.margins)
    if precision == "float32" or entry.phase == "logits":
        close = close and largest <= tolerances[limits.LOGITS_MAX_ABS]
    elif close:
        variance = statistics.fmean(rows.variances[index] for index in clear)
        error = statistics.fmean(rows.square_errors[index] for index in clear)
        close = error**0.5 <= tolerances[limits.LOGITS_RMS] * variance**0.5
        cosine = statistics.median(rows.cosines[index] for index in clear)
        close = close and cosine >= tolerances[limits.LOGITS_COSINE]
    return {
        "name": entry.name,
        "phase": entry.phase,
        "bucket": entry.bucket,
        "rows": len(rows.margins),
        "excluded_rows": excluded,
        "max_abs_error": largest if finite else None,
        "mean_kl": _mean([rows.kls[index] for index in clear]),
        "top1_agreement": _mean([float(rows.top1_equal[index]) for index in clear]),
        "min_margin": min((margin for margin in rows.margins if _finite(margin)), default=None),
        "passed": close,
        "positions": _by_position(rows, clear),
    }


def _by_position(rows: RowMeasures, clear: list[int]) -> list[dict[str, Any]]:
    groups: dict[int, list[int]] = {}
    for index in clear:
        groups.setdefault(rows.positions[index], []).append(index)
    return [
        {
            "position": position,
            "rows": len(group),
            "max_abs_error": _largest([rows.max_abs_errors[index] for index in group]),
            "kl": _mean([rows.kls[index] for index in group]),
            "top1_agreement": _mean([float(rows.top1_equal[index]) for index in group]),
        }
        for position, group in sorted(groups.items())
    ]


def _judge_sublayers(sides: SideBySide, tolerances: Mapping[str, float]) -> list[dict[str, Any]]:
    sharp = tolerances[limits.LOGITS_MAX_ABS]
    limit = tolerances.get(limits.SUBLAYER_RMS, sharp)
    record_limit = tolerances.get(limits.RECORD_RMS, sharp)
    return [
        {
            "graph": graph,
            "layer": layer,
            "part": part,
            "rms_ratio": _finite_or_none(ratio.value),
            "limit": (allowed := record_limit if part in QUANTIZED_PARTS else limit),
            "passed": ratio.value <= allowed,
        }
        for (graph, layer, part), ratio in sides.sublayers.items()
    ]


def _first_differing_layer(
    sides: SideBySide, sublayers: list[dict[str, Any]], window_limit: float
) -> int | None:
    """The first layer with a differing window record or, on equal inputs, any part out of its limit."""
    layers = [layer for layer, ratio in sides.windows.items() if not ratio.value <= window_limit]
    layers += [part["layer"] for part in sublayers if not part["passed"]]
    return min(layers, default=None)


def _explain(
    passed: bool,
    first: int | None,
    graphs: list[dict[str, Any]],
    sublayers: list[dict[str, Any]],
    manifest: Manifest,
) -> str:
    if passed and manifest.precision == "native" and not sublayers:
        return (
            "within the coarse limits of the whole model; build with taps to have every sublayer compared, "
            "or in float32 precision for a sharp comparison"
        )
    if passed:
        return "every graph computes what the eager model computes"
    failed = ", ".join(graph["name"] for graph in graphs if not graph["passed"])
    parts = [part for part in sublayers if not part["passed"] and part["layer"] == first]
    if parts:
        return (
            f"{failed} differs; on equal inputs, the first part out of its limit is layer {first} "
            f"{parts[0]['part']} of {parts[0]['graph']}"
        )
    last = manifest.model.num_hidden_layers - 1
    if first is None:
        return (
            f"{failed} differs although the window records of all layers agree: it arises after the "
            f"window of layer {last}, in that layer, the final norm or the head"
        )
    if sublayers:
        return f"{failed} differs; on equal inputs, the window record of layer {first} is the first to differ"
    before = f"in layer {first - 1} after its own window, or " if first else ""
    return (
        f"{failed} differs; layer {first} is the first whose window record differs: the difference arises "
        f"{before}on the way to the window of layer {first}"
    )


def _layer_text(layer: int | None) -> str | None:
    return None if layer is None else f"layer {layer}"


def _largest(values: list[float]) -> float | None:
    """The largest value; None where any is not finite, which `max` alone could overlook."""
    return max(values) if all(map(_finite, values)) else None


def _mean(values: list[float]) -> float | None:
    return _finite_or_none(statistics.fmean(values)) if values else None


def _finite(value: float) -> bool:
    return abs(value) < float("inf")


def _finite_or_none(value: float) -> float | None:
    return value if _finite(value) else None
