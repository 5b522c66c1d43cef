"""One safetensors file: its header checked in full at open, its bytes mapped read-only.

The header is checked here, not by the library, for three reasons: messages name the file and the tensor; the
descriptor whose header was checked is the one whose bytes are used; and tensors are views of the mapping, so
opening a checkpoint copies nothing.
"""

import math
import mmap
import os
import stat
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from deepinfer.errors import CheckpointError
from deepinfer.graphs.strict_json import parse_json_object, printable

MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library
_RESTORE = "download the file again"

# Kinds without arithmetic in torch (FP8, scales, packed FP4) are read as bytes.
_DTYPES: dict[str, tuple[int, torch.dtype]] = {
    "F64": (8, torch.float64),
    "F32": (4, torch.float32),
    "F16": (2, torch.float16),
    "BF16": (2, torch.bfloat16),
    "I64": (8, torch.int64),
    "I32": (4, torch.int32),
    "I16": (2, torch.int16),
    "I8": (1, torch.uint8),
    "U8": (1, torch.uint8),
    "BOOL": (1, torch.uint8),
    "F8_E4M3": (1, torch.uint8),
    "F8_E5M2": (1, torch.uint8),
    "F8_E8M0": (1, torch.uint8),
}


@dataclass(frozen=True)
class StoredTensor:
    """One header entry: dtype as written there, shape, and byte range within the data section."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


class SafetensorsFile:
    """A checked, mapped safetensors file. `tensors` lists what it holds, in the order of the bytes.

    Raises CheckpointError at construction for anything malformed: truncated or overlong files, headers that
    are no strict JSON, unknown dtypes, sizes that disagree with shapes, overlaps and gaps.
    """

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.name = name or path.name
        size, self._map = self._map_file(path)
        header = self._read_header(size)
        self._data_start = 8 + len(header)
        self.tensors = self._check_header(header, size - self._data_start)

    def _fail(self, what: str, tensor: str | None = None) -> NoReturn:
        where = self.name if tensor is None else f"{self.name} tensor {printable(tensor)}"
        raise CheckpointError(what, where=where, action=_RESTORE)

    def _map_file(self, path: Path) -> tuple[int, mmap.mmap]:
        try:  # O_NONBLOCK: opening a pipe must not hang
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as fault:
            self._fail(f"cannot be opened: {fault.strerror}")
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                self._fail("not a regular file")
            if status.st_size < 8:
                self._fail(f"truncated: {status.st_size} bytes cannot hold a header")
            return status.st_size, mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ)
        except OSError as fault:
            self._fail(f"cannot be mapped: {fault.strerror}")
        finally:
            os.close(descriptor)

    def _read_header(self, size: int) -> bytes:
        length = int.from_bytes(self._map[:8], "little")
        if length > MAX_HEADER_BYTES:
            self._fail(f"a header of {length} bytes is beyond the limit of {MAX_HEADER_BYTES}")
        if 8 + length > size:
            self._fail(f"truncated: the header needs {8 + length} bytes, the file has {size}")
        return self._map[8 : 8 + length]

    def _check_header(self, header: bytes, data_bytes: int) -> dict[str, StoredTensor]:
        content = parse_json_object(header, f"{self.name} header", CheckpointError)
        metadata = content.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            self._fail("__metadata__ must map strings to strings")
        tensors = {name: self._check_entry(name, entry) for name, entry in content.items()}
        ordered = sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end))
        position = 0
        for name, tensor in ordered:
            if tensor.end > data_bytes:
                self._fail(
                    f"truncated: it ends at byte {tensor.end} of the data, the file holds {data_bytes}",
                    name,
                )
            if tensor.begin != position:
                kind = "overlaps the one before it" if tensor.begin < position else "leaves a gap before it"
                self._fail(f"the tensor at bytes {tensor.begin}:{tensor.end} {kind}", name)
            position = tensor.end
        if position != data_bytes:
            self._fail(f"{data_bytes - position} bytes after the last tensor belong to none")
        return dict(ordered)

    def _check_entry(self, name: str, entry: Any) -> StoredTensor:
        if not isinstance(entry, Mapping) or set(entry) != {"dtype", "shape", "data_offsets"}:
            self._fail("the entry must have exactly dtype, shape and data_offsets", name)
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            self._fail(f"dtype {printable(str(dtype), 40)} is not known", name)
        if not isinstance(shape, list) or len(shape) > 8 or not all(_is_size(dim) for dim in shape):
            self._fail("the shape must be a list of at most 8 sizes", name)
        if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(o) for o in offsets):
            self._fail("data_offsets must be two byte positions", name)
        begin, end = offsets
        wanted = math.prod(shape) * _DTYPES[dtype][0]
        if end - begin != wanted:
            self._fail(f"data_offsets span {end - begin} bytes, {dtype} {shape} needs {wanted}", name)
        return StoredTensor(dtype, tuple(shape), begin, end)

    def raw(self, name: str) -> memoryview:
        """The bytes of a tensor, not copied."""
        tensor = self.tensors[name]
        return memoryview(self._map)[self._data_start + tensor.begin : self._data_start + tensor.end]

    def get(self, name: str) -> torch.Tensor:
        """The tensor as a read-only view of the mapping; FP8, scales and packed FP4 come as uint8.

        Writing into the result would end the process: clone it first.
        """
        tensor = self.tensors[name]
        itemsize, dtype = _DTYPES[tensor.dtype]
        if tensor.begin == tensor.end:
            return torch.empty(tensor.shape, dtype=dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            flat = torch.frombuffer(
                self._map,
                dtype=torch.uint8,
                count=tensor.end - tensor.begin,
                offset=self._data_start + tensor.begin,
            )
        if (self._data_start + tensor.begin) % itemsize:
            flat = flat.clone()  # a writer that did not pad its header: views must be aligned
        return flat.view(dtype).view(tensor.shape)
