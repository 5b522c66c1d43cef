"""What the golden checkpoint compiles to is the recorded tree; after a wanted change, refresh and review it.

python tests/golden/refresh.py
"""

import json
from pathlib import Path

import golden_tree
import pytest
import tiny_build

from deepinfer.artifacts import open_artifact

RECORDED = Path(__file__).parent.parent / "golden" / "v41-tiny"
REFRESH = "the compiled result moved; if that is wanted: python tests/golden/refresh.py\n"


@pytest.fixture(scope="module")
def recorded() -> dict[str, bytes]:
    """The tree as it is checked in."""
    return tiny_build.tree(RECORDED)


def _same(recorded: dict[str, bytes], found: dict[str, bytes]) -> None:
    moved = golden_tree.differences({path: recorded[path] for path in found}, found)
    assert not moved, REFRESH + "\n".join(moved)


def test_the_plan_of_a_build_is_the_recorded_one(golden_dir: Path, recorded: dict[str, bytes]) -> None:
    """Model, cache layout, limits, options, passes, graphs and the bytes of the weights."""
    _same(recorded, {"manifest.json": golden_tree.planned_manifest(golden_dir)})
    graphs = {graph["name"] for graph in json.loads(recorded["manifest.json"])["graphs"]}
    assert {path.split("/")[1] for path in recorded if path.startswith("graphs/")} == graphs


def test_a_build_gives_the_recorded_graphs(float32_artifact: Path, recorded: dict[str, bytes]) -> None:
    found = {}
    with open_artifact(float32_artifact) as artifact:
        for path in artifact.paths:
            if path.endswith(("/graph.txt", "/passes.json")):
                data = artifact.read_file(path)
                found[path] = golden_tree.readable(data) if path.endswith(".json") else data
        (weights,) = [f for f in artifact.manifest.files if f.path == golden_tree.WEIGHTS]
    assert found.keys() == recorded.keys() - {"manifest.json"}
    _same(recorded, found)
    assert json.loads(recorded["manifest.json"])["weight_file_sha256"] == weights.sha256


@pytest.mark.parametrize(
    "name",
    [
        "logits-4",
        pytest.param("decode-4", marks=pytest.mark.slow),
        pytest.param("prefill-16", marks=pytest.mark.slow),
    ],
)
def test_capture_and_passes_alone_give_the_recorded_graphs(
    name: str, golden_dir: Path, recorded: dict[str, bytes]
) -> None:
    """What the refresh does, in a process with another history and other hashes of strings."""
    (job,) = [job for job in golden_tree.planned_jobs(golden_dir) if job.spec.name == name]
    found = golden_tree.graph_files(job)
    _same(recorded, {f"graphs/{name}/{file}": data for file, data in found.items()})


def test_every_pass_is_counted(recorded: dict[str, bytes]) -> None:
    passes = [step["name"] for step in json.loads(recorded["manifest.json"])["passes"]]
    for path, data in recorded.items():
        if path.endswith("passes.json"):
            counts = golden_tree.pass_counts(data)
            assert list(counts) == passes
            assert sum(counts.values()) > 0 or "logits" in path


def test_what_moved_is_shown(recorded: dict[str, bytes]) -> None:
    assert golden_tree.differences(recorded, dict(recorded)) == []
    path = "graphs/logits-4/graph.txt"
    changed = {**recorded, path: recorded[path].replace(b"float32", b"bfloat16", 1)}
    text = "\n".join(golden_tree.differences(recorded, changed))
    assert f"--- recorded/{path}" in text and "bfloat16" in text and "manifest.json" not in text
    del changed["graphs/decode-4/graph.txt"]
    report = golden_tree.differences(recorded, changed)
    assert "--- recorded/graphs/decode-4/graph.txt" in report
    assert any(line.endswith("more lines of graphs/decode-4/graph.txt") for line in report)


def test_the_tree_names_no_machine(recorded: dict[str, bytes]) -> None:
    for path, data in recorded.items():
        for word in (b"x86_64", b"gcc", b"g++", b"/usr", b".py", b"0x"):
            assert word not in data, (path, word)
