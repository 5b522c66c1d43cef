"""Deliberately wrong graphs are found, and the layer named, in float32 precision; the right ones pass."""

import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from diff_graphs import GoldenGraphs, golden_graphs
from torch import Tensor
from wrong_graphs import LAYERS, MISTAKES, Mistake

from deepinfer import tolerances as limits
from deepinfer.cli.common import to_json
from deepinfer.comparison import Graph
from deepinfer.diff import check_prompts, compare
from deepinfer.diff_report import to_junit, to_text
from deepinfer.errors import RequestError
from deepinfer.progress import Progress

# short enough for many comparisons; both cross open groups, the second window, candidates and top-k
PROMPTS = [random.Random(5).choices(range(500), k=length) for length in (2, 37)]


@pytest.fixture(scope="module")
def golden(golden_dir: Path) -> GoldenGraphs:
    return golden_graphs(golden_dir, "float32")


def compared(
    golden: GoldenGraphs, mistake: Mistake | None = None, graphs: Mapping[str, Graph] | None = None
) -> dict[str, Any]:
    golden.eager.rewind()
    graphs = graphs or golden.graphs(mistake.apply if mistake else None)
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


class Spoiled:
    """A right graph whose result is changed."""

    def __init__(self, graph: Graph, value: float, call: int) -> None:
        self.graph, self.value, self.call, self.calls = graph, value, call, 0

    def run(self, inputs: list[Tensor]) -> Sequence[Tensor]:
        outputs = list(self.graph.run(inputs))
        if self.calls == self.call:
            outputs[0] = outputs[0].clone()
            outputs[0][0, 3] = self.value
        self.calls += 1
        return outputs


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["decode-4", "logits-4"])
def test_one_value_that_is_not_finite_fails_and_is_reported(
    golden: GoldenGraphs, name: str, value: float
) -> None:
    graphs: dict = golden.graphs()
    graphs[name] = Spoiled(graphs[name], value, call=5)
    report = {"artifact_id": "0" * 64, **compared(golden, graphs=graphs)}
    assert not report["passed"]
    failed = [graph for graph in report["graphs"] if not graph["passed"]]
    assert name in [graph["name"] for graph in failed] or name == "logits-4"
    assert failed and all(graph["max_abs_error"] is None for graph in failed)
    again = json.loads(to_json(report), parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    assert [g["max_abs_error"] for g in again["graphs"] if not g["passed"]] == [None] * len(failed)
    assert "<failure" in to_junit(report) and to_text(report).startswith("different")


def test_margins_of_the_model_reach_the_verdict(
    golden: GoldenGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = {**limits.TOLERANCES["float32"], limits.MARGIN: 1e3}
    monkeypatch.setattr(limits, "strictest", lambda recorded, precision: wide)
    report = compared(golden)
    assert not report["passed"], "equal graphs prove nothing on rows that are all left out"
    steps = [graph for graph in report["graphs"] if graph["phase"] != "logits"]
    assert all(graph["excluded_rows"] == graph["rows"] > 0 and not graph["passed"] for graph in steps)


class ForgetsPlaces:
    """A graph that takes each request's slot for the number of its line."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def run(self, inputs: list[Tensor]) -> Sequence[Tensor]:
        changed = list(inputs)
        if len(inputs) > 1:
            slots = inputs[4]
            changed[4] = torch.where(slots > 0, torch.arange(1, 1 + len(slots)), 0).clamp(max=3)
        return self.graph.run(changed)


def test_a_graph_that_ignores_the_slots_it_is_given_fails(golden: GoldenGraphs) -> None:
    right = golden.graphs()
    graphs = {name: ForgetsPlaces(graph) for name, graph in right.items()}
    assert not compared(golden, graphs=graphs)["passed"]


class ReadsUnwritten:
    """A graph that adds a little of what it was never given: a record of a block that nobody wrote."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def run(self, inputs: list[Tensor]) -> Sequence[Tensor]:
        outputs = list(self.graph.run(inputs))
        if len(inputs) > 1:
            block = inputs[3][0, 0]
            paged = next(region for region in inputs[8:] if region.shape[1] == 128)
            outputs[0] = outputs[0] + paged[block, -1].sum() * 1e-3
        return outputs


def test_memory_that_nobody_wrote_is_not_taken_for_zeros(golden: GoldenGraphs) -> None:
    graphs = {name: ReadsUnwritten(graph) for name, graph in golden.graphs().items()}
    assert not compared(golden, graphs=graphs)["passed"]


def test_prompts_are_checked(golden: GoldenGraphs) -> None:
    with pytest.raises(RequestError, match="no prompt"):
        check_prompts([], golden.manifest)
    for bad in ([], [1] * 257, [512], [-1]):
        with pytest.raises(RequestError):
            check_prompts([[1], bad], golden.manifest)
