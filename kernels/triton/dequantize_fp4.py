"""Values of FP4 byte records: one program per record; see `kernels/quantize_fp4.py`."""

import torch
import triton
import triton.language as tl

from deepinfer.kernels.formats import FP4_GROUP
from deepinfer.kernels.quantize_fp4 import dequantize_fp4_fake
from deepinfer.kernels.triton.launch import launch, power_of_two
from deepinfer.kernels.triton.numbers import e4m3_decode, e8m0_decode, round_to, scale_groups, unpack_e2m1


@triton.jit
def decode_fp4(packed, scale, E8M0: tl.constexpr):
    """Bytes [n, size / 2] and scale bytes [n, groups], both uint8 -> float32 [n, size], exact."""
    factors = e8m0_decode(scale.to(tl.int32)) if E8M0 else e4m3_decode(scale)
    return scale_groups(unpack_e2m1(packed), factors)


@triton.jit
def _dequantize_fp4_kernel(record, y, SIZE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = record + row * (SIZE // 2 + SIZE // GROUP)
    byte = tl.arange(0, BLOCK // 2)
    group = tl.arange(0, BLOCK // GROUP)
    packed = tl.load(start + byte, mask=byte < SIZE // 2, other=0)
    scale = tl.load(start + SIZE // 2 + group, mask=group < SIZE // GROUP, other=0)
    values = decode_fp4(packed[None, :], scale[None, :], GROUP == 32)
    column = tl.arange(0, BLOCK)
    values = round_to(tl.reshape(values, (BLOCK,)), y.dtype.element_ty)
    tl.store(y + row * SIZE + column, values, mask=column < SIZE)


def dequantize_fp4(record: torch.Tensor, scale_format: str, out_dtype: torch.dtype) -> torch.Tensor:
    """record uint8 [..., D/2 + D/group] -> y [..., D]."""
    y = dequantize_fp4_fake(record, scale_format, out_dtype)
    size = y.shape[-1]
    launch(
        _dequantize_fp4_kernel,
        (y.numel() // size,),
        *(record, y),
        SIZE=size,
        GROUP=FP4_GROUP[scale_format],
        BLOCK=power_of_two(size, FP4_GROUP[scale_format]),
    )
    return y
