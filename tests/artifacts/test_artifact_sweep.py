"""Corruption sweep: every edit of a good artifact loads identically or raises a DeepInferError, nothing else.

Loading is opening plus asking the trust store: an edit that makes another valid manifest makes another id.
Edits come in two kinds: raw, as a bad disk makes them, and resealed, where the manifest's hashes were made to
fit again, so that the parsers behind the hashes are reached.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import artifact_factory
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepinfer.artifacts import OpenedArtifact, TrustStore, canonical_bytes, open_artifact
from deepinfer.errors import DeepInferError

KINDS = (
    "manifest.json",
    "graphs/decode-1/graph.txt",
    "graphs/decode-1/model.so",
    "graphs/decode-1/passes.json",
    "graphs/decode-1/signature.json",
    "native/libdeepinfer_ops.so",
    "tokenizer/tokenizer.json",
    "weights/model.safetensors",
)
PARSED = ("graphs/decode-1/passes.json", "graphs/decode-1/signature.json", "weights/model.safetensors")
LIMITS = {
    "deadline": timedelta(seconds=2),  # per edit: none may hang
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}


class Victim:
    """A good artifact, a trust store that knows it, and a way to try an edit of one file."""

    def __init__(self, root: Path) -> None:
        self.directory, self.store = root / "good.di", TrustStore(root / "trust")
        self.artifact_id = artifact_factory.build(self.directory)
        self.store.record_built(self.artifact_id)
        self.good = {path: (self.directory / path).read_bytes() for path in KINDS}
        self.contents = self._contents(self.load())

    def load(self) -> OpenedArtifact:
        """Open and require trust."""
        artifact = open_artifact(self.directory)
        try:
            self.store.require(artifact.artifact_id, self.directory)
        except BaseException:
            artifact.close()
            raise
        return artifact

    def try_edit(self, path: str, data: bytes) -> None:
        """Load with one file edited: identical, or a DeepInferError."""
        (self.directory / path).write_bytes(data)
        try:
            contents = self._contents(self.load())
        except DeepInferError as error:
            assert error.what
        else:
            assert contents == self.contents
            assert data == self.good[path]
        finally:
            (self.directory / path).write_bytes(self.good[path])

    def try_resealed(self, path: str, data: bytes) -> None:
        """As `try_edit`, opened with a manifest made to fit: any result but a crash, and never trusted."""
        manifest = json.loads(self.good["manifest.json"])
        for entry in manifest["files"]:
            if entry["path"] == path:
                entry.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        (self.directory / path).write_bytes(data)
        (self.directory / "manifest.json").write_bytes(canonical_bytes(manifest))
        try:
            with open_artifact(self.directory) as artifact:
                assert data == self.good[path] or not self.store.is_trusted(artifact.artifact_id)
                sizes = {name: (self.directory / name).stat().st_size for name in artifact.paths}
                for tensor in artifact.tensors.values():
                    assert 0 <= tensor.offset <= tensor.offset + tensor.size_bytes <= sizes[tensor.path]
        except DeepInferError as error:
            assert error.what
        finally:
            for name in (path, "manifest.json"):
                (self.directory / name).write_bytes(self.good[name])

    @staticmethod
    def _contents(artifact: OpenedArtifact) -> tuple:
        with artifact:
            return (
                artifact.manifest,
                artifact.signatures,
                [artifact.read_file(path) for path in artifact.paths],
            )


@pytest.fixture
def victim(memory_path: Path, fast_sync: None) -> Iterator[Victim]:
    """A fresh victim in memory."""
    yield Victim(memory_path)
    shutil.rmtree(memory_path / "good.di")


def boundaries(data: bytes) -> list[int]:
    """Positions where the kind of byte changes: the start of every token, and both ends."""
    starts = [match.start() for match in re.finditer(rb"[A-Za-z_]+|[0-9.]+|[^A-Za-z0-9_.]|\Z", data)]
    return sorted({0, *starts, len(data) - 1})


def test_truncation_at_every_token_is_refused(victim: Victim) -> None:
    for path in KINDS:
        data = victim.good[path]
        for position in boundaries(data):
            if position < len(data):
                victim.try_edit(path, data[:position])
                if path in PARSED:
                    victim.try_resealed(path, data[:position])


def test_a_changed_byte_at_every_token_is_refused(victim: Victim) -> None:
    for path in KINDS:
        data = victim.good[path]
        for position in boundaries(data):
            if position < len(data):
                for change in (1, 0x20, 0x80):
                    edited = bytearray(data)
                    edited[position] ^= change
                    victim.try_edit(path, bytes(edited))


def test_a_changed_byte_behind_a_fitting_hash_is_refused_or_harmless(victim: Victim) -> None:
    for path in PARSED:
        data = victim.good[path]
        for position in boundaries(data):
            if position < len(data):
                edited = bytearray(data)
                edited[position] ^= 1
                victim.try_resealed(path, bytes(edited))


@st.composite
def edits(draw: st.DrawFn, path: str, data: bytes) -> bytes:
    """A few changes: bytes overwritten, cut out, inserted, repeated or swapped for hostile fragments."""
    edited = bytearray(data)
    fragments = [
        *(b"[" * 100, b"{", b"{}", b'"', b"\\", b"\0", b"\xff", b"-1", b"1e999", b"9" * 30),
        *(b"NaN", b"null", b"true", b'"a":1,"a":1', b"../", b"\\ud800"),
    ]
    for _ in range(draw(st.integers(1, 4))):
        begin = draw(st.integers(0, len(edited)))
        end = draw(st.integers(begin, min(begin + 20, len(edited))))
        edited[begin:end] = draw(st.binary(max_size=8) | st.sampled_from(fragments))
    return bytes(edited)


def run_edits(victim: Victim, examples: int) -> None:
    """Hypothesis edits of random files, raw and resealed."""

    @given(st.data())
    @settings(max_examples=examples, **LIMITS)
    def one_edit(data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(KINDS))
        edited = data.draw(edits(path, victim.good[path]))
        if path in PARSED and data.draw(st.booleans()):
            victim.try_resealed(path, edited)
        else:
            victim.try_edit(path, edited)

    one_edit()


def test_five_hundred_edits(victim: Victim) -> None:
    run_edits(victim, 500)


@pytest.mark.slow
def test_two_thousand_edits(victim: Victim) -> None:
    run_edits(victim, 2000)


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def test_any_value_in_any_field_of_the_manifest_is_refused_or_another_artifact(victim: Victim) -> None:
    fields = sorted(json.loads(victim.good["manifest.json"]))

    @given(
        st.sampled_from(fields), JSON_VALUES.filter(lambda value: value not in (float("inf"), float("-inf")))
    )
    @settings(max_examples=300, **LIMITS)
    def one_value(field: str, value: object) -> None:
        manifest = json.loads(victim.good["manifest.json"])
        manifest[field] = value
        try:
            data = canonical_bytes(manifest)
        except DeepInferError:
            return
        victim.try_edit("manifest.json", data)

    one_value()
