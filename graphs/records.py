"""Cache records: how a vector is stored in each precision (spec/model.md 12.5).

`native` keeps the model's byte formats; `float32` keeps the vector itself, with every quantiser switched off.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from deepinfer.kernels import dequantize_fp4, dequantize_fp8

PrecisionName = Literal["native", "float32"]


@dataclass(frozen=True)
class Precision:
    """The numeric contract of a build: activation dtype, and whether the model's quantisers act."""

    name: PrecisionName

    @property
    def quantized(self) -> bool:
        """Whether activations and cache records are rounded to FP8 and FP4."""
        return self.name == "native"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations between operations."""
        return torch.bfloat16 if self.quantized else torch.float32

    def window_vector(self, record: Tensor) -> Tensor:
        """Decode window records `[..., record]` to `[..., head_dim]`."""
        return dequantize_fp8(record, self.dtype) if self.quantized else record

    def compressed_vector(self, record: Tensor) -> Tensor:
        """Decode compressed records to `[..., head_dim]`."""
        return dequantize_fp4(record, "e4m3", self.dtype) if self.quantized else record

    def index_key_vector(self, record: Tensor) -> Tensor:
        """Decode index key records to `[..., index_head_dim]` float32."""
        return dequantize_fp4(record, "e8m0", torch.float32) if self.quantized else record


PRECISIONS = {name: Precision(name) for name in ("native", "float32")}
