"""What changes after, or while, an artifact is opened is noticed on the descriptor that is handed out."""

import os
from pathlib import Path

import artifact_factory
import pytest

from deepinfer.artifacts import open_artifact
from deepinfer.artifacts import reader as reader_module
from deepinfer.errors import ArtifactCorruptError, DeepInferError

LIBRARY = "native/libdeepinfer_ops.so"


def test_a_file_that_changes_after_opening_is_not_handed_out(good_artifact: Path) -> None:
    with open_artifact(good_artifact) as artifact:
        (good_artifact / LIBRARY).write_bytes(bytes(104))
        with pytest.raises(ArtifactCorruptError):
            artifact.open_file(LIBRARY)
        (good_artifact / LIBRARY).unlink()
        (good_artifact / LIBRARY).symlink_to("/dev/zero")
        with pytest.raises(ArtifactCorruptError, match="symbolic link"):
            artifact.read_file(LIBRARY)
        (good_artifact / LIBRARY).unlink()
        with pytest.raises(ArtifactCorruptError, match="missing"):
            artifact.open_file(LIBRARY)


def test_a_file_that_changes_while_it_is_hashed_is_refused(
    good_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = reader_module.hash_descriptor

    def changed_meanwhile(descriptor: int) -> tuple[str, int]:
        result = real(descriptor)
        os.utime(f"/proc/self/fd/{descriptor}", ns=(1, 1))
        return result

    monkeypatch.setattr(reader_module, "hash_descriptor", changed_meanwhile)
    with pytest.raises(ArtifactCorruptError, match="changed while it was read"):
        open_artifact(good_artifact)


def test_an_unchanged_file_is_hashed_once(good_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_artifact(good_artifact) as artifact:

        def never(_: int) -> tuple[str, int]:
            raise AssertionError("hashed again")

        monkeypatch.setattr(reader_module, "hash_descriptor", never)
        for path in artifact.paths:
            os.close(artifact.open_file(path))


def test_an_artifact_that_is_moved_away_stays_the_one_that_was_checked(good_artifact: Path) -> None:
    with open_artifact(good_artifact) as artifact:
        good_artifact.rename(good_artifact.parent / "moved.di")
        artifact_factory.build(good_artifact, precision="float32")
        assert artifact.manifest.precision == "native"
        assert artifact.read_file(LIBRARY).startswith(b"\x7fELF")


def test_no_descriptor_leaks(good_artifact: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    open_artifact(good_artifact).close()
    (good_artifact / LIBRARY).unlink()
    with pytest.raises(DeepInferError):
        open_artifact(good_artifact)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_a_file_swapped_between_looking_and_opening_is_not_followed(
    good_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = good_artifact / LIBRARY
    with open_artifact(good_artifact) as artifact:
        library.rename(good_artifact.parent / "same_bytes.so")
        library.write_bytes(bytes(104))
        real = os.stat

        def swap_after(name: object, *args: object, **kwargs: object) -> os.stat_result:
            info = real(name, *args, **kwargs)
            if name == library.name:
                library.unlink()
                library.symlink_to("../../same_bytes.so")
            return info

        monkeypatch.setattr(os, "stat", swap_after)
        with pytest.raises(ArtifactCorruptError, match="not a regular file"):
            artifact.open_file(LIBRARY)


def test_a_directory_that_becomes_a_link_is_not_followed(good_artifact: Path) -> None:
    with open_artifact(good_artifact) as artifact:
        (good_artifact / "native").rename(good_artifact.parent / "native")
        (good_artifact / "native").symlink_to("../native")
        for use in (artifact.open_file, artifact.read_file):
            with pytest.raises(ArtifactCorruptError, match="below plain directories"):
                use(LIBRARY)


def test_bytes_that_change_under_an_unchanged_stamp_are_not_read(
    good_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_artifact(good_artifact) as artifact:
        monkeypatch.setattr(reader_module, "read_descriptor", lambda *_, **__: bytes(104))
        with pytest.raises(ArtifactCorruptError, match="not those that the manifest names"):
            artifact.read_file(LIBRARY)


def test_a_file_rewritten_with_the_same_size_and_time_is_hashed_again(good_artifact: Path) -> None:
    library = good_artifact / LIBRARY
    with open_artifact(good_artifact) as artifact:
        info = library.stat()
        with library.open("r+b") as file:
            file.write(b"\0")
        os.utime(library, ns=(info.st_atime_ns, info.st_mtime_ns))
        with pytest.raises(ArtifactCorruptError, match="not those that the manifest names"):
            artifact.open_file(LIBRARY)
