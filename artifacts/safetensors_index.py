"""The index of a safetensors file: which tensor lies where, checked before any tensor is touched.

Layout (all of it checked): 8 bytes little-endian length of the header, the header (JSON: tensor name to
dtype, shape and half-open byte range after the header; `__metadata__` holds texts), the data. Ranges must
cover the data without gaps or overlaps, and every shape times its dtype must be its range. Integers are
Python's, so no product can overflow. This file maps no data.
"""

import math
import os
from typing import Annotated, NamedTuple

import msgspec

from deepinfer.artifacts.canonical import MAX_JSON_BYTES, convert_struct, parse_json
from deepinfer.errors import ArtifactCorruptError, ArtifactFormatError

_BITS = {
    "F4": 4, "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "U16": 16, "I16": 16,
    "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
}  # fmt: skip
_LENGTH_BYTES = 8
_COPY_AGAIN = "copy the artifact again or rebuild it"


class TensorEntry(NamedTuple):
    """Where a tensor lies: file of the artifact, dtype as safetensors spells it, byte range in the file."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


class _HeaderEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    data_offsets: tuple[int, int]


def read_index(descriptor: int, path: str) -> dict[str, TensorEntry]:
    """The tensors of an open safetensors file, by name.

    Raises ArtifactCorruptError when the file is cut off or its header is not JSON, ArtifactFormatError when
    the header breaks a rule.
    """
    file_bytes = os.fstat(descriptor).st_size
    prefix = os.pread(descriptor, _LENGTH_BYTES, 0)
    header_bytes = int.from_bytes(prefix, "little")
    data_start = _LENGTH_BYTES + header_bytes
    if len(prefix) < _LENGTH_BYTES or data_start > file_bytes:
        raise ArtifactCorruptError("cut off inside its header", where=path, action=_COPY_AGAIN)
    if header_bytes > MAX_JSON_BYTES:
        raise ArtifactFormatError(
            f"a header of {header_bytes} bytes is too large", where=path, action=_COPY_AGAIN
        )
    data = os.pread(descriptor, header_bytes, _LENGTH_BYTES)
    header = parse_json(data, where=path)
    if not isinstance(header, dict):
        raise _bad("the header is not a table of tensors", path)
    convert_struct(header.pop("__metadata__", {}), dict[str, str], where=path)
    raw = convert_struct(header, dict[str, _HeaderEntry], where=path)
    return _checked(raw, path, data_start, file_bytes - data_start)


def _checked(
    raw: dict[str, _HeaderEntry], path: str, data_start: int, data_bytes: int
) -> dict[str, TensorEntry]:
    end, index = 0, {}
    for name, entry in sorted(raw.items(), key=lambda item: item[1].data_offsets):
        begin, stop = entry.data_offsets
        bits = math.prod(entry.shape) * _BITS.get(entry.dtype, 0)
        if entry.dtype not in _BITS:
            raise _bad(f"{name!r:.200} has the unknown dtype {entry.dtype!r:.40}", path)
        if begin != end or bits % 8 or stop - begin != bits // 8:
            raise _bad(
                f"the byte range of {name!r:.200} overlaps, leaves a gap or does not fit its shape", path
            )
        end = stop
        index[name] = TensorEntry(path, entry.dtype, entry.shape, data_start + begin, stop - begin)
    if end != data_bytes:
        raise ArtifactCorruptError(
            f"{data_bytes} bytes of tensors, the header says {end}", where=path, action=_COPY_AGAIN
        )
    return index


def _bad(what: str, path: str) -> ArtifactFormatError:
    return ArtifactFormatError(what, where=path, action=_COPY_AGAIN)
