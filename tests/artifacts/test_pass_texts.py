"""Texts of graphs after every pass: kept beside the identity, bounded when read, shown by name."""

import base64
import lzma
import os
import shutil
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import artifact_factory
import pytest

from deepinfer.artifacts import (
    ArtifactWriter,
    Report,
    TrustStore,
    describe,
    list_certificates,
    open_artifact,
    pack_texts,
    pass_texts_kind,
    render,
    view_graph,
    write_report,
)
from deepinfer.artifacts import pass_texts as module
from deepinfer.artifacts.canonical import parse_json
from deepinfer.artifacts.pass_texts import MAX_TEXTS_BYTES, unpack_texts
from deepinfer.errors import ArtifactCorruptError, ArtifactError, ArtifactFormatError, UsageError

FINAL = "graph():\n    return hidden\n"  # what the small artifact holds
TEXTS = [("captured", "%0 = input x : float32[2]\nreturn [%0]\n"), ("fuse_norm", FINAL)]


def content_of(texts: list[tuple[str, str]]) -> dict[str, Any]:
    """The sidecar's content as a reader parses it."""
    packed = pack_texts(texts)
    assert packed is not None
    return parse_json(packed, where="test")


def write_texts(artifact: Path, content: dict[str, Any], graph: str = "decode-1") -> Path:
    """Put a sidecar beside the artifact, whatever it holds."""
    with open_artifact(artifact) as opened:
        report = Report(artifact_id=opened.artifact_id, kind=pass_texts_kind(graph), content=content)
    return write_report(artifact, report)


def damaged(**changes: object) -> dict[str, Any]:
    """A content with some fields replaced."""
    return content_of(TEXTS) | changes


def compressed(data: bytes, **options: Any) -> str:
    """What stands for `data` in a sidecar."""
    return base64.b64encode(lzma.compress(data, **options)).decode()


@pytest.mark.parametrize(
    "texts",
    [
        [],
        [("captured", "")],
        TEXTS,
        [("captured", "é\n%1 = x('\u202e')\n"), ("a", ""), ("b.c-d", "line\r\nno end")],
        [("captured", "%1\n" * 50_000), ("same", "%1\n" * 50_000)],
    ],
)
def test_what_is_packed_is_unpacked(texts: list[tuple[str, str]]) -> None:
    found = unpack_texts(content_of(texts), where="test")
    assert list(found.items()) == texts


def test_near_duplicates_are_small_and_the_bytes_depend_on_the_texts_alone() -> None:
    lines = [f"%{number} = aten.add.Tensor(%{number * 7 % 500}, {number})" for number in range(3000)]
    texts = [(f"pass-{step}", "\n".join(lines[step:])) for step in range(15)]
    packed = pack_texts(texts)
    assert packed == pack_texts(list(texts)) and packed is not None
    assert len(packed) < sum(len(text) for _, text in texts) / 20


def test_more_than_can_be_read_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TEXTS_BYTES", 100)
    assert pack_texts([("captured", "x" * 101)]) is None
    assert pack_texts([("captured", "x" * 100)]) is not None
    monkeypatch.setattr(module, "MAX_JSON_BYTES", 100)
    assert pack_texts([("captured", "x" * 100)]) is None


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ({}, ArtifactFormatError),
        (damaged(texts=[{"after": "captured"}]), ArtifactFormatError),
        (damaged(texts=[{"after": "../x", "bytes": 1}]), ArtifactFormatError),
        (damaged(texts=[{"after": "captured", "bytes": -1}]), ArtifactFormatError),
        (damaged(compression="zip"), ArtifactFormatError),
        (damaged(stray=1), ArtifactFormatError),
        (damaged(data=7), ArtifactFormatError),
        (damaged(data="not base 64!"), ArtifactCorruptError),
        (damaged(data="é"), ArtifactCorruptError),
        (damaged(data=""), ArtifactCorruptError),
        (damaged(data=base64.b64encode(b"\xfd7zXZ\0 no stream").decode()), ArtifactCorruptError),
        (damaged(data=compressed(b"too short")), ArtifactCorruptError),
        (damaged(data=compressed(b"x" * 10_000)), ArtifactCorruptError),
        (damaged(data=content_of(TEXTS)["data"][:-8]), ArtifactCorruptError),
        (damaged(texts=[{"after": "captured", "bytes": 2**62}]), ArtifactCorruptError),
        (damaged(texts=[{"after": "a", "bytes": 1}] * 2, data=compressed(b"xy")), ArtifactCorruptError),
        (damaged(texts=[{"after": "a", "bytes": 2}], data=compressed(b"\xff\xfe")), ArtifactCorruptError),
    ],
)
def test_content_that_is_damaged_is_refused_by_name(content: dict, error: type[ArtifactError]) -> None:
    with pytest.raises(error) as raised:
        unpack_texts(content, where="reports/passes-decode-1")
    assert "reports/passes-decode-1" in str(raised.value) and raised.value.action


