"""FP8 byte records: one program per record; see `kernels/quantize_fp8.py`."""

import torch
import triton
import triton.language as tl

from deepinfer.kernels.formats import FP8_GROUP
from deepinfer.kernels.quantize_fp8 import quantize_fp8_fake
from deepinfer.kernels.triton.launch import launch, power_of_two
from deepinfer.kernels.triton.numbers import quantize_fp8 as quantize_groups
from deepinfer.kernels.triton.numbers import to_float32


@triton.jit
def store_fp8_record(record, values, valid, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Write float32 `values [BLOCK]`, of which SIZE count, to a record; zeros if not valid."""
    codes, scale = quantize_groups(tl.reshape(values, (BLOCK // 32, 32)))
    column = tl.arange(0, BLOCK)
    group = tl.arange(0, BLOCK // 32)
    codes = tl.where(valid, tl.reshape(codes, (BLOCK,)).to(tl.int32), 0)
    tl.store(record + column, codes.to(tl.uint8), mask=column < SIZE)
    tl.store(record + SIZE + group, tl.where(valid, scale, 0).to(tl.uint8), mask=group < SIZE // 32)


@triton.jit
def _quantize_fp8_kernel(x, record, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    values = to_float32(tl.load(x + row * SIZE + column, mask=column < SIZE, other=0.0))
    store_fp8_record(record + row * (SIZE + SIZE // 32), values, True, SIZE, BLOCK)


def quantize_fp8(x: torch.Tensor) -> torch.Tensor:
    """x [..., D] bf16 | fp32 -> record uint8 [..., D + D/32]."""
    record = quantize_fp8_fake(x)
    size = x.shape[-1]
    launch(
        _quantize_fp8_kernel,
        (x.numel() // size,),
        *(x, record),
        SIZE=size,
        BLOCK=power_of_two(size, FP8_GROUP),
    )
    return record
