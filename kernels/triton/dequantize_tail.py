"""Values of byte records with a bfloat16 tail: one program per record; see `kernels/quantize_tail.py`."""

import torch
import triton
import triton.language as tl

from deepinfer.kernels.quantize_tail import TAIL_GROUP, dequantize_tail_fake
from deepinfer.kernels.triton.launch import launch, power_of_two
from deepinfer.kernels.triton.numbers import e4m3_decode, e8m0_decode, round_to, scale_groups


@triton.jit
def load_tail_records(start, kept, SIZE: tl.constexpr, TAIL: tl.constexpr, BLOCK: tl.constexpr):
    """float32 values [n, BLOCK] of the records at addresses [n]; zeros beyond SIZE and where not kept."""
    column = tl.arange(0, BLOCK)
    head: tl.constexpr = SIZE - TAIL
    codes = tl.load(start[:, None] + column[None, :], mask=kept[:, None] & (column < head)[None, :], other=0)
    group = tl.arange(0, BLOCK // 64)
    used = kept[:, None] & (group < (head + 63) // 64)[None, :]
    scale = tl.load(start[:, None] + SIZE + TAIL + group[None, :], mask=used, other=0)
    values = scale_groups(e4m3_decode(codes), e8m0_decode(scale.to(tl.int32)))
    in_tail = kept[:, None] & ((column >= head) & (column < SIZE))[None, :]
    place = start[:, None] + (head + 2 * (column - head))[None, :]
    low = tl.load(place, mask=in_tail, other=0).to(tl.uint32)
    high = tl.load(place + 1, mask=in_tail, other=0).to(tl.uint32)
    tail = ((low << 16) | (high << 24)).to(tl.float32, bitcast=True)
    return tl.where(in_tail, tail, values)


@triton.jit
def _dequantize_tail_kernel(
    record, y, SIZE: tl.constexpr, TAIL: tl.constexpr, BYTES: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    values = load_tail_records(record + row * BYTES, row >= 0, SIZE, TAIL, BLOCK)
    column = tl.arange(0, BLOCK)
    place = row[:, None] * SIZE + column[None, :]
    tl.store(y + place, round_to(values, y.dtype.element_ty), mask=(column < SIZE)[None, :])


def dequantize_tail(record: torch.Tensor, size: int, tail: int, out_dtype: torch.dtype) -> torch.Tensor:
    """record uint8 [..., bytes] -> y [..., size]."""
    y = dequantize_tail_fake(record, size, tail, out_dtype)
    launch(
        _dequantize_tail_kernel,
        (y.numel() // size,),
        *(record, y),
        SIZE=size,
        TAIL=tail,
        BYTES=record.shape[-1],
        BLOCK=power_of_two(size, TAIL_GROUP),
    )
    return y