def test_bytes_after_the_stream_are_refused() -> None:
    data = base64.b64encode(lzma.compress(b"x") + lzma.compress(b"y")).decode()
    with pytest.raises(ArtifactCorruptError):
        unpack_texts(damaged(texts=[{"after": "a", "bytes": 1}], data=data), where="test")


def test_a_bomb_takes_no_memory() -> None:
    """Some kB that would be 200 MB, announced as little and as too much."""
    bomb = compressed(bytes(200 * 1024 * 1024), preset=0)
    assert len(bomb) < 100_000
    announced = [
        damaged(texts=[{"after": "captured", "bytes": size}], data=bomb)
        for size in (100, MAX_TEXTS_BYTES + 1, 2**62)
    ]
    tracemalloc.start()
    try:
        for content in announced:
            with pytest.raises(ArtifactCorruptError):
                unpack_texts(content, where="test")
        assert tracemalloc.get_traced_memory()[1] < 8 * 1024 * 1024
    finally:
        tracemalloc.stop()


def test_a_window_that_would_take_gigabytes_is_refused() -> None:
    """The block's header, after 12 bytes: its size, flags, filter, size of what follows, window, checksum."""
    forged = bytearray(base64.b64decode(content_of(TEXTS)["data"]))
    end = 12 + 4 * (forged[12] + 1)
    assert forged[14:16] == b"\x21\x01"
    forged[16] = 37  # 1.5 GiB
    forged[end - 4 : end] = zlib.crc32(forged[12 : end - 4]).to_bytes(4, "little")
    with pytest.raises(ArtifactCorruptError, match="[Mm]emory"):
        unpack_texts(damaged(data=base64.b64encode(forged).decode()), where="test")


def test_a_view_shows_what_was_compiled_and_what_was_before(good_artifact: Path) -> None:
    write_texts(good_artifact, content_of(TEXTS))
    artifact_id = open_artifact(good_artifact).artifact_id
    view = view_graph(good_artifact, "decode-1")
    assert (view.artifact_id, view.graph, view.after, view.text) == (artifact_id, "decode-1", None, FINAL)
    for after, text in TEXTS:
        view = view_graph(good_artifact, "decode-1", after)
        assert (view.after, view.text) == (after, text)


def test_unknown_names_are_answered_with_the_known_ones(good_artifact: Path) -> None:
    with pytest.raises(UsageError, match="decode-1, decode-2, prefill-8"):
        view_graph(good_artifact, "decode-3")
    with pytest.raises(UsageError, match="no graph '../x'"):
        view_graph(good_artifact, "../x")
    with pytest.raises(UsageError, match="no pass 'fuse_norms'.*captured, fuse_norm"):
        view_graph(good_artifact, "decode-1", "fuse_norms")
    with pytest.raises(UsageError, match="fuse_gate was switched off"):
        view_graph(good_artifact, "decode-1", "fuse_gate")


def test_without_the_sidecar_the_compiled_graph_is_still_shown(good_artifact: Path) -> None:
    assert view_graph(good_artifact, "decode-1").text == FINAL
    with pytest.raises(ArtifactCorruptError, match="copied without reports/.*--force"):
        view_graph(good_artifact, "decode-1", "captured")
    write_texts(good_artifact, content_of(TEXTS), graph="decode-2")
    with pytest.raises(ArtifactCorruptError, match="is not there"):
        view_graph(good_artifact, "decode-1", "captured")


def test_the_compiled_graph_is_checked_by_hash(good_artifact: Path) -> None:
    (good_artifact / "graphs/decode-1/graph.txt").write_text(FINAL.replace("hidden", "hiddem"))
    with pytest.raises(ArtifactCorruptError, match=r"graphs/decode-1/graph\.txt"):
        view_graph(good_artifact, "decode-1")


