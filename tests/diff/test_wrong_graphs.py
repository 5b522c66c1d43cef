"""Deliberately wrong graphs are found, and the layer named, in float32 precision; the right ones pass."""

import random
from pathlib import Path
from typing import Any

import pytest
from diff_graphs import GoldenGraphs, golden_graphs
from wrong_graphs import LAYERS, MISTAKES, Mistake

from deepinfer.diff import compare
from deepinfer.progress import Progress

# short enough for many comparisons; both cross open groups, the second window, candidates and top-k
PROMPTS = [random.Random(5).choices(range(500), k=length) for length in (2, 37)]


@pytest.fixture(scope="module")
def golden(golden_dir: Path) -> GoldenGraphs:
    return golden_graphs(golden_dir, "float32")


def compared(golden: GoldenGraphs, mistake: Mistake | None = None) -> dict[str, Any]:
    golden.eager.rewind()
    graphs = golden.graphs(mistake.apply if mistake else None)
    return compare(golden.manifest, graphs, golden.regions(), golden.eager, PROMPTS, Progress())


def test_right_graphs_pass_with_room(golden: GoldenGraphs) -> None:
    report = compared(golden)
    assert report["passed"], report["explanation"]
    assert report["first_differing_layer"] is None
    for graph in report["graphs"]:
        assert graph["max_abs_error"] <= 1e-5 and graph["rows"] >= 9, graph
        assert graph["top1_agreement"] == 1.0 and graph["excluded_rows"] == 0


def test_replayed_eager_results_do_not_hide_anything(golden: GoldenGraphs) -> None:
    first, second = compared(golden), compared(golden)
    assert first == second


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name.replace(" ", "-"))
def test_a_wrong_graph_fails_and_the_layer_is_named(golden: GoldenGraphs, mistake: Mistake) -> None:
    report = compared(golden, mistake)
    assert not report["passed"]
    wrong = {graph["name"]: graph for graph in report["graphs"] if not graph["passed"]}
    assert set(wrong) == {"decode-4", "prefill-16"}
    # far enough from the limit that another machine's last bits change nothing
    assert all(graph["max_abs_error"] > 5e-4 for graph in wrong.values()), wrong
    assert report["first_differing_layer"] == mistake.first_differing
    if mistake.first_differing is None:
        assert mistake.layers == (LAYERS - 1,)
        assert f"after the window of layer {LAYERS - 1}, in that layer" in report["explanation"]
    else:
        assert f"layer {mistake.first_differing} is the first whose window record" in report["explanation"]
        assert f"in layer {mistake.first_differing - 1} after its own window" in report["explanation"]


def test_the_mistakes_are_of_many_kinds() -> None:
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES) >= 10
    assert {layer for mistake in MISTAKES for layer in mistake.layers} == set(range(LAYERS))
