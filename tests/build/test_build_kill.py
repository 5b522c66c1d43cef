"""Killed at every stage: the output is absent or complete, nothing runs on, and the next build cleans up."""

import fcntl
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_build
from tiny_build import forked, processes_with, wait_for
from tiny_checkpoint import write_tiny_checkpoint

from deepinfer.artifacts import atomic, open_artifact, read_certificate
from deepinfer.compile import compile_model

Stubs = Callable[..., Callable[[], list[str]]]
Caches = Callable[..., Path]

# What Python itself reports of a process that changes files or starts others.
EVENTS = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.utime", "subprocess.Popen"}
# What it does not report is wrapped.
WRAPPED = ((os, "write"), (os, "fsync"), (fcntl, "flock"), (atomic, "exchange"))
MAX_STAGES = 1000


def die_at(number: int) -> None:
    """In a child: end by SIGKILL just before the n-th thing from now on that changes a file or a process."""
    counted = 0

    def count() -> None:
        nonlocal counted
        counted += 1
        if counted == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event: str, arguments: tuple) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT
        if writes or event in EVENTS:
            count()

    for module, name in WRAPPED:
        setattr(module, name, _counted(getattr(module, name), count))
    sys.addaudithook(audit)


def _counted(real: Callable, count: Callable[[], None]) -> Callable:
    def call(*arguments: object, **options: object) -> object:
        count()
        # the disk's own pace is not what is tested
        return None if real.__name__ == "fsync" else real(*arguments, **options)

    return call


def _killed_at(number: int, build: Callable[[], object]) -> bool:
    """Whether a build in a child process was killed at its n-th stage; False: it ended before."""

    def work() -> None:
        die_at(number)
        build()

    code = os.waitstatus_to_exitcode(os.waitpid(forked(work), 0)[1])
    assert code in (0, -signal.SIGKILL), "the build failed by itself"
    return code != 0


def _id_of(out: Path) -> str | None:
    """The id of a complete artifact, None when there is nothing; anything between fails."""
    if not os.path.lexists(out):
        return None
    with open_artifact(out) as artifact:
        return artifact.artifact_id


def _sweep(step: int, parent: Path, cache: Path, built: Callable[[], object], ids: set[str | None]) -> int:
    """Kill at every `step`-th stage; returns how many kills there were.

    Where nothing is among the `ids`, every build starts without a target.
    """
    out, kills = parent / "out", 0
    for number in range(1, MAX_STAGES, step):
        if not _killed_at(number, built):
            break
        kills += 1
        assert _id_of(out) in ids
        wait_for(lambda: not processes_with(str(cache)))
        if None in ids and out.exists():  # killed after the rename
            shutil.rmtree(out)
    assert _id_of(out) in ids - {None}
    assert [path.name for path in parent.iterdir()] == ["out"], "the build that succeeded did not clean up"
    assert list((cache / "work").iterdir()) == []
    assert all(len(path.name) == 64 for path in (cache / "graphs").iterdir())
    return kills


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_every_stage_of_a_first_build(
    step: int,
    tiny_model: Path,
    tiny_artifact: Path,
    tiny_keys: dict[str, str],
    parent: Path,
    make_cache: Caches,
    stub_workers: Stubs,
) -> None:
    """One graph comes from a worker process each time, the others from the cache."""
    cache = make_cache("prefill-8", "decode-1")
    started = stub_workers()

    def built() -> None:
        for path in (cache / "graphs" / tiny_keys["logits-1"]).glob("entry.json"):
            path.unlink()  # damaged: it is built anew
        tiny_build.build(tiny_model, parent / "out", cache)

    kills = _sweep(step, parent, cache, built, {None, _id_of(tiny_artifact)})
    assert kills * step > 80, "the stages were not seen"
    assert set(started()) == {"logits-1"}


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_every_stage_of_a_replacement(
    step: int, tiny_model: Path, tiny_artifact: Path, parent: Path, tmp_path: Path, make_cache: Caches
) -> None:
    """The old artifact or the new one is there, at every moment."""
    cache, out = make_cache(), parent / "out"
    other = write_tiny_checkpoint(tmp_path / "other", seed=1, window_only=True)
    old_id = tiny_build.build(other, out, cache).artifact_id
    new_id = _id_of(tiny_artifact)
    assert old_id != new_id

    def built() -> None:
        tiny_build.build(tiny_model, out, cache, force=True)

    assert _sweep(step, parent, cache, built, {old_id, new_id}) * step > 60


def test_killed_while_the_artifact_is_compared_with_the_model(
    tiny_model: Path, parent: Path, make_cache: Caches
) -> None:
    """The artifact is complete by then; what is missing is its certificate."""
    cache, out = make_cache(), parent / "out"
    whole = tiny_build.build(tiny_model, parent / "whole", cache).artifact_id
    assert read_certificate(parent / "whole", "eager") is None

    def work() -> None:
        def die(*_: object, **__: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        compile_model.__globals__["certified_once"] = die
        compile_model(tiny_model, out, tiny_build.tiny_options(), cache_dir=cache)

    assert os.waitstatus_to_exitcode(os.waitpid(forked(work), 0)[1]) == -signal.SIGKILL
    assert _id_of(out) == whole
    result = compile_model(tiny_model, out, tiny_build.tiny_options(), cache_dir=cache, force=True)
    assert result.certified and result.artifact_id == whole
    assert sorted(path.name for path in parent.iterdir()) == ["out", "whole"]


def test_killed_at_any_time_while_workers_run(
    tiny_model: Path, tiny_artifact: Path, parent: Path, make_cache: Caches, stub_workers: Stubs
) -> None:
    cache, out, moments = make_cache(every=False), parent / "out", random.Random(5)
    stub_workers(seconds=0.1)
    options = tiny_build.tiny_options(jobs=2)
    outcomes = []
    for _ in range(20):
        builder = forked(lambda: tiny_build.build(tiny_model, out, cache, options=options))
        time.sleep(moments.uniform(0.0, 0.7))
        tiny_build.kill(builder)
        wait_for(lambda: not processes_with(str(cache)))
        outcomes.append(_id_of(out))
        if out.exists():
            shutil.rmtree(out)
    assert set(outcomes) <= {None, _id_of(tiny_artifact)}
    tiny_build.build(tiny_model, out, cache)
    assert tiny_build.tree(parent) == {
        f"out/{path}": data for path, data in tiny_build.tree(tiny_artifact).items()
    }
    assert list((cache / "work").iterdir()) == []
