"""Several builders at once: one complete artifact, never a mixture; one cache serves them all."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_build
from tiny_build import forked
from tiny_checkpoint import write_tiny_checkpoint

from deepinfer import compile
from deepinfer.artifacts import open_artifact
from deepinfer.cli import compile as command
from deepinfer.errors import ArtifactWriteError

Stubs = Callable[..., Callable[[], list[str]]]
Caches = Callable[..., Path]


@pytest.fixture
def models(tmp_path: Path, tiny_model: Path) -> list[Path]:
    """Two checkpoints with the same config and other weights: their graphs are the same."""
    return [tiny_model, write_tiny_checkpoint(tmp_path / "other", seed=1, window_only=True)]


@pytest.fixture
def expected(models: list[Path], tmp_path: Path, make_cache: Caches) -> list[dict[str, bytes]]:
    """The artifacts of both checkpoints."""
    cache = make_cache(at="cache-of-expected")
    trees = []
    for number, model in enumerate(models):
        tiny_build.build(model, tmp_path / f"expected-{number}", cache)
        trees.append(tiny_build.tree(tmp_path / f"expected-{number}"))
    return trees


def _exit_codes(children: list[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


@pytest.mark.parametrize("force", [False, True])
def test_two_builders_of_one_target_leave_one_whole_artifact(
    force: bool,
    models: list[Path],
    expected: list[dict[str, bytes]],
    parent: Path,
    make_cache: Caches,
    stub_workers: Stubs,
) -> None:
    cache, out = make_cache(every=False), parent / "out"
    stub_workers(seconds=0.05)
    winners = set()
    for attempt in range(6):
        read_end, write_end = os.pipe()

        def start(model: Path, start_line: int = read_end, other_end: int = write_end) -> int:
            def work() -> None:
                os.close(other_end)
                os.read(start_line, 1)  # both go when the parent closes its end
                tiny_build.build(model, out, cache, force=force)

            return forked(work)

        children = [start(model) for model in models[:: 1 if attempt % 2 else -1]]
        os.close(read_end)
        os.close(write_end)
        codes = _exit_codes(children)
        assert sorted(codes) == ([0, 0] if force else [0, 1])
        found = tiny_build.tree(out)
        assert found in expected, "a mixture"
        winners.add(expected.index(found))
        assert [path.name for path in parent.iterdir()] == ["out"]
        assert list((cache / "work").iterdir()) == []
        if not force:
            out.rename(parent.parent / f"done-{attempt}")
    assert winners


def test_the_second_of_two_is_told_who_was_first(
    tiny_model: Path,
    parent: Path,
    make_cache: Caches,
    stub_workers: Stubs,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It had found the target free when it began."""
    cache, out = make_cache(), parent / "out"
    stub_workers()
    real = compile._write_weights

    def another_finishes(*arguments: object) -> int:
        with monkeypatch.context() as patch:
            patch.setattr(compile, "_write_weights", real)
            tiny_build.build(tiny_model, out, cache)
        return real(*arguments)

    monkeypatch.setattr(compile, "_write_weights", another_finishes)
    monkeypatch.setenv("DEEPINFER_CACHE", str(cache))
    assert command.main([str(tiny_model), "-o", str(out), *tiny_build.FLAGS]) == 4
    message = capsys.readouterr().err
    assert "not empty" in message and "--force" in message and str(out) in message
    with open_artifact(out):
        assert [path.name for path in parent.iterdir()] == ["out"]


def test_builders_that_share_a_cache_do_not_disturb_each_other(
    models: list[Path],
    expected: list[dict[str, bytes]],
    parent: Path,
    make_cache: Caches,
    stub_workers: Stubs,
) -> None:
    cache = make_cache(every=False)
    started = stub_workers(seconds=0.1)

    def start(number: int) -> int:
        options = tiny_build.tiny_options(jobs=2)
        return forked(
            lambda: tiny_build.build(models[number % 2], parent / str(number), cache, options=options)
        )

    assert _exit_codes([start(number) for number in range(4)]) == [0] * 4
    for number in range(4):
        assert tiny_build.tree(parent / str(number)) == expected[number % 2]
    assert 3 <= len(started()) <= 12
    assert list((cache / "work").iterdir()) == []
    assert len(list((cache / "graphs").iterdir())) == 3


def test_builds_in_threads_of_one_process(
    models: list[Path],
    expected: list[dict[str, bytes]],
    parent: Path,
    make_cache: Caches,
    stub_workers: Stubs,
) -> None:
    cache = make_cache(every=False)
    stub_workers(seconds=0.05)
    failures: list[Exception] = []

    def work(number: int) -> None:
        try:
            tiny_build.build(models[number % 2], parent / str(number), cache)
        except ArtifactWriteError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for number in range(3):
        assert tiny_build.tree(parent / str(number)) == expected[number % 2]
