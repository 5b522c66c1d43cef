"""Values of FP8 byte records: one program per record; see `kernels/quantize_fp8.py`."""

import torch
import triton
import triton.language as tl

from deepinfer.kernels.formats import FP8_GROUP
from deepinfer.kernels.quantize_fp8 import dequantize_fp8_fake
from deepinfer.kernels.triton.launch import launch, power_of_two
from deepinfer.kernels.triton.numbers import e4m3_decode, e8m0_decode, round_to


@triton.jit
def load_fp8_record(record, valid, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """float32 values [BLOCK] of the record at an address; zeros beyond SIZE, and if not valid."""
    column = tl.arange(0, BLOCK)
    group = tl.arange(0, BLOCK // 32)
    codes = tl.load(record + column, mask=valid & (column < SIZE), other=0)
    scale = tl.load(record + SIZE + group, mask=valid & (group < SIZE // 32), other=0)
    values = tl.reshape(e4m3_decode(codes), (BLOCK // 32, 32)) * e8m0_decode(scale.to(tl.int32))[:, None]
    return tl.reshape(values, (BLOCK,))


@triton.jit
def _dequantize_fp8_kernel(record, y, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    values = load_fp8_record(record + row * (SIZE + SIZE // 32), True, SIZE, BLOCK)
    column = tl.arange(0, BLOCK)
    tl.store(y + row * SIZE + column, round_to(values, y.dtype.element_ty), mask=column < SIZE)


def dequantize_fp8(record: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """record uint8 [..., D + D/32] -> y [..., D]."""
    y = dequantize_fp8_fake(record, out_dtype)
    size = y.shape[-1]
    launch(
        _dequantize_fp8_kernel,
        (y.numel() // size,),
        *(record, y),
        SIZE=size,
        BLOCK=power_of_two(size, FP8_GROUP),
    )
    return y
