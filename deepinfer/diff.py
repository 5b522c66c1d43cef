"""Is what was compiled equal to the eager model it came from? The proof behind `deepinfer-diff`.

Runs every graph of an artifact beside the eager model over prompts, judges the measurements by the tolerances
in the manifest, and finds the first layer that differs. A certificate is the same proof written beside the
artifact.
"""

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
from deepinfer.artifacts import Certificate, GraphEntry, GraphResult, Manifest, TrustStore, write_certificate
from deepinfer.comparison import Chunk, Graph, RowMeasures, SideBySide, chunked
from deepinfer.errors import ArtifactMismatchError, RequestError
from deepinfer.graphs.cache_layout import cache_layout
from deepinfer.graphs.checkpoint import Checkpoint
from deepinfer.graphs.config import ModelConfig, load_config
from deepinfer.graphs.eager import EagerModel, check_token_ids
from deepinfer.graphs.records import PRECISIONS
from deepinfer.graphs.store import build_store
from deepinfer.progress import Progress
from deepinfer.runtime.loader import load_artifact

DECODE_STEPS = 8
_SEED = 20260401  # of the default prompts; any number serves, a fixed one makes reports comparable


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
    content = compare(manifest, loaded.graphs, loaded.arenas.regions, eager, chosen, progress or Progress())
    return DiffReport({"artifact_id": loaded.artifact_id, **content})


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
    return EagerModel(config, PRECISIONS[manifest.precision], store, layout)


def default_prompts(config: ModelConfig, manifest: Manifest) -> list[list[int]]:
    """Return prompts of random tokens: one token, open and closed groups, around and beyond the window."""
    window = config.sliding_window
    longest = manifest.limits.max_model_len - DECODE_STEPS
    lengths = [1, 2, 3, window - 1, window + 1, 2 * window + 8, 4 * window]
    rng = random.Random(_SEED)
    allowed = [token for token in range(config.vocab_size) if token != config.image_token_id]
    return [
        rng.choices(allowed, k=length)
        for length in sorted({min(max(length, 1), max(longest, 1)) for length in lengths})
    ]


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
    tolerances = manifest.tolerances
    sides = SideBySide(graphs, regions, manifest.graphs, eager, tolerances[limits.MARGIN])
    steps = [entry for entry in manifest.graphs if entry.phase in ("prefill", "decode")]
    progress.start("compare", len(steps))
    for entry in steps:
        if entry.phase == "prefill":
            _prefill(sides, entry, prompts, manifest)
        else:
            _decode(sides, entry, prompts, manifest)
        progress.advance(entry.name)
    sides.compare_heads(_hidden_rows(eager, 2 * max(entry.bucket for entry in manifest.graphs)))
    judged = [_judge(entry, sides.rows[entry.name], manifest) for entry in manifest.graphs]
    sublayers = _judge_sublayers(sides, tolerances)
    for graph in judged:
        graph["passed"] &= all(part["passed"] for part in sublayers if part["graph"] == graph["name"])
    passed = all(graph["passed"] for graph in judged)
    first = None if passed else _first_differing_layer(sides, tolerances[limits.WINDOW_RMS])
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


def _prefill(sides: SideBySide, entry: GraphEntry, prompts: Sequence[list[int]], manifest: Manifest) -> None:
    for prompt in prompts:
        for chunk in chunked(0, prompt, entry.bucket):
            sides.step(entry, [chunk])
    together = [prompt for prompt in prompts if len(prompt) * 2 <= entry.bucket]
    if len(together) > 1 and entry.request_rows > 1:  # several requests in the rows of one step
        chosen = together[-2:]
        sides.step(entry, [Chunk(number, 0, prompt) for number, prompt in enumerate(chosen)])


