"""Keys of the indexer: projection, norm, then record and write; see `kernels/index_key.py`."""

import torch
import triton
import triton.language as tl

from deepinfer.kernels.index_key import index_key_fake
from deepinfer.kernels.packing import linear_outputs, unpack_linear
from deepinfer.kernels.quantize_tail import TAIL_GROUP
from deepinfer.kernels.triton.hadamard import butterflies
from deepinfer.kernels.triton.launch import launch, power_of_two
from deepinfer.kernels.triton.linear import project
from deepinfer.kernels.triton.numbers import bfloat16_bits, rounded, to_float32
from deepinfer.kernels.triton.quantize_fp4 import store_fp4_record
from deepinfer.kernels.triton.quantize_tail import store_tail_record
from deepinfer.kernels.triton.rms_norm import rms_norm
from deepinfer.kernels.triton.rope import partner_of, turn


@triton.jit
def _write_entry_kernel(
    x,
    table,
    region,
    positions,
    request_index,
    block_table,
    factor,
    RATIO: tl.constexpr,
    FORM: tl.constexpr,
    BYTES: tl.constexpr,
    SIZE: tl.constexpr,
    ROTATED: tl.constexpr,
    TABLE: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    ENTRY_STRIDE: tl.constexpr,
    ROUNDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row)
    closes = (position >= 0) & ((position + 1) % RATIO == 0)
    position = tl.maximum(position, 0)
    entry = position // RATIO
    line = tl.load(request_index + row, mask=closes, other=0)
    block = tl.load(block_table + line * TABLE + entry // ENTRIES, mask=closes, other=0)
    column = tl.arange(0, BLOCK)
    inside = closes & (column < SIZE)
    own = to_float32(tl.load(x + row * SIZE + column, mask=inside, other=0.0))
    other = to_float32(tl.load(x + row * SIZE + partner_of(column, SIZE, ROTATED), mask=inside, other=0.0))
    angles = table + entry * RATIO * ROTATED
    values = rounded(turn(own, other, angles, column, SIZE, ROTATED, False), x.dtype.element_ty)
    target = region + block * BLOCK_STRIDE + (entry % ENTRIES) * ENTRY_STRIDE
    if FORM == "plain":
        tl.store(target + column, values, mask=inside)
    elif FORM == "tail":
        store_tail_record(target, values, bfloat16_bits(values), closes, True, SIZE, ROTATED, BYTES, BLOCK)
    else:
        if FORM == "hadamard":
            values = butterflies(values, SIZE, ROUNDS) * factor
            values = rounded(values, x.dtype.element_ty)
        store_fp4_record(target, values, closes, SIZE, 16 if FORM == "e4m3" else 32, BLOCK)


def write_entries(
    x: torch.Tensor,
    table: torch.Tensor,
    region: torch.Tensor,
    positions: torch.Tensor,
    request_index: torch.Tensor,
    block_table: torch.Tensor,
    ratio: int,
    form: str,
) -> None:
    """Rotate and write `x [T, d]` of rows that close a group.

    `form`: "plain" float32; "e8m0" or "e4m3" FP4 with such scales; "hadamard" FP4 with E8M0 scales after that
    rotation; "tail" FP8 of which the rotated part stays bfloat16.
    """
    rows, size = x.shape
    launch(
        _write_entry_kernel,
        (rows,),
        *(x, table, region, positions, request_index, block_table, size**-0.5),
        RATIO=ratio,
        FORM=form,
        BYTES=region.shape[2],
        SIZE=size,
        ROTATED=table.shape[1],
        TABLE=block_table.shape[1],
        ENTRIES=region.shape[1],
        BLOCK_STRIDE=region.stride(0),
        ENTRY_STRIDE=region.stride(1),
        ROUNDS=size.bit_length() - 1,
        BLOCK=power_of_two(size, TAIL_GROUP if form == "tail" else 32),
    )


def index_key(
    latent: torch.Tensor,
    wk: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    table: torch.Tensor,
    region: torch.Tensor,
    positions: torch.Tensor,
    request_index: torch.Tensor,
    block_table: torch.Tensor,
    ratio: int,
    quantize: bool,
) -> None:
    """latent [T, K], wk [d, K], norm_weight [d]; writes to region [blocks, entries, record]."""
    paged = (positions, request_index, block_table, ratio)
    index_key_fake(latent, wk, norm_weight, eps, table, region, *paged, quantize)
    key = latent.new_empty((latent.shape[0], linear_outputs(wk)))
    project(latent, unpack_linear(wk), key)
    write_entries(rms_norm(key, norm_weight, eps), table, region, *paged, "e8m0" if quantize else "plain")
