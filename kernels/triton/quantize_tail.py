"""Byte records with a bfloat16 tail: one program per record; see `kernels/quantize_tail.py`."""

import torch
import triton
import triton.language as tl

from deepinfer.kernels.quantize_tail import TAIL_GROUP, quantize_tail_fake
from deepinfer.kernels.triton.launch import launch, power_of_two
from deepinfer.kernels.triton.numbers import bfloat16_bits, quantize_fp8, to_float32


@triton.jit
def store_tail_record(
    record, values, bits, stored, real, SIZE: tl.constexpr, TAIL: tl.constexpr, BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write float32 `values [BLOCK]`, of which SIZE count, if `stored`; zeros in their place if not `real`.

    `bits` are those of the values in bfloat16, of which the last TAIL are kept.
    """
    column = tl.arange(0, BLOCK)
    values, bits = tl.where(real, values, 0.0), tl.where(real, bits, 0)
    head = column < SIZE - TAIL
    codes, scale = quantize_fp8(tl.reshape(tl.where(head, values, 0.0), (BLOCK // 64, 64)))
    tl.store(record + column, tl.reshape(codes, (BLOCK,)), mask=stored & head)
    kept = stored & (column >= SIZE - TAIL) & (column < SIZE)
    place = record + (SIZE - TAIL) + 2 * (column - (SIZE - TAIL))
    tl.store(place, (bits & 0xFF).to(tl.uint8), mask=kept)
    tl.store(place + 1, (bits >> 8).to(tl.uint8), mask=kept)
    group = tl.arange(0, BLOCK // 64)
    used: tl.constexpr = (SIZE - TAIL + 63) // 64
    rest: tl.constexpr = BYTES - SIZE - TAIL
    tl.store(
        record + SIZE + TAIL + group, tl.where(real, scale, 0).to(tl.uint8), mask=stored & (group < used)
    )
    filler = tl.arange(0, 8)
    nothing = tl.zeros((8,), tl.uint8)
    tl.store(record + SIZE + TAIL + used + filler, nothing, mask=stored & (used + filler < rest))


@triton.jit
def _quantize_tail_kernel(
    x, record, SIZE: tl.constexpr, TAIL: tl.constexpr, BYTES: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    raw = tl.load(x + row * SIZE + column, mask=column < SIZE, other=0.0)
    values, bits = to_float32(raw), bfloat16_bits(raw)
    store_tail_record(record + row * BYTES, values, bits, True, True, SIZE, TAIL, BYTES, BLOCK)


def quantize_tail(x: torch.Tensor, tail: int) -> torch.Tensor:
    """x [..., D] bf16 | fp32 -> record uint8 [..., bytes]."""
    record = quantize_tail_fake(x, tail)
    size = x.shape[-1]
    launch(
        _quantize_tail_kernel,
        (x.numel() // size,),
        *(x, record),
        SIZE=size,
        TAIL=tail,
        BYTES=record.shape[-1],
        BLOCK=power_of_two(size, TAIL_GROUP),
    )
    return record
