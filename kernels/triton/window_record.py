"""Window records: norm, rotation and FP8 in one program per row; see `kernels/window_record.py`."""

import torch
import triton
import triton.language as tl

from deepinfer.kernels.formats import FP8_GROUP
from deepinfer.kernels.quantize_tail import TAIL_GROUP
from deepinfer.kernels.triton.launch import launch, power_of_two
from deepinfer.kernels.triton.numbers import bfloat16_bits, rounded, to_float32
from deepinfer.kernels.triton.quantize_fp8 import store_fp8_record
from deepinfer.kernels.triton.quantize_tail import store_tail_record
from deepinfer.kernels.triton.rms_norm import inverse_rms
from deepinfer.kernels.triton.rope import partner_of, turn
from deepinfer.kernels.window_record import window_record_fake


@triton.jit
def _window_record_kernel(
    kv,
    norm_weight,
    eps,
    table,
    positions,
    record,
    SIZE: tl.constexpr,
    ROTATED: tl.constexpr,
    QUANTIZE: tl.constexpr,
    TAIL: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = kv.dtype.element_ty
    position = tl.load(positions + row)
    valid = position >= 0
    column = tl.arange(0, BLOCK)
    partner = partner_of(column, SIZE, ROTATED)
    inside = column < SIZE
    own = to_float32(tl.load(kv + row * SIZE + column, mask=inside, other=0.0))
    other = to_float32(tl.load(kv + row * SIZE + partner, mask=inside, other=0.0))
    scale = inverse_rms(own, SIZE, eps)
    own_weight = to_float32(tl.load(norm_weight + column, mask=inside, other=0.0))
    other_weight = to_float32(tl.load(norm_weight + partner, mask=inside, other=0.0))
    own = rounded(own_weight * (own * scale), dtype)
    other = rounded(other_weight * (other * scale), dtype)
    angles = table + tl.maximum(position, 0) * ROTATED
    turned = rounded(turn(own, other, angles, column, SIZE, ROTATED, False), dtype)
    if QUANTIZE and TAIL > 0:
        bits = bfloat16_bits(turned)
        store_tail_record(record + row * BYTES, turned, bits, True, valid, SIZE, TAIL, BYTES, BLOCK)
    elif QUANTIZE:
        store_fp8_record(record + row * (SIZE + SIZE // 32), turned, valid, SIZE, BLOCK)
    else:
        tl.store(record + row * SIZE + column, tl.where(valid, turned, 0.0), mask=inside)


def window_record(
    kv: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    table: torch.Tensor,
    positions: torch.Tensor,
    quantize: bool,
    tail: int = 0,
) -> torch.Tensor:
    """kv [T, d], norm_weight [d], table [P, r], positions [T] -> uint8 [T, bytes] or fp32 [T, d]."""
    record = window_record_fake(kv, norm_weight, eps, table, positions, quantize, tail)
    rows, size = kv.shape
    launch(
        _window_record_kernel,
        (rows,),
        *(kv, norm_weight, eps, table, positions, record),
        SIZE=size,
        ROTATED=table.shape[1],
        QUANTIZE=quantize,
        TAIL=tail,
        BYTES=record.shape[1],
        BLOCK=power_of_two(size, TAIL_GROUP if tail else FP8_GROUP),
    )
    return record
