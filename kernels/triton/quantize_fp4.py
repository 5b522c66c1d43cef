"""FP4 byte records: one program per record; see `kernels/quantize_fp4.py`."""

import torch
import triton
import triton.language as tl

from deepinfer.kernels.formats import FP4_GROUP
from deepinfer.kernels.quantize_fp4 import quantize_fp4_fake
from deepinfer.kernels.triton.launch import launch, power_of_two
from deepinfer.kernels.triton.numbers import quantize_fp4 as quantize_groups
from deepinfer.kernels.triton.numbers import to_float32


@triton.jit
def store_fp4_record(record, values, valid, SIZE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Write float32 `values [BLOCK]`, of which SIZE count, to a record, if valid.

    GROUP is 32 (scales are powers of two) or 16 (scales are E4M3).
    """
    codes, scale = quantize_groups(tl.reshape(values, (BLOCK // GROUP, GROUP)), GROUP == 32)
    byte = tl.arange(0, BLOCK // 2)
    group = tl.arange(0, BLOCK // GROUP)
    tl.store(record + byte, tl.reshape(codes, (BLOCK // 2,)), mask=valid & (byte < SIZE // 2))
    tl.store(record + SIZE // 2 + group, scale.to(tl.uint8), mask=valid & (group < SIZE // GROUP))


@triton.jit
def _quantize_fp4_kernel(x, record, SIZE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    values = to_float32(tl.load(x + row * SIZE + column, mask=column < SIZE, other=0.0))
    store_fp4_record(record + row * (SIZE // 2 + SIZE // GROUP), values, True, SIZE, GROUP, BLOCK)


def quantize_fp4(x: torch.Tensor, scale_format: str) -> torch.Tensor:
    """x [..., D] bf16 | fp32 -> record uint8 [..., D/2 + D/group]."""
    record = quantize_fp4_fake(x, scale_format)
    size = x.shape[-1]
    launch(
        _quantize_fp4_kernel,
        (x.numel() // size,),
        *(x, record),
        SIZE=size,
        GROUP=FP4_GROUP[scale_format],
        BLOCK=power_of_two(size, FP4_GROUP[scale_format]),
    )
    return record
