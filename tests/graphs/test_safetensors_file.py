"""The header check of a safetensors file: every way to be wrong has its own message."""

import json
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_dirs import write_shard
from safetensors.torch import save_file

from deepinfer.errors import CheckpointError, DeepInferError
from deepinfer.graphs.safetensors_file import SafetensorsFile

GOOD = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "c": {"dtype": "F8_E4M3", "shape": [3, 1], "data_offsets": [32, 35]},
    "d": {"dtype": "I8", "shape": [0, 7], "data_offsets": [35, 35]},
}
DATA = bytes(range(35))


def with_entry(name: str, **changes) -> dict:
    return {**GOOD, name: {**GOOD[name], **changes}}


def open_file(tmp_path, header, data=DATA) -> SafetensorsFile:
    write_shard(tmp_path / "x.safetensors", header, data)
    return SafetensorsFile(tmp_path / "x.safetensors")


def test_a_good_file_gives_views_of_its_bytes(tmp_path):
    file = open_file(tmp_path, GOOD)
    assert list(file.tensors) == ["a", "b", "c", "d"]
    assert file.get("a").dtype == torch.float32
    assert file.get("a").contiguous().view(torch.uint8).flatten().tolist() == list(range(24))
    assert file.get("b").dtype == torch.bfloat16
    assert file.get("c").tolist() == [[32], [33], [34]]
    assert file.get("c").dtype == torch.uint8
    assert file.get("d").shape == (0, 7)
    assert bytes(file.raw("b")) == DATA[24:32]


def test_what_the_library_writes_is_read_alike(tmp_path):
    torch.manual_seed(0)
    tensors = {"w": torch.randn(5, 7), "h": torch.randn(3, 3).bfloat16(), "n": torch.arange(6)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert {name: torch.equal(file.get(name), tensors[name]) for name in file.tensors} == dict.fromkeys(
        tensors, True
    )


@pytest.mark.parametrize("padding", range(4))
def test_headers_of_any_length_are_read(tmp_path, padding):
    header = json.dumps(GOOD).encode() + b" " * padding
    file = open_file(tmp_path, header)
    assert file.get("a").view(torch.int32).flatten()[0] == int.from_bytes(DATA[:4], "little")


FAULTS = [
    (with_entry("a", shape=[2, 4]), "tensor a: data_offsets span 24 bytes, F32 [2, 4] needs 32"),
    (with_entry("a", data_offsets=[0, 20]), "tensor a: data_offsets span 20 bytes"),
    (with_entry("a", data_offsets=[24, 0]), "tensor a: data_offsets span -24 bytes"),
    (with_entry("b", data_offsets=[20, 28]), "tensor b: the tensor at bytes 20:28 overlaps"),
    (with_entry("b", data_offsets=[0, 8]), "overlaps the one before it"),
    (with_entry("c", data_offsets=[31, 34]), "overlaps the one before it"),
    (with_entry("c", data_offsets=[33, 36]), "tensor c: truncated"),
    ({k: GOOD[k] for k in "acd"}, "tensor c: the tensor at bytes 32:35 leaves a gap"),
    ({k: GOOD[k] for k in "ab"}, "3 bytes after the last tensor belong to none"),
    ({}, "35 bytes after the last tensor"),
    (with_entry("a", dtype="F33"), "dtype F33 is not known"),
    (with_entry("a", dtype=["F32"]), "is not known"),
    (with_entry("a", shape=[-2, -3]), "the shape must be"),
    (with_entry("a", shape=[2.0, 3]), "the shape must be"),
    (with_entry("a", shape=[True, 6]), "the shape must be"),
    (with_entry("a", shape=6), "the shape must be"),
    (with_entry("a", shape=[1] * 9), "the shape must be"),
    (with_entry("a", shape=[2**62, 2**62]), "data_offsets span 24 bytes"),
    (with_entry("a", shape=[2**64]), "the shape must be"),
    (with_entry("a", data_offsets=[0]), "two byte positions"),
    (with_entry("a", data_offsets=[-24, 0]), "two byte positions"),
    (with_entry("a", data_offsets="0:24"), "two byte positions"),
    (with_entry("a", extra=1), "exactly dtype, shape and data_offsets"),
    ({**GOOD, "a": [1]}, "exactly dtype, shape and data_offsets"),
    ({**GOOD, "__metadata__": {"format": 1}}, "__metadata__ must map strings"),
    ({**GOOD, "__metadata__": []}, "__metadata__ must map strings"),
    (json.dumps(GOOD).encode()[:-1], "not valid JSON"),
    (b'{"a": 1, "a": 2}', "appears twice"),
    (b"[]", "object was expected"),
    (b"\xff\xff", "not valid JSON"),
    (b"", "not valid JSON"),
    (b'{"a":' * 200_000, "nested too deeply"),
]


@pytest.mark.parametrize(("header", "message"), FAULTS)
def test_a_malformed_header_is_refused_by_file_and_tensor(tmp_path, header, message):
    with pytest.raises(CheckpointError) as caught:
        open_file(tmp_path, header)
    assert message in str(caught.value)
    assert "x.safetensors" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated"),
        (b"\0" * 7, "truncated"),
        ((2**63).to_bytes(8, "little") + b"{}", "beyond the limit"),
        ((10**8 + 1).to_bytes(8, "little") + b"{}", "beyond the limit"),
        ((3).to_bytes(8, "little") + b"{}", "truncated: the header needs 11 bytes"),
    ],
)
def test_a_file_too_short_for_its_header_is_refused(tmp_path, content, message):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        SafetensorsFile(tmp_path / "x.safetensors")


def test_every_truncation_is_found_at_open(tmp_path):
    path = tmp_path / "x.safetensors"
    write_shard(path, GOOD, DATA)
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError):
            SafetensorsFile(path)


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "dir.safetensors").mkdir()
    for name in ("pipe", "dir"):
        with pytest.raises(CheckpointError, match="not a regular file"):
            SafetensorsFile(tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match="cannot be opened"):
        SafetensorsFile(tmp_path / "absent.safetensors")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_changed_headers_load_alike_or_are_refused(tmp_path_factory, data):
    """Flips, insertions, deletions in length and header: no crash, and no sizes other than stated."""
    path = tmp_path_factory.mktemp("flip") / "x.safetensors"
    write_shard(path, GOOD, DATA)
    content = bytearray(path.read_bytes())
    end_of_header = len(content) - len(DATA)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, end_of_header - 1))
        match data.draw(st.sampled_from(["flip", "insert", "delete"])):
            case "flip":
                content[place] = data.draw(st.integers(0, 255))
            case "insert":
                content.insert(place, data.draw(st.integers(0, 255)))
            case "delete":
                del content[place]
    path.write_bytes(content)
    try:
        file = SafetensorsFile(path)
    except DeepInferError:
        return
    covered = sum(len(file.raw(name)) for name in file.tensors)
    assert covered == len(DATA)
    for name, tensor in file.tensors.items():
        assert tuple(file.get(name).shape) == tensor.shape
