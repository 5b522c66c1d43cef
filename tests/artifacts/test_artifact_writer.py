"""Writing: complete or absent, same inputs same bytes, nothing of the user's is ever replaced by mistake."""

import os
import stat
from pathlib import Path

import artifact_factory
import pytest

from deepinfer.artifacts import ArtifactWriter, canonical_bytes, open_artifact
from deepinfer.artifacts import atomic as atomic_module
from deepinfer.errors import ArtifactFormatError, ArtifactWriteError

pytestmark = pytest.mark.usefixtures("fast_sync")


def tree(directory: Path) -> dict[str, bytes]:
    """Relative path -> bytes of every file below a directory."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def test_same_inputs_give_same_bytes_and_id_wherever_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    first = artifact_factory.build(tmp_path / "a.di")
    second = artifact_factory.build(tmp_path / "elsewhere" / "b.di")
    assert first == second
    assert tree(tmp_path / "a.di") == tree(tmp_path / "elsewhere" / "b.di")


def test_order_of_adding_files_and_graphs_does_not_matter(tmp_path: Path) -> None:
    first = artifact_factory.build(tmp_path / "a.di")
    manifest = artifact_factory.make_manifest(graphs=artifact_factory.make_manifest().graphs[::-1])
    with ArtifactWriter(tmp_path / "b.di") as writer:
        for path, data in reversed(tree(tmp_path / "a.di").items()):
            if path != "manifest.json":
                writer.add_file(path, data)
        assert writer.finish(manifest) == first


def test_anything_that_can_change_a_result_changes_the_id(tmp_path: Path) -> None:
    ids = {artifact_factory.build(tmp_path / "base")}
    changes = [{"precision": "float32"}, {"options": {}}, {"tolerances": {}}, {"disabled_passes": ()}]
    for number, change in enumerate(changes):
        ids.add(artifact_factory.build(tmp_path / str(number), **change))
    assert len(ids) == len(changes) + 1


def test_only_the_finished_artifact_is_in_the_parent(tmp_path: Path) -> None:
    artifact_factory.build(tmp_path / "out.di")
    assert [path.name for path in tmp_path.iterdir()] == ["out.di"]


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        artifact_factory.build(tmp_path / "out.di")
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out.di").rglob("*")}
    assert modes == {0o640, 0o750}
    assert stat.S_IMODE((tmp_path / "out.di").stat().st_mode) == 0o750


def test_work_in_progress_is_private(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "out.di") as writer:
        writer.add_file("native/x.so", b"1")
        (wrapper,) = tmp_path.iterdir()
        assert wrapper.name.startswith(".deepinfer-build-")
        assert stat.S_IMODE(wrapper.stat().st_mode) == 0o700


def test_leaving_without_finish_leaves_nothing(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "out.di") as writer:
        artifact_factory.add_files(writer)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), ArtifactWriter(tmp_path / "out.di") as writer:
        artifact_factory.add_files(writer)
        raise error
    assert list(tmp_path.iterdir()) == []


def test_an_existing_empty_directory_is_taken(tmp_path: Path) -> None:
    (tmp_path / "out.di").mkdir()
    artifact_factory.build(tmp_path / "out.di")
    assert open_artifact(tmp_path / "out.di").artifact_id


def test_a_non_empty_target_is_refused_before_any_work(tmp_path: Path) -> None:
    first = artifact_factory.build(tmp_path / "out.di")
    before = tree(tmp_path / "out.di")
    with pytest.raises(ArtifactWriteError, match=r"DI405.*not empty.*--force"):
        ArtifactWriter(tmp_path / "out.di").__enter__()
    assert tree(tmp_path / "out.di") == before
    assert open_artifact(tmp_path / "out.di").artifact_id == first


def test_force_replaces_an_artifact_and_its_reports(tmp_path: Path) -> None:
    first = artifact_factory.build(tmp_path / "out.di")
    (tmp_path / "out.di" / "reports").mkdir()
    (tmp_path / "out.di" / "reports" / "diff-0.json").write_text("{}")
    second = artifact_factory.build(tmp_path / "out.di", force=True, precision="float32")
    assert first != second
    assert open_artifact(tmp_path / "out.di").artifact_id == second
    assert [path.name for path in tmp_path.iterdir()] == ["out.di"]
    assert not (tmp_path / "out.di" / "reports").exists()


def test_force_replaces_a_damaged_artifact(tmp_path: Path) -> None:
    artifact_factory.build(tmp_path / "out.di")
    (tmp_path / "out.di" / "native" / "libdeepinfer_ops.so").unlink()
    artifact_factory.build(tmp_path / "out.di", force=True)
    open_artifact(tmp_path / "out.di").close()


def test_force_never_replaces_a_directory_that_is_no_artifact(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    with pytest.raises(ArtifactWriteError, match="not an artifact"):
        artifact_factory.build(tmp_path / "home", force=True)
    assert (tmp_path / "home" / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize(
    "place", ["thesis.txt", "native/thesis.txt", "reports/thesis.txt", "reports/x/a.json"]
)
def test_force_never_replaces_an_artifact_that_holds_something_else(tmp_path: Path, place: str) -> None:
    artifact_factory.build(tmp_path / "out.di")
    precious = tmp_path / "out.di" / place
    precious.parent.mkdir(parents=True, exist_ok=True)
    precious.write_text("years of work")
    with pytest.raises(ArtifactWriteError, match="no part of the artifact"):
        artifact_factory.build(tmp_path / "out.di", force=True)
    assert precious.read_text() == "years of work"


def test_a_stranger_swapped_in_during_the_build_survives(tmp_path: Path) -> None:
    artifact_factory.build(tmp_path / "out.di")
    with pytest.raises(ArtifactWriteError), ArtifactWriter(tmp_path / "out.di", force=True) as writer:
        artifact_factory.add_files(writer)
        (tmp_path / "out.di").rename(tmp_path / "moved.di")
        (tmp_path / "out.di").mkdir()
        (tmp_path / "out.di" / "thesis.txt").write_text("years of work")
        writer.finish(artifact_factory.make_manifest())
    assert tree(tmp_path / "out.di") == {"thesis.txt": b"years of work"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["moved.di", "out.di"]


def test_a_stranger_swapped_in_at_the_last_moment_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact_factory.build(tmp_path / "out.di")
    real_exchange = atomic_module.exchange
    calls = []

    def swap_first(*names: object) -> bool:
        if not calls:
            (tmp_path / "out.di").rename(tmp_path / "moved.di")
            (tmp_path / "out.di").mkdir()
            (tmp_path / "out.di" / "thesis.txt").write_text("years of work")
        calls.append(names)
        return real_exchange(*names)

    monkeypatch.setattr(atomic_module, "exchange", swap_first)
    with pytest.raises(ArtifactWriteError, match="not an artifact"):
        artifact_factory.build(tmp_path / "out.di", force=True)
    assert len(calls) == 2
    assert tree(tmp_path / "out.di") == {"thesis.txt": b"years of work"}


@pytest.mark.parametrize("force", [False, True])
def test_a_link_at_the_target_is_never_followed(tmp_path: Path, force: bool) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "out.di").symlink_to("real")
    with pytest.raises(ArtifactWriteError, match="symbolic link"):
        artifact_factory.build(tmp_path / "out.di", force=force)
    assert list((tmp_path / "real").iterdir()) == []


def test_a_link_that_appears_during_the_build_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    with (
        pytest.raises(ArtifactWriteError, match="symbolic link"),
        ArtifactWriter(tmp_path / "out.di") as writer,
    ):
        artifact_factory.add_files(writer)
        (tmp_path / "out.di").symlink_to("real")
        writer.finish(artifact_factory.make_manifest())
    assert list((tmp_path / "real").iterdir()) == []


@pytest.mark.parametrize("force", [False, True])
def test_a_file_at_the_target_is_refused(tmp_path: Path, force: bool) -> None:
    (tmp_path / "out.di").write_text("mine")
    with pytest.raises(ArtifactWriteError, match="not a directory"):
        artifact_factory.build(tmp_path / "out.di", force=force)
    assert (tmp_path / "out.di").read_text() == "mine"


@pytest.mark.parametrize("target", ["missing/out.di", "file/out.di", "..", "/"])
def test_a_target_that_cannot_be_is_a_named_error(tmp_path: Path, target: str) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ArtifactWriteError, match="DI405"):
        artifact_factory.build(tmp_path / target)


def test_a_parent_that_may_not_be_written_is_a_named_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "mkdir", denied)
    with pytest.raises(ArtifactWriteError, match="Permission denied"):
        artifact_factory.build(tmp_path / "out.di")
    assert list(tmp_path.iterdir()) == []


def test_where_names_cannot_be_swapped_two_renames_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact_factory.build(tmp_path / "out.di")
    monkeypatch.setattr(atomic_module, "exchange", lambda *_: False)
    second = artifact_factory.build(tmp_path / "out.di", force=True, precision="float32")
    assert open_artifact(tmp_path / "out.di").artifact_id == second
    assert [path.name for path in tmp_path.iterdir()] == ["out.di"]


@pytest.mark.parametrize(
    "path",
    ["../x.so", "/native/x.so", "native/../x.so", "native//x.so", ".hidden/x", "native/.x", "native\\x.so",
     "native/x\0.so", "", ".", "native/", "a/b/c/d/e", "native/" + "x" * 101, "native/é.so", "native/a b"],
)  # fmt: skip
def test_paths_that_an_artifact_may_not_hold_cannot_be_written(tmp_path: Path, path: str) -> None:
    with ArtifactWriter(tmp_path / "out.di") as writer, pytest.raises(ArtifactFormatError):
        writer.add_file(path, b"")


@pytest.mark.parametrize("path", ["manifest.json", "reports/a.json"])
def test_names_of_the_format_itself_cannot_be_added(tmp_path: Path, path: str) -> None:
    with ArtifactWriter(tmp_path / "out.di") as writer, pytest.raises(ArtifactWriteError):
        writer.add_file(path, b"")


def test_a_file_cannot_be_added_twice_nor_in_two_spellings(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "out.di") as writer:
        writer.add_file("native/x.so", b"1")
        with pytest.raises(ArtifactWriteError, match="already"):
            writer.add_file("native/x.so", b"2")
        for path in ("native/X.so", "Native/y.so"):
            with pytest.raises(ArtifactFormatError, match="only in case"):
                writer.add_file(path, b"2")


def test_a_file_whose_block_failed_is_not_in_the_artifact(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "out.di") as writer:
        with pytest.raises(RuntimeError), writer.create_file("native/half.so") as file:
            file.write(b"half")
            raise RuntimeError
        artifact_factory.add_files(writer)
        writer.finish(artifact_factory.make_manifest())
    assert "native/half.so" not in open_artifact(tmp_path / "out.di").paths


def test_files_can_be_copied_in_through_links_and_written_in_pieces(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(artifact_factory.WEIGHTS)
    (tmp_path / "link").symlink_to("blob")
    with ArtifactWriter(tmp_path / "out.di") as writer:
        copied = writer.add_file_from("weights/model.safetensors", tmp_path / "link")
        with writer.create_file("weights/again.safetensors") as file:
            for byte in memoryview(artifact_factory.WEIGHTS):
                file.write(bytes([byte]))
        whole = writer.add_file("weights/more.safetensors", artifact_factory.WEIGHTS)
        assert copied.sha256 == whole.sha256 == file.hexdigest()
        assert copied.bytes == whole.bytes == file.size
        with pytest.raises(ArtifactWriteError, match="absent"):
            writer.add_file_from("weights/b.safetensors", tmp_path / "absent")


def test_a_manifest_that_no_reader_would_take_is_not_written(tmp_path: Path) -> None:
    bad = {
        "options": {"x": float("nan")},
        "precision": "float16",
        "tolerances": {"error": -1.0},
        "tokenizer_sha256": "abc",
        "disabled_passes": ("no/such",),
        "limits": {"max_model_len": 0, "max_num_seqs": 1},
    }
    for field, value in bad.items():
        with pytest.raises(ArtifactFormatError):
            artifact_factory.build(tmp_path / "out.di", **{field: value})
    assert list(tmp_path.iterdir()) == []


def test_a_graph_without_its_files_is_not_written(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "out.di") as writer:
        writer.add_file("graphs/decode-1/graph.txt", b"")
        with pytest.raises(ArtifactFormatError, match=r"decode-1 has no model\.so"):
            writer.finish(artifact_factory.make_manifest())


def test_the_manifest_on_disk_is_canonical(tmp_path: Path) -> None:
    artifact_factory.build(tmp_path / "out.di")
    with open_artifact(tmp_path / "out.di") as artifact:
        data = (tmp_path / "out.di" / "manifest.json").read_bytes()
        assert data == canonical_bytes(artifact.manifest)
        assert "naïve".encode() in data


def test_everything_is_durable_before_the_name_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real_rename = os.rename

    def record_sync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115

    def record_rename(*args: object, **kwargs: object) -> None:
        synced.append("renamed")
        real_rename(*args, **kwargs)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "rename", record_rename)
    artifact_factory.build(tmp_path / "out.di")
    before, after = synced[: synced.index("renamed")], synced[synced.index("renamed") + 1 :]
    assert after == [str(tmp_path)]
    (content,) = {name for name in before if name.endswith("/artifact")}
    wanted = {str(path.relative_to(tmp_path / "out.di")) for path in (tmp_path / "out.di").rglob("*")}
    assert {name.removeprefix(content).lstrip("/") for name in before} == wanted | {""}
    assert before[-1] == content, "a directory is synced after what is in it"
