"""Killed, out of space, or two at once: the target is absent or complete, and the next build cleans up."""

import errno
import fcntl
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import artifact_factory
import pytest

from deepinfer.artifacts import ArtifactWriter, BuildCache, TrustStore, open_artifact
from deepinfer.artifacts import atomic as atomic_module
from deepinfer.errors import ArtifactUntrustedError, ArtifactWriteError, BuildError, DeepInferError

pytestmark = pytest.mark.usefixtures("fast_sync")

STEPS = ("open", "mkdir", "rename", "unlink", "rmdir", "fsync", "write")


def install_checkpoints(at_checkpoint: Callable[[str, tuple], None]) -> None:
    """Call `at_checkpoint(name, arguments)` before every system call that changes the disk (in a child)."""
    for name in STEPS:
        setattr(os, name, _checked(getattr(os, name), name, at_checkpoint))
    atomic_module.exchange = _checked(atomic_module.exchange, "exchange", at_checkpoint)
    fcntl.flock = _checked(fcntl.flock, "flock", at_checkpoint)


def _checked(real: Callable, name: str, at_checkpoint: Callable[[str, tuple], None]) -> Callable:
    def call(*args: object, **kwargs: object) -> object:
        at_checkpoint(name, args)
        return real(*args, **kwargs)

    return call


def killed_at(number: int, work: Callable[[], object]) -> bool:
    """Run `work` in a child that is killed at its n-th system call; False when it ended before that."""
    child = os.fork()
    if child == 0:
        try:
            _run_until(number, work)
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, "the child failed by itself"
    return False


