"""Where an artifact cannot be written: refused early, or failing half way with nothing left."""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_build

from deepinfer.artifacts import open_artifact
from deepinfer.cli import compile as command
from deepinfer.errors import ArtifactWriteError, DeepInferError, ResourceError
from deepinfer.kernels import native

Caches = Callable[..., Path]


@pytest.fixture
def no_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every case must be refused before compiling anything."""

    def work(*_: object, **__: object) -> None:
        raise AssertionError("something was compiled")

    monkeypatch.setattr(native, "build_op_library", work)
    monkeypatch.setattr("deepinfer.compile.build_graphs", work)
    monkeypatch.setenv("DEEPINFER_CACHE", str(tmp_path / "cache"))


def _refused(model: Path, out: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str]:
    code = command.main([str(model), "-o", str(out), *tiny_build.FLAGS, *flags])
    return code, capsys.readouterr().err


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("force", [False, True])
def test_a_directory_of_something_else_is_never_replaced(
    tiny_model: Path, parent: Path, force: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    (parent / "out").mkdir()
    (parent / "out" / "thesis.txt").write_text("years of work")
    code, message = _refused(tiny_model, parent / "out", capsys, *["--force"] * force)
    assert code == 4 and message.startswith("[DI405]") and "out" in message
    assert tiny_build.tree(parent) == {"out/thesis.txt": b"years of work"}


@pytest.mark.usefixtures("no_work")
def test_an_artifact_is_not_replaced_without_force(
    tiny_model: Path, tiny_artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, beside = tiny_build.tree(tiny_artifact), sorted(tiny_artifact.parent.iterdir())
    code, message = _refused(tiny_model, tiny_artifact, capsys)
    assert code == 4 and "--force" in message
    assert tiny_build.tree(tiny_artifact) == before
    assert sorted(tiny_artifact.parent.iterdir()) == beside


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("kind", ["file", "link", "no_parent", "file_as_parent"])
def test_a_target_that_cannot_be_a_directory_is_named(
    kind: str, tiny_model: Path, parent: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = parent / "out"
    if kind == "file":
        out.write_text("mine")
    elif kind == "link":
        out.symlink_to(parent.parent)
    elif kind == "no_parent":
        out = parent / "absent" / "out"
    else:
        (parent / "file").write_text("mine")
        out = parent / "file" / "out"
    before = sorted(parent.iterdir())
    code, message = _refused(tiny_model, out, capsys, "--force")
    assert code == 4 and str(out) in message
    assert sorted(parent.iterdir()) == before


@pytest.mark.usefixtures("no_work")
def test_a_parent_that_may_not_be_written_is_named(
    tiny_model: Path, parent: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Injected, since the superuser may write everywhere."""
    real = os.mkdir

    def refuse(path: object, *args: object, **kwargs: object) -> None:
        if ".deepinfer-build-" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        real(path, *args, **kwargs)

    monkeypatch.setattr(os, "mkdir", refuse)
    code, message = _refused(tiny_model, parent / "out", capsys)
    assert code == 4 and "Permission denied" in message and str(parent / "out") in message
    assert list(parent.iterdir()) == []


@pytest.mark.usefixtures("no_work")
def test_a_trust_store_that_cannot_be_used_is_named_before_any_work(
    tiny_model: Path,
    parent: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = tmp_path / "config" / "deepinfer"
    store.mkdir(parents=True)
    store.chmod(0o777)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    code, message = _refused(tiny_model, parent / "out", capsys)
    assert code == 4 and str(store) in message
    assert list(parent.iterdir()) == []


def test_a_disk_that_fills_up_at_any_write_leaves_nothing(
    tiny_model: Path, parent: Path, make_cache: Caches, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, real, written = make_cache(), os.write, []
    while True:
        calls = 0

        def full(descriptor: int, data: object, _at: int = len(written)) -> int:
            nonlocal calls
            name = str(Path(f"/proc/self/fd/{descriptor}").readlink())
            if not name.startswith(str(parent)):
                return real(descriptor, data)
            if calls == _at:
                written.append(name.partition("/artifact/")[2])
                half = bytes(data)[: len(data) // 2]  # some of it still fits
                calls += 1
                return real(descriptor, half) if half else 0
            if calls > _at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            calls += 1
            return real(descriptor, data)

        before = len(written)
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            try:
                result = tiny_build.build(tiny_model, parent / "out", cache)
            except ArtifactWriteError as error:
                assert "No space left" in str(error) and "free some space" in str(error)
            else:
                break
        assert len(written) == before + 1
        assert list(parent.iterdir()) == []
    assert sum(name == "weights/model.safetensors" for name in written) > 20
    assert {"manifest.json", "graphs/decode-1/model.so"} <= set(written)
    with open_artifact(parent / "out") as artifact:
        assert artifact.artifact_id == result.artifact_id


@pytest.mark.parametrize("step", ["mkdir", "open"])
def test_a_cache_that_cannot_be_used_is_named(
    step: str, tiny_model: Path, parent: Path, make_cache: Caches, stub_workers: Callable[..., object]
) -> None:
    cache = make_cache("prefill-8")
    stub_workers()
    if step == "mkdir":
        (cache / "work").write_text("a file where a directory belongs")
    else:
        (cache / "work").mkdir(mode=0o755)
    with pytest.raises(DeepInferError, match=str(cache / "work")):
        tiny_build.build(tiny_model, parent / "out", cache)
    assert list(parent.iterdir()) == []


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_cache_root_that_others_may_write_to_is_refused(
    mode: int, tiny_model: Path, parent: Path, make_cache: Caches
) -> None:
    """Whoever may write there can put other folders in place of those inside, whatever their modes."""
    cache = make_cache()
    cache.chmod(mode)
    with pytest.raises(ResourceError, match="others may write"):
        tiny_build.build(tiny_model, parent / "out", cache)
    assert list(parent.iterdir()) == []


def test_what_a_build_leaves_is_private_where_it_must_be(
    tiny_model: Path, parent: Path, make_cache: Caches
) -> None:
    cache = make_cache()
    tiny_build.build(tiny_model, parent / "out", cache)
    assert [path.name for path in parent.iterdir()] == ["out"]
    assert list((cache / "work").iterdir()) == []
    for name in ("work", "graphs", "native"):
        assert stat.S_IMODE((cache / name).stat().st_mode) == 0o700