def test_texts_that_do_not_end_in_the_compiled_graph_are_refused(good_artifact: Path) -> None:
    write_texts(good_artifact, content_of([*TEXTS[:1], ("fuse_norm", FINAL + " ")]))
    with pytest.raises(ArtifactCorruptError, match="not that of the compiled graph"):
        view_graph(good_artifact, "decode-1", "captured")
    write_texts(good_artifact, content_of(TEXTS[1:]))
    with pytest.raises(ArtifactCorruptError, match="no text after captured"):
        view_graph(good_artifact, "decode-1", "captured")


def test_a_sidecar_of_another_artifact_is_refused(good_artifact: Path, tmp_path: Path) -> None:
    path = write_texts(good_artifact, content_of(TEXTS))
    other_id = artifact_factory.build(tmp_path / "other.di", precision="float32")
    (tmp_path / "other.di/reports").mkdir()
    shutil.copy(path, tmp_path / f"other.di/reports/passes-decode-1-{other_id[:16]}.json")
    with pytest.raises(ArtifactFormatError, match="another artifact"):
        view_graph(tmp_path / "other.di", "decode-1", "captured")


@pytest.mark.parametrize("kind", ["link", "hard link", "cut off", "huge"])
def test_a_sidecar_that_is_no_plain_file_of_its_size_is_refused(
    kind: str, good_artifact: Path, tmp_path: Path
) -> None:
    path = write_texts(good_artifact, content_of(TEXTS))
    if kind == "link":
        path.rename(tmp_path / "moved")
        path.symlink_to(tmp_path / "moved")
    elif kind == "hard link":
        os.link(path, tmp_path / "second")
    elif kind == "cut off":
        path.write_bytes(path.read_bytes()[:-20])
    else:
        os.truncate(path, 1 << 40)  # sparse: nothing may try to read it
    with pytest.raises(ArtifactCorruptError):
        view_graph(good_artifact, "decode-1", "captured")


def test_a_compiled_text_beyond_the_limit_is_not_read(
    good_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepinfer.artifacts.graph_view.MAX_TEXTS_BYTES", 5)
    with pytest.raises(ArtifactFormatError, match="the limit is 5"):
        view_graph(good_artifact, "decode-1")


def test_a_build_writes_sidecars_with_the_artifact_and_its_id_stays(
    tmp_path: Path, good_artifact: Path
) -> None:
    reports = {pass_texts_kind("decode-1"): content_of(TEXTS), pass_texts_kind("decode-2"): {}}
    with ArtifactWriter(tmp_path / "new.di") as writer:
        artifact_factory.add_files(writer)
        artifact_id = writer.finish(artifact_factory.make_manifest(), reports)
    with open_artifact(good_artifact) as before, open_artifact(tmp_path / "new.di") as after:
        assert artifact_id == before.artifact_id == after.artifact_id
        assert before.paths == after.paths
    names = sorted(path.name for path in (tmp_path / "new.di/reports").iterdir())
    assert names == [f"passes-decode-{n}-{artifact_id[:16]}.json" for n in (1, 2)]
    assert view_graph(tmp_path / "new.di", "decode-1", "captured").text == TEXTS[0][1]
    assert list_certificates(tmp_path / "new.di") == ([], [])
    artifact_factory.build(tmp_path / "new.di", force=True)  # what the writer wrote may be replaced
    assert not (tmp_path / "new.di/reports").exists()


def test_a_sidecar_that_no_reader_would_take_leaves_no_artifact(tmp_path: Path) -> None:
    with pytest.raises(ArtifactFormatError), ArtifactWriter(tmp_path / "new.di") as writer:
        artifact_factory.add_files(writer)
        writer.finish(artifact_factory.make_manifest(), {"No Kind": {}})
    assert list(tmp_path.iterdir()) == []


def test_describe_says_which_passes_fired_in_each_graph(good_artifact: Path, tmp_path: Path) -> None:
    facts = describe(good_artifact, trust_store=TrustStore(tmp_path / "trust"))
    assert facts["fired"] == {name: {"fuse_norm": 3} for name in ("decode-1", "decode-2", "prefill-8")}
    assert "fired       decode-2       fuse_norm 3\n" in render(facts)
    artifact_factory.build_smallest(tmp_path / "small.di")
    text = render(describe(tmp_path / "small.di", trust_store=TrustStore(tmp_path / "trust")))
    assert "fired       decode-1       nothing\n" in text
