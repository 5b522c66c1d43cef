"""Cache records: how a vector is stored in each precision (spec/model.md 12.5).

`native` keeps the model's byte formats; `float32` keeps the vector itself, with every quantiser switched off.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from deepinfer.graphs.config import ModelConfig
from deepinfer.kernels import dequantize_fp4, dequantize_fp8, dequantize_tail
from deepinfer.kernels.quantize_tail import tail_record_values

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

    def window_vector(self, record: Tensor, tail: int = 0) -> Tensor:
        """Decode window records `[..., record]` to `[..., head_dim]`; for `tail` see `record_tail`."""
        if self.quantized and tail:
            return _mixed_vector(record, tail, self.dtype)
        return dequantize_fp8(record, self.dtype) if self.quantized else record

    def compressed_vector(self, record: Tensor, tail: int = 0) -> Tensor:
        """Decode compressed records to `[..., head_dim]`; for `tail` see `record_tail`."""
        if self.quantized and tail:
            return _mixed_vector(record, tail, self.dtype)
        return dequantize_fp4(record, "e4m3", self.dtype) if self.quantized else record

    def index_key_vector(self, record: Tensor) -> Tensor:
        """Decode index key records to `[..., index_head_dim]` float32."""
        return dequantize_fp4(record, "e8m0", torch.float32) if self.quantized else record


def _mixed_vector(record: Tensor, tail: int, dtype: torch.dtype) -> Tensor:
    vector: Tensor = dequantize_tail(record, tail_record_values(record.shape[-1], tail), tail, dtype)
    return vector


def record_tail(config: ModelConfig, precision: Precision) -> int:
    """How many values at the end of a window or compressed record stay bfloat16; 0: it has no such part."""
    mixed = config.generation.biased_compression and precision.quantized
    return config.qk_rope_head_dim if mixed else 0


PRECISIONS = {name: Precision(name) for name in ("native", "float32")}
