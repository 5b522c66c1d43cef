"""The weight store of an artifact, mapped into memory: one tensor per weight, no copy, never written.

All graphs share these tensors. The files were hashed by the reader; pages are read when first used.
"""

import math
import mmap
import os
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.artifacts import OpenedArtifact, TensorEntry
from deepinfer.errors import ArtifactFormatError, ResourceError

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


@dataclass(frozen=True)
class WeightStore:
    """Weights by name. The maps stay open as long as any tensor of them is alive."""

    tensors: dict[str, Tensor]
    total_bytes: int

    @classmethod
    def open(cls, artifact: OpenedArtifact) -> "WeightStore":
        """Maps every file below weights/ and makes a tensor for every weight.

        Raises ArtifactFormatError for a dtype that torch lacks, ResourceError if a file cannot be mapped, and
        ArtifactCorruptError if one has changed.
        """
        maps = {path: _map(artifact, path) for path in {entry.path for entry in artifact.tensors.values()}}
        tensors = {name: _tensor(maps[entry.path], name, entry) for name, entry in artifact.tensors.items()}
        return cls(tensors, sum(entry.size_bytes for entry in artifact.tensors.values()))

    def on(self, device: torch.device) -> "WeightStore":
        """A copy on a device, every tensor in memory of its own. Raises ResourceError if it does not fit."""
        try:
            tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        except torch.OutOfMemoryError as error:
            raise ResourceError(
                f"{self.total_bytes} bytes of weights do not fit into its memory", where=str(device)
            ) from error
        return WeightStore(tensors, self.total_bytes)


def _map(artifact: OpenedArtifact, path: str) -> mmap.mmap:
    descriptor = artifact.open_file(path)
    try:
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ResourceError(f"cannot be mapped into memory: {error}", where=path) from error
    finally:
        os.close(descriptor)  # the map keeps the file


def _tensor(data: mmap.mmap, name: str, entry: TensorEntry) -> Tensor:
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise ArtifactFormatError(
            f"{name!r:.200} has the dtype {entry.dtype}, unknown here", where=entry.path
        )
    if entry.size_bytes == 0:
        return torch.empty(entry.shape, dtype=dtype)
    with warnings.catch_warnings():
        # The memory is read-only on purpose: a stray write ends the process instead of changing a weight.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        flat = torch.frombuffer(data, dtype=dtype, count=math.prod(entry.shape), offset=entry.offset)
    return flat.view(entry.shape)
