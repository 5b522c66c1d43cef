"""Writes a weight store as one safetensors file, a tensor at a time, so that memory does not grow with it.

The same tensors give the same bytes: entries are ordered by alignment, then name, and there is no metadata.
"""

import json
import struct
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

_DTYPES = {
    torch.uint8: "U8",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
}
_PIECE_BYTES = 1 << 24

Specs = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def file_order(specs: Specs) -> list[str]:
    """Return the names in the order of the file: wide elements first, so that every offset is aligned."""
    return sorted(specs, key=lambda name: (-specs[name][1].itemsize, name))


def header(specs: Specs) -> bytes:
    """Return the file's head: length and JSON, padded to eight bytes."""
    entries, offset = {}, 0
    for name in file_order(specs):
        shape, dtype = specs[name]
        end = offset + torch.Size(shape).numel() * dtype.itemsize
        entries[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def file_bytes(specs: Specs) -> int:
    """Return the size of the whole file."""
    return len(header(specs)) + sum(torch.Size(shape).numel() * d.itemsize for shape, d in specs.values())


def write_weight_file(
    write: Callable[[memoryview | bytes], object], specs: Specs, loaders: Mapping[str, Callable[[], Tensor]]
) -> int:
    """Write head and tensors through `write`, making one at a time; returns the bytes of the tensors."""
    write(header(specs))
    total = 0
    for name in file_order(specs):
        tensor = loaders[name]()
        assert (tuple(tensor.shape), tensor.dtype) == specs[name], name
        total += write_tensor(write, tensor)
    return total


def write_tensor(write: Callable[[memoryview | bytes], object], tensor: Tensor) -> int:
    """Write a tensor's bytes in pieces and return how many they are."""
    data = tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data
    for start in range(0, len(data), _PIECE_BYTES):
        write(data[start : start + _PIECE_BYTES])
    return len(data)
