"""The same input gives the same bytes: from other folders, environments, caches and numbers of workers."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_build
from tiny_checkpoint import write_tiny_checkpoint

from deepinfer.artifacts import open_artifact, view_graph

Caches = Callable[..., Path]


def _build_elsewhere(place: Path, cache: Path, model: Path, *flags: str, **variables: str) -> Path:
    """Build in a process of its own that differs in all that must not matter; returns the artifact."""
    folders = {name: place / name for name in ("cwd", "tmp", "deep/er/parent")}
    for folder in folders.values():
        folder.mkdir(parents=True)
    out = folders["deep/er/parent"] / "another-name"
    environment = {
        **os.environ,
        "DEEPINFER_CACHE": str(cache),
        "TMPDIR": str(folders["tmp"]),
        "PYTHONSAFEPATH": "1",
        **variables,
    }
    flags = (*tiny_build.FLAGS, *flags)
    program = "import sys; from deepinfer.cli.compile import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", program, os.path.relpath(model, folders["cwd"]), "-o", str(out), *flags],
        cwd=folders["cwd"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert list(folders["tmp"].iterdir()) == list(folders["cwd"].iterdir()) == []
    return out


def _without_certificates(files: dict[str, bytes]) -> dict[str, bytes]:
    """Certificates are beside the identity: they hold measurements."""
    return {path: data for path, data in files.items() if not path.startswith("reports/eager-")}


def test_two_builds_give_the_same_bytes_and_a_dump_shows_every_pass(
    tiny_model: Path, tiny_artifact: Path, tmp_path: Path, make_cache: Caches
) -> None:
    """All graphs are compiled anew. A copy of the checkpoint, so that not even its place is the same."""
    model = write_tiny_checkpoint(tmp_path / "elsewhere" / "model", window_only=True)
    dump = tmp_path / "dump"
    out = _build_elsewhere(
        tmp_path / "second",
        make_cache(every=False),
        model,
        "--jobs=3",
        DEEPINFER_DUMP=str(dump),
        PYTHONHASHSEED="99",
        OMP_NUM_THREADS="2",
        LC_ALL="C.UTF-8",
    )
    assert _without_certificates(tiny_build.tree(out)) == tiny_build.tree(tiny_artifact)
    _check_dump(dump, out)


def _check_dump(dump: Path, out: Path) -> None:
    """Text before the first pass and after every one, the last of it being what was lowered; all kept too."""
    assert {path.name for path in dump.iterdir()} == set(tiny_build.GRAPHS)
    for name in tiny_build.GRAPHS:
        report = json.loads((out / "graphs" / name / "passes.json").read_bytes())
        steps = ["captured", *(result["name"] for result in report["passes"])]
        texts = sorted((dump / name).iterdir())
        assert [path.stem for path in texts] == [f"{i:02d}-{step}" for i, step in enumerate(steps)]
        kept = [view_graph(out, name, step).text for step in steps]
        assert kept == [path.read_text() for path in texts]
        assert texts[-1].read_bytes() == (out / "graphs" / name / "graph.txt").read_bytes()
        for before, after, result in zip(texts, texts[1:], report["passes"], strict=False):
            assert (before.read_bytes() != after.read_bytes()) == (result["rewrites"] > 0)
    assert b"exp" in (dump / "prefill-8" / "00-captured.txt").read_bytes()


def test_texts_after_every_pass_are_kept_from_the_cache_and_are_not_of_the_artifact(
    tiny_model: Path, tiny_artifact: Path, parent: Path, make_cache: Caches
) -> None:
    result = tiny_build.build(tiny_model, parent / "out", make_cache())
    assert all(graph.from_cache for graph in result.graphs)
    with open_artifact(parent / "out") as artifact:
        assert not [path for path in artifact.paths if path.startswith("reports/") or "pass_texts" in path]
        for name in tiny_build.GRAPHS:
            kept = f"reports/passes-{name}-{artifact.artifact_id[:16]}.json"
            assert (parent / "out" / kept).read_bytes() == (tiny_artifact / kept).read_bytes()
            captured = view_graph(parent / "out", name, "captured").text
            assert captured.startswith("%0 = input ")
            assert view_graph(parent / "out", name).text.startswith("%0 = input ")
    shutil.rmtree(parent / "out" / "reports")
    with open_artifact(parent / "out") as artifact:
        assert artifact.artifact_id == result.artifact_id


@pytest.mark.slow
def test_two_builds_of_all_kinds_of_layers_give_the_same_bytes(tmp_path: Path) -> None:
    """Nothing is shared: neither the op library nor a graph; other folder, other number of workers."""
    outs = []
    for number, variables in enumerate(({}, {"PYTHONHASHSEED": "1", "LC_ALL": "C", "HOME": str(tmp_path)})):
        place = tmp_path / f"place-{number}" / ("x" * number * 20)
        model = write_tiny_checkpoint(place / "model")
        cache = place / "cache"
        outs.append(_build_elsewhere(place, cache, model, f"--jobs={number + 1}", **variables))
    first, second = (_without_certificates(tiny_build.tree(out)) for out in outs)
    assert first.keys() == second.keys()
    assert [path for path in first if first[path] != second[path]] == []
    manifest = json.loads(first["manifest.json"])
    assert {graph["name"] for graph in manifest["graphs"]} == set(tiny_build.GRAPHS)
    assert any(region["kind"] == "paged" for region in manifest["cache"]["regions"])


def test_no_place_and_no_time_is_in_an_artifact(tiny_artifact: Path) -> None:
    places = [os.fsencode(place) for place in (Path.home(), Path.cwd(), tiny_artifact.parent, sys.prefix)]
    for path, data in tiny_build.tree(tiny_artifact).items():
        for place in places:
            assert place not in data, f"{path} names {place!r}"
        if path.endswith((".json", ".txt")):
            assert re.search(rb"20[2-9]\d-\d\d-\d\d", data) is None, path


def test_the_number_of_workers_does_not_enter(
    tiny_model: Path,
    tiny_artifact: Path,
    parent: Path,
    make_cache: Caches,
    stub_workers: Callable[..., object],
) -> None:
    stub_workers()
    for jobs in (2, 8):
        options = tiny_build.tiny_options(jobs=jobs)
        cache = make_cache(at=f"cache-{jobs}", every=False)
        tiny_build.build(tiny_model, parent / str(jobs), cache, options=options)
        assert tiny_build.tree(parent / str(jobs)) == tiny_build.tree(tiny_artifact)


def test_spelling_of_the_options_does_not_enter(
    tiny_model: Path, tiny_artifact: Path, parent: Path, make_cache: Caches
) -> None:
    options = tiny_build.tiny_options(decode_rows=(1, 1), logits_rows=(1,), num_blocks=3)
    assert tiny_build.tiny_options().num_blocks is None
    tiny_build.build(tiny_model, parent / "out", make_cache(), options=options)
    assert tiny_build.tree(parent / "out") == tiny_build.tree(tiny_artifact)