def _run_until(number: int, work: Callable[[], object]) -> None:
    calls = 0
    real_write = os.write

    def count(name: str, args: tuple) -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            if name == "write":  # half of it arrives
                real_write(args[0], bytes(args[1])[: len(args[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

    install_checkpoints(count)
    work()


@pytest.mark.parametrize(
    ("replace", "swap"),
    [(False, True), (True, True), (True, False)],
    ids=["new", "replace", "replace_by_two_renames"],
)
def test_killed_at_every_step_leaves_old_or_new_and_the_next_build_cleans_up(
    memory_path: Path, replace: bool, swap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not swap:
        monkeypatch.setattr(atomic_module, "exchange", lambda *_: False)
    out = memory_path / "out.di"
    new = artifact_factory.build_smallest(memory_path / "new.di")
    kills, outcomes = 0, set()
    while True:
        old = artifact_factory.build_smallest(out, force=True, precision="float32") if replace else None
        if not killed_at(kills + 1, lambda: artifact_factory.build_smallest(out, force=True)):
            break
        kills += 1
        if out.exists():
            with open_artifact(out) as artifact:
                outcomes.add(artifact.artifact_id)
        else:
            outcomes.add(None)
        _assert_recovers(memory_path, out, old)
    assert kills > 45, "the checkpoints did not fire"
    assert outcomes <= ({old, new} if swap or not replace else {old, new, None}), (
        "something half-made appeared"
    )
    assert new in outcomes
    assert old in outcomes


def _assert_recovers(memory_path: Path, out: Path, old: str | None) -> None:
    """The next build beside it removes what the dead one left, except an old artifact it had set aside."""
    artifact_factory.build_smallest(out, force=True)
    left = {path.name for path in memory_path.iterdir()} - {"out.di", "new.di"}
    for name in left:
        assert name.startswith("out.di.old-")
        # removing the old one may have begun; until the new one was in place it is whole
        with open_artifact(out) as artifact:
            assert artifact.artifact_id != old
        atomic_module.shutil.rmtree(memory_path / name)
    if old is None:
        atomic_module.shutil.rmtree(out)


def test_a_dead_build_leaves_the_old_artifact_whole_when_it_was_only_set_aside(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = artifact_factory.build_smallest(memory_path / "out.di")
    monkeypatch.setattr(atomic_module, "exchange", lambda *_: False)
    for number in range(1, 500):
        if not killed_at(number, lambda: artifact_factory.build_smallest(memory_path / "out.di", force=True)):
            pytest.fail("the target was never absent")
        if not (memory_path / "out.di").exists():
            break
    (aside,) = memory_path.glob("out.di.old-*")
    with open_artifact(aside) as artifact:
        assert artifact.artifact_id == old


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("step", ["write", "fsync", "mkdir", "rename", "open"])
def test_a_failing_call_leaves_the_target_as_it_was(
    tmp_path: Path, step: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = artifact_factory.build_smallest(tmp_path / "out.di", precision="float32")
    real, failures = getattr(os, step), 0
    while True:
        calls = 0

        def failing(*args: object, _at: int = failures + 1, **kwargs: object) -> object:
            nonlocal calls
            calls += 1
            if calls == _at:
                raise OSError(code, os.strerror(code))
            return real(*args, **kwargs)

        monkeypatch.setattr(os, step, failing)
        try:
            new = artifact_factory.build_smallest(tmp_path / "out.di", force=True)
        except ArtifactWriteError as error:
            # a failed read of the old artifact is an answer of its own: it is not judged replaceable
            assert os.strerror(code) in str(error) or (step == "open" and "not an artifact" in str(error))
        else:
            break
        finally:
            monkeypatch.setattr(os, step, real)
        failures += 1
        last = open_artifact(tmp_path / "out.di").artifact_id
        leftovers = [path.name for path in tmp_path.iterdir() if path.name != "out.di"]
        assert leftovers == []
        if step != "fsync":
            assert last == old
    assert failures >= (1 if step == "rename" else 3)
    assert open_artifact(tmp_path / "out.di").artifact_id == new


def test_a_full_disk_is_named_with_what_to_do(tmp_path: Path) -> None:
    """A real limit of the kernel, not an injected one: no file of this child may pass 100 bytes."""
    resource = pytest.importorskip("resource")
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
            artifact_factory.build(tmp_path / "out.di")
        except ArtifactWriteError as error:
            os._exit(42 if "free some space" in str(error) else 1)
        except BaseException:
            os._exit(2)
        os._exit(3)
    assert os.WEXITSTATUS(os.waitpid(child, 0)[1]) == 42
    assert list(tmp_path.iterdir()) == []


def test_two_builders_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    out = tmp_path / "out.di"
    with ArtifactWriter(out, force=True) as first:
        artifact_factory.add_files(first)
        with ArtifactWriter(out, force=True) as second:
            artifact_factory.add_files(second)
            second_id = second.finish(artifact_factory.make_manifest(precision="float32"))
            assert open_artifact(out).artifact_id == second_id
            first_id = first.finish(artifact_factory.make_manifest())
    assert open_artifact(out).artifact_id == first_id != second_id
    assert [path.name for path in tmp_path.iterdir()] == ["out.di"]


def test_without_force_the_second_to_finish_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out.di"
    with ArtifactWriter(out) as first, ArtifactWriter(out) as second:
        artifact_factory.add_files(first)
        artifact_factory.add_files(second)
        first_id = first.finish(artifact_factory.make_manifest())
        with pytest.raises(ArtifactWriteError, match="not empty"):
            second.finish(artifact_factory.make_manifest(precision="float32"))
    assert open_artifact(out).artifact_id == first_id
    assert [path.name for path in tmp_path.iterdir()] == ["out.di"]


def test_processes_racing_for_one_target_leave_one_complete_artifact(tmp_path: Path) -> None:
    out = tmp_path / "out.di"
    expected = {
        artifact_factory.build(tmp_path / "a", precision="float32"),
        artifact_factory.build(tmp_path / "b"),
    }
    children = []
    for precision in ("native", "float32", "native"):
        child = os.fork()
        if child == 0:
            try:
                for _ in range(15):
                    artifact_factory.build(out, force=True, precision=precision)
                os._exit(0)
            except BaseException:
                os._exit(1)
        children.append(child)
    seen = set()
    while children:
        done, status = os.waitpid(children[0], os.WNOHANG)
        if done:
            assert os.WEXITSTATUS(status) == 0
            children.pop(0)
        try:
            seen.add(open_artifact(out).artifact_id)
        except DeepInferError:
            continue  # it was swapped out and deleted while it was being read: refused, not misread
    assert seen <= expected
    assert open_artifact(out).artifact_id in expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "out.di"]


def test_cleaning_up_spares_what_is_not_a_dead_builders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, alive = (f"{atomic_module.WRAPPER_PREFIX}{digit * 32}" for digit in "ab")
    linked, file = (f"{atomic_module.WRAPPER_PREFIX}{digit * 32}" for digit in "cd")
    others = [f"{atomic_module.WRAPPER_PREFIX}1234", "deepinfer-build", "data", file]
    for name in (dead, alive, *others[:3]):
        (tmp_path / name / "below").mkdir(parents=True)
    (tmp_path / linked).symlink_to("data")
    (tmp_path / file).write_text("")
    held = os.open(tmp_path / alive, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        artifact_factory.build(tmp_path / "out.di")
    finally:
        os.close(held)
    assert {path.name for path in tmp_path.iterdir()} == {alive, linked, "out.di", *others}
    assert (tmp_path / "data" / "below").is_dir()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)  # another user finds it: not theirs to delete
    artifact_factory.build(tmp_path / "other.di")
    assert (tmp_path / alive / "below").is_dir()


def test_the_trust_store_survives_being_killed_at_every_step(tmp_path: Path) -> None:
    store = TrustStore(tmp_path / "trust")
    store.trust("0" * 64)
    for number in range(1, 100):
        killed = killed_at(number, lambda: store.trust("1" * 64))
        assert set(store.entries()) <= {"0" * 64, "1" * 64}
        assert "0" * 64 in store.entries()
        store.forget("1" * 64)
        store.trust("2" * 64)  # a change removes what the dead writer left
        assert [path.name for path in (tmp_path / "trust").iterdir()] == ["artifacts.json"]
        store.forget("2" * 64)
        if not killed:
            break
    assert number >= 5


def test_the_trust_store_reports_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = TrustStore(tmp_path / "trust")
    store.trust("0" * 64)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(ArtifactUntrustedError, match="No space left"):
            store.trust("1" * 64)
    assert store.entries() == {"0" * 64: "trusted"}
    assert [path.name for path in (tmp_path / "trust").iterdir()] == ["artifacts.json"]


def test_the_build_cache_survives_being_killed_at_every_step(tmp_path: Path) -> None:
    key, files = "a" * 64, {"model.so": b"code", "graph.txt": b"text"}
    root = tmp_path / "cache"
    for number in range(1, 100):
        killed = killed_at(number, lambda: BuildCache(root).put(key, files))
        cache = BuildCache(root)
        assert cache.get(key) in (None, files)
        assert {path.name for path in root.iterdir()} <= {key}
        cache.clear()
        if not killed:
            break
    assert number > 10


def test_the_build_cache_reports_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = BuildCache(tmp_path / "cache")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(BuildError, match="No space left"):
            cache.put("a" * 64, {"x": b"1"})
    assert list((tmp_path / "cache").iterdir()) == []


def test_threads_may_change_the_trust_store_together(tmp_path: Path) -> None:
    def add(first: int) -> None:
        for number in range(first, 40, 4):
            TrustStore(tmp_path / "trust").trust(f"{number:064x}")

    threads = [threading.Thread(target=add, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(TrustStore(tmp_path / "trust").entries()) == 40
