"""The index of a safetensors file: every way its header can lie about the data."""

import json
import os
import struct
from pathlib import Path

import artifact_factory
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.artifacts.safetensors_index import TensorEntry, read_index
from deepinfer.errors import ArtifactCorruptError, ArtifactFormatError, DeepInferError


def index_of(path: Path, data: bytes) -> dict[str, TensorEntry]:
    """Write `data` and read its index."""
    path.write_bytes(data)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return read_index(descriptor, "weights/x.safetensors")
    finally:
        os.close(descriptor)


def file_of(header: object, data: bytes = bytes(8)) -> bytes:
    """A file with this header, however wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(begin: int, end: int, shape: list, dtype: str = "U8") -> dict:
    """A header entry."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_offsets_point_at_the_bytes(tmp_path: Path) -> None:
    tensors = {"b": ("I16", (2,), b"1234"), "a": ("F4", (4,), b"56"), "empty": ("F32", (0, 3), b""),
               "scalar": ("U8", (), b"7")}  # fmt: skip
    data = artifact_factory.safetensors_bytes(tensors)
    index = index_of(tmp_path / "x", data)
    for name, (dtype, shape, content) in tensors.items():
        entry = index[name]
        assert (entry.dtype, entry.shape) == (dtype, shape)
        assert data[entry.offset : entry.offset + entry.size_bytes] == content


def test_it_agrees_with_the_safetensors_library(tmp_path: Path, golden_dir: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    numpy = pytest.importorskip("numpy")
    arrays = {"x": numpy.arange(6, dtype=numpy.int32).reshape(2, 3), "y": numpy.ones(3, numpy.float16)}
    data = safetensors.save(arrays, metadata={"format": "pt"})
    index = index_of(tmp_path / "x", data)
    for name, array in arrays.items():
        entry = index[name]
        assert entry.shape == array.shape
        assert data[entry.offset : entry.offset + entry.size_bytes] == array.tobytes()
    for path in golden_dir.glob("*.safetensors"):
        assert index_of(tmp_path / "copy", path.read_bytes())


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "cut off"),
        (bytes(7), "cut off"),
        (struct.pack("<Q", 2**63) + b"{}", "cut off"),
        (file_of({"a": tensor(0, 8, [8])})[:-1], "7 bytes of tensors, the header says 8"),
        (file_of({"a": tensor(0, 8, [8])}) + b"1", "9 bytes of tensors"),
        (file_of(b"{"), "brackets"),
        (file_of([]), "not a table"),
        (file_of({}), "8 bytes of tensors, the header says 0"),
        (file_of(b'{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},"a":{}}'), "twice"),
        (file_of({"a": tensor(0, 8, [8]) | {"x": 1}}), "unknown field"),
        (file_of({"a": tensor(0, 8, [8], "F7")}), "unknown dtype 'F7'"),
        (file_of({"a": tensor(0, 8, [7])}), "does not fit its shape"),
        (file_of({"a": tensor(0, 8, [2**40, 2**40])}), "does not fit its shape"),
        (file_of({"a": tensor(0, 8, [-8])}), "shape"),
        (file_of({"a": tensor(-8, 0, [8])}), "overlaps, leaves a gap"),
        (file_of({"a": tensor(4, 8, [4])}), "leaves a gap"),
        (file_of({"a": tensor(0, 6, [6]), "b": tensor(4, 8, [4])}), "overlaps"),
        (file_of({"a": tensor(0, 8, [15], "F4")}), "does not fit its shape"),
        (file_of({"a": tensor(8, 0, [8])}), "leaves a gap"),
        (file_of({"a": tensor(0, 8, [8]), "__metadata__": {"x": 1}}), "str"),
        (file_of({"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8, 8]}}), "data_offsets"),
    ],
    ids=range(21),
)
def test_a_header_that_lies_is_refused(tmp_path: Path, data: bytes, reason: str) -> None:
    with pytest.raises((ArtifactCorruptError, ArtifactFormatError), match=reason):
        index_of(tmp_path / "x", data)


@given(st.integers(0, len(artifact_factory.WEIGHTS) - 1), st.integers(1, 255))
@settings(max_examples=200, deadline=None)
def test_one_changed_byte_reads_inside_the_file_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, position: int, change: int
) -> None:
    data = bytearray(artifact_factory.WEIGHTS)
    data[position] ^= change
    try:
        index = index_of(tmp_path_factory.getbasetemp() / "flipped", bytes(data))
    except DeepInferError:
        return
    assert all(8 <= entry.offset <= entry.offset + entry.size_bytes <= len(data) for entry in index.values())
