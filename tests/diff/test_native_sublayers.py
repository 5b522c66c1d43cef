"""Native precision: every part is held to its limit on equal inputs, where the whole model is only coarse."""

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from diff_graphs import GoldenGraphs, golden_graphs
from wrong_graphs import NATIVE_MISTAKES, Mistake

from deepinfer.artifacts import Manifest
from deepinfer.diff import compare, eager_model
from deepinfer.graphs.eager import EagerModel
from deepinfer.progress import Progress

PROMPTS = [random.Random(5).choices(range(500), k=length) for length in (2, 37)]


@pytest.fixture(scope="module")
def golden(golden_dir: Path) -> GoldenGraphs:
    return golden_graphs(golden_dir, "native")


def compared(
    golden: GoldenGraphs, mistake: Mistake | None = None, manifest: Manifest | None = None
) -> dict[str, Any]:
    golden.eager.rewind()
    graphs = golden.graphs(mistake.apply if mistake else None)
    return compare(manifest or golden.manifest, graphs, golden.regions(), golden.eager, PROMPTS, Progress())


def without_taps(manifest: Manifest) -> Manifest:
    entries = tuple(msgspec.structs.replace(entry, taps=False) for entry in manifest.graphs)
    return msgspec.structs.replace(manifest, graphs=entries)


def test_right_graphs_pass_in_every_part(golden: GoldenGraphs) -> None:
    report = compared(golden)
    assert report["passed"], report["explanation"]
    measured = {(part["layer"], part["part"]) for part in report["sublayers"] if part["graph"] == "decode-4"}
    assert {(layer, part) for layer in range(8) for part in ("attn", "ffn", "window record")} <= measured
    assert {(1, "engram"), (3, "open group"), (4, "compressed record"), (4, "index key record")} <= measured
    assert {(0, "token history"), (7, "final norm")} <= measured
    assert all(part["rms_ratio"] <= 1e-3 for part in report["sublayers"]), report["sublayers"]


@pytest.mark.parametrize("part", NATIVE_MISTAKES)
def test_a_wrong_part_is_named_where_the_whole_model_would_pass(golden: GoldenGraphs, part: str) -> None:
    mistake = NATIVE_MISTAKES[part]
    report = compared(golden, mistake)
    assert not report["passed"]
    (layer,) = mistake.layers
    assert report["first_differing_layer"] == layer
    assert f"the first part out of its limit is layer {layer} {part} of " in report["explanation"]
    failed = {(bad["layer"], bad["part"]) for bad in report["sublayers"] if not bad["passed"]}
    assert (layer, part) in failed
    assert all(bad[0] >= layer for bad in failed)


def test_the_coarse_check_alone_says_so_and_passes_a_mild_mistake(golden: GoldenGraphs) -> None:
    mistake = NATIVE_MISTAKES["ffn"]
    report = compared(golden, mistake, without_taps(golden.manifest))
    assert report["passed"] and report["sublayers"] == []
    assert "coarse" in report["explanation"] and "taps" in report["explanation"]


def test_dequantising_once_or_at_every_step_gives_the_same_report(
    golden: GoldenGraphs, golden_dir: Path
) -> None:
    once = eager_model(golden.manifest, golden_dir)
    assert once.weights.keys() < golden.store.keys(), "scales went with the matrices that were dequantised"
    every_step = EagerModel(once.config, once.precision, golden.store, once.layout)
    reports = [
        compare(golden.manifest, golden.graphs(), golden.regions(), eager, [[5, 6, 7]], Progress())
        for eager in (once, every_step)
    ]
    assert reports[0] == reports[1] and len(reports[0]["sublayers"]) == 72
