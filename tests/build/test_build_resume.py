"""What was finished is never built again: after an interruption, with another bucket, without a change."""

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_build
from tiny_checkpoint import write_tiny_checkpoint

from deepinfer import build_key
from deepinfer.artifacts import open_artifact
from deepinfer.errors import BuildError

Stubs = Callable[..., Callable[[], list[str]]]
Caches = Callable[..., Path]


def _cached(result: tiny_build.CompileResult) -> dict[str, bool]:
    return {graph.name: graph.from_cache for graph in result.graphs}


def _without_reports(files: dict[str, bytes]) -> dict[str, bytes]:
    """Those hold the artifact's id, in their names too."""
    return {path: data for path, data in files.items() if not path.startswith("reports/")}


def test_an_interrupted_build_goes_on_where_it_stopped(
    tiny_model: Path, parent: Path, make_cache: Caches, stub_workers: Stubs
) -> None:
    cache, out = make_cache(every=False), parent / "out"
    started = stub_workers(fail={"decode-1": "out of luck"})
    with pytest.raises(BuildError, match="decode-1: .* exit code 3: out of luck"):
        tiny_build.build(tiny_model, out, cache)
    assert started() == ["prefill-8", "decode-1"]
    assert list(parent.iterdir()) == []
    started = stub_workers()
    result = tiny_build.build(tiny_model, out, cache)
    assert started() == ["decode-1", "logits-1"]
    assert _cached(result) == {"prefill-8": True, "decode-1": False, "logits-1": False}
    with open_artifact(out) as artifact:
        assert artifact.artifact_id == result.artifact_id


def test_one_more_bucket_compiles_one_more_graph(
    tiny_model: Path, parent: Path, make_cache: Caches, stub_workers: Stubs
) -> None:
    cache, started = make_cache(), stub_workers()
    options = tiny_build.tiny_options(decode_rows=(1, 2), logits_rows=(1,))
    result = tiny_build.build(tiny_model, parent / "out", cache, options=options)
    assert started() == ["decode-2"]
    assert _cached(result) == {"prefill-8": True, "decode-2": False, "decode-1": True, "logits-1": True}


def test_an_unchanged_build_starts_no_process_and_gives_the_same_artifact(
    tiny_model: Path, tiny_artifact: Path, parent: Path, make_cache: Caches, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make_cache()

    def start(*_: object) -> None:
        raise AssertionError("a worker was started")

    monkeypatch.setattr("deepinfer.build_process.WorkerProcesses._start", start)
    result = tiny_build.build(tiny_model, parent / "out", cache)
    assert all(_cached(result).values())
    assert tiny_build.tree(parent / "out") == tiny_build.tree(tiny_artifact)


def test_other_weights_change_the_weights_and_no_graph(
    tiny_artifact: Path, parent: Path, tmp_path: Path, make_cache: Caches, stub_workers: Stubs
) -> None:
    other = write_tiny_checkpoint(tmp_path / "other", seed=1, window_only=True)
    started = stub_workers()
    tiny_build.build(other, parent / "out", make_cache())
    before, after = (_without_reports(tiny_build.tree(out)) for out in (tiny_artifact, parent / "out"))
    assert before.keys() == after.keys()
    changed = {path for path in before if before[path] != after[path]}
    assert changed == {"manifest.json", "weights/model.safetensors"}
    assert started() == []


def test_a_changed_source_builds_every_graph_again(
    tiny_model: Path,
    parent: Path,
    make_cache: Caches,
    stub_workers: Stubs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, started = make_cache(), stub_workers()
    monkeypatch.setattr(build_key, "sources_sha256", lambda: "0" * 64)
    tiny_build.build(tiny_model, parent / "out", cache)
    assert sorted(started()) == sorted(tiny_build.GRAPHS)


def test_the_key_covers_every_source_that_makes_a_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each changed, added or renamed file gives another digest."""
    folder = tmp_path / "passes"
    folder.mkdir()
    for name in ("a.py", "b.cpp", "c.h"):
        (folder / name).write_text("1")
    package = type("Package", (), {"__path__": [str(folder)], "__name__": "deepinfer.passes"})
    monkeypatch.setattr(build_key, "_PACKAGES", (package,))
    digest = build_key.sources_sha256.__wrapped__
    seen = {digest()}
    for change in (
        lambda: (folder / "a.py").write_text("2"),
        lambda: (folder / "b.cpp").write_text("2"),
        lambda: (folder / "c.h").write_text("2"),
        lambda: (folder / "d.py").write_text(""),
        lambda: (folder / "d.py").rename(folder / "e.py"),
    ):
        change()
        seen.add(digest())
    assert len(seen) == 6
    (folder / "notes.txt").write_text("no source")
    assert digest() in seen


def test_a_damaged_entry_is_built_again(
    tiny_model: Path,
    tiny_artifact: Path,
    tiny_keys: dict[str, str],
    parent: Path,
    make_cache: Caches,
    stub_workers: Stubs,
) -> None:
    cache, started = make_cache(), stub_workers()
    damaged = cache / "graphs" / tiny_keys["decode-1"] / "model.so"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    tiny_build.build(tiny_model, parent / "out", cache)
    assert started() == ["decode-1"]
    assert tiny_build.tree(parent / "out") == tiny_build.tree(tiny_artifact)
