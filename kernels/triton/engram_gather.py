"""Records of the n-gram table: one program per row and column; see `kernels/engram_gather.py`."""

import torch
import triton
import triton.language as tl

from deepinfer.kernels.engram_gather import engram_gather_fake
from deepinfer.kernels.formats import FP8_GROUP
from deepinfer.kernels.triton.dequantize_fp8 import load_fp8_record
from deepinfer.kernels.triton.launch import launch, power_of_two
from deepinfer.kernels.triton.numbers import round_to


@triton.jit
def _engram_gather_kernel(
    embed, ids, y, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64) * COLUMNS + tl.program_id(1)
    record = tl.load(ids + place)
    known = (record >= 0) & (record < ROWS)  # never read outside the table
    values = load_fp8_record(embed + record * (SIZE + SIZE // 32), known, SIZE, BLOCK)
    column = tl.arange(0, BLOCK)
    tl.store(y + place * SIZE + column, round_to(values, y.dtype.element_ty), mask=column < SIZE)


def engram_gather(embed: torch.Tensor, ids: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """embed uint8 [rows, d + d/32], ids [T, columns] -> y [T, columns * d]; an id outside gives zeros."""
    y = engram_gather_fake(embed, ids, out_dtype)
    rows, columns = ids.shape
    size = embed.shape[1] // (FP8_GROUP + 1) * FP8_GROUP
    launch(
        _engram_gather_kernel,
        (rows, columns),
        *(embed, ids, y),
        warps=2,
        ROWS=embed.shape[0],
        COLUMNS=columns,
        SIZE=size,
        BLOCK=power_of_two(size, FP8_GROUP),
    )
    return y