def _decode(sides: SideBySide, entry: GraphEntry, prompts: Sequence[list[int]], manifest: Manifest) -> None:
    """Decode groups of requests together, after a prefill of each by the first prefill graph."""
    prefill = next(other for other in manifest.graphs if other.phase == "prefill")
    rng = random.Random(_SEED + entry.bucket)
    width = min(entry.bucket, manifest.limits.max_num_seqs)
    usable = [prompt[: manifest.limits.max_model_len - DECODE_STEPS] for prompt in prompts]
    usable = [prompt for prompt in usable if prompt] or [[prompts[0][0]]]
    for first in range(0, len(usable), width):
        group = usable[first : first + width]
        for number, prompt in enumerate(group):
            for chunk in chunked(number, prompt, prefill.bucket):
                sides.step(prefill, [chunk])
        for step in range(min(DECODE_STEPS, manifest.limits.max_model_len - max(map(len, group)))):
            sides.step(
                entry,
                [
                    Chunk(number, len(prompt) + step, [rng.choice(prompt)])
                    for number, prompt in enumerate(group)
                ],
            )


def _hidden_rows(eager: EagerModel, count: int) -> Tensor:
    """Return random rows `[count, D]` of the size of real ones, for the head alone."""
    generator = torch.Generator().manual_seed(_SEED)
    rows = torch.randn(count, eager.config.hidden_size, generator=generator)
    return (rows * eager.weights["norm"].float()).to(eager.precision.dtype)


def _judge(entry: GraphEntry, rows: RowMeasures, manifest: Manifest) -> dict[str, Any]:
    """Return one graph's entry of the report."""
    tolerances = manifest.tolerances
    clear = [index for index, margin in enumerate(rows.margins) if margin >= tolerances[limits.MARGIN]]
    excluded = len(rows.margins) - len(clear)
    finite = all(_finite(value) for value in rows.max_abs_errors)
    largest = max((rows.max_abs_errors[index] for index in clear), default=0.0)
    close = bool(clear) and finite and excluded <= tolerances[limits.EXCLUDED_SHARE] * len(rows.margins)
    if manifest.precision == "float32" or entry.phase == "logits":
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
            "max_abs_error": _finite_or_none(max(rows.max_abs_errors[index] for index in group)),
            "kl": _mean([rows.kls[index] for index in group]),
            "top1_agreement": _mean([float(rows.top1_equal[index]) for index in group]),
        }
        for position, group in sorted(groups.items())
    ]


def _judge_sublayers(sides: SideBySide, tolerances: Mapping[str, float]) -> list[dict[str, Any]]:
    limit = tolerances.get(limits.SUBLAYER_RMS, tolerances[limits.LOGITS_MAX_ABS])
    return [
        {
            "graph": graph,
            "layer": layer,
            "part": part,
            "rms_ratio": _finite_or_none(ratio.value),
            "limit": limit,
            "passed": ratio.value <= limit,
        }
        for (graph, layer, part), ratio in sides.sublayers.items()
    ]


def _first_differing_layer(sides: SideBySide, limit: float) -> int | None:
    return next((layer for layer, ratio in sides.windows.items() if not ratio.value <= limit), None)


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
    parts = [f"layer {part['layer']} {part['part']}" for part in sublayers if not part["passed"]]
    blame = f"; first sublayer out of limits: {parts[0]}" if parts else ""
    if first is None:
        last = manifest.model.num_hidden_layers - 1
        return (
            f"{failed} differs although the window records of all layers agree: it arises after the "
            f"window of layer {last}, in that layer, the final norm or the head{blame}"
        )
    before = f"in layer {first - 1} after its own window, or " if first else ""
    return (
        f"{failed} differs; layer {first} is the first whose window record differs: the difference arises "
        f"{before}on the way to the window of layer {first}{blame}"
    )


def _layer_text(layer: int | None) -> str | None:
    return None if layer is None else f"layer {layer}"


def _mean(values: list[float]) -> float | None:
    return _finite_or_none(statistics.fmean(values)) if values else None


def _finite(value: float) -> bool:
    return abs(value) < float("inf")


def _finite_or_none(value: float) -> float | None:
    return value if _finite(value) else None
