"""Linear layer with E4M3 weights: tiles of 64 rows, the inputs in order; see `kernels/linear_fp8.py`.

Activations go through the FP8 quantiser once, in a pass of their own. What is left of them and the decoded
weights are exact in bf16, so tensor cores multiply them as they are.
"""

import torch
import triton
import triton.language as tl

from deepinfer.kernels.formats import FP8_GROUP
from deepinfer.kernels.linear_fp8 import linear_fp8_fake
from deepinfer.kernels.packing import unpack_linear_fp8
from deepinfer.kernels.triton.launch import blocks, launch, power_of_two, require
from deepinfer.kernels.triton.numbers import (
    e4m3_decode,
    e8m0_decode,
    multiply_add,
    round_to,
    scale_groups,
    through_fp8,
    to_float32,
)

_COLUMNS = 1024


@triton.jit
def _through_fp8_kernel(x, y, SIZE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * SIZE
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = to_float32(tl.load(x + row + column, mask=column < SIZE, other=0.0))
    values = tl.reshape(through_fp8(tl.reshape(values, (BLOCK // GROUP, GROUP))), (BLOCK,))
    tl.store(y + row + column, round_to(values, y.dtype.element_ty), mask=column < SIZE)


def activations(x: torch.Tensor, quantize: bool, group: int) -> torch.Tensor:
    """`x [..., K]` as a linear layer takes it: through FP8 per `group` values, exact in bf16, or as it is."""
    if not quantize:
        return x
    require("linear", group == power_of_two(group) and group <= _COLUMNS, f"groups of {group} activations")
    y = torch.empty_like(x, dtype=torch.bfloat16)
    size = x.shape[-1]
    block = min(_COLUMNS, power_of_two(size, group))
    launch(
        _through_fp8_kernel,
        (x.numel() // size, blocks(size, block)),
        *(x, y),
        SIZE=size,
        GROUP=group,
        BLOCK=block,
    )
    return y


@triton.jit(do_not_specialize=["rows"])
def _linear_fp8_kernel(
    x,
    weight,
    scale,
    y,
    rows,
    GROUPS: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    ROWS_PER_SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    group = tl.program_id(2).to(tl.int64)
    tiles: tl.constexpr = (INPUTS + 31) // 32
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, INPUTS, BLOCK_K):
        inputs = start + tl.arange(0, BLOCK_K)
        real = (output < OUTPUTS)[:, None]
        a = tl.load(
            x + (row[:, None] * GROUPS + group) * INPUTS + inputs[None, :],
            mask=(row < rows)[:, None] & (inputs < INPUTS)[None, :],
            other=0.0,
        )
        codes = tl.load(
            weight + (group * OUTPUTS + output[:, None]) * INPUTS + inputs[None, :],
            mask=real & (inputs < INPUTS)[None, :],
            other=0,
        )
        tile = start // 32 + tl.arange(0, BLOCK_K // 32)
        place = (group * SCALE_ROWS + output[:, None] // ROWS_PER_SCALE) * tiles + tile[None, :]
        factor = tl.load(scale + place, mask=real & (tile < tiles)[None, :], other=0)
        b = scale_groups(e4m3_decode(codes), e8m0_decode(factor.to(tl.int32)))
        if a.dtype == tl.bfloat16:
            b = round_to(b, tl.bfloat16)
        total = multiply_add(a, tl.trans(b), total)
    tl.store(
        y + (row[:, None] * GROUPS + group) * OUTPUTS + output[None, :],
        round_to(total, y.dtype.element_ty),
        mask=(row < rows)[:, None] & (output < OUTPUTS)[None, :],
    )


def project_fp8(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, y: torch.Tensor) -> None:
    """Write to `y [rows, G, N]` the products of `x [rows, G, K]` with plain or packed weights."""
    require("linear_fp8", not weight.is_floating_point(), "weights that are not quantised")
    rows, groups, inputs = x.shape
    rows_per_scale = FP8_GROUP
    if weight.dim() == 4:
        weight, scale = unpack_linear_fp8(weight, scale)
        rows_per_scale = 1
    outputs = weight.shape[1]
    sizes = (64, 64, 64) if x.dtype == torch.bfloat16 else (32, 32, 32)
    launch(
        _linear_fp8_kernel,
        (blocks(rows, sizes[0]), blocks(outputs, sizes[1]), groups),
        *(x, weight, scale, y, rows),
        stages=2,
        GROUPS=groups,
        INPUTS=inputs,
        OUTPUTS=outputs,
        SCALE_ROWS=scale.shape[1],
        ROWS_PER_SCALE=rows_per_scale,
        BLOCK_M=sizes[0],
        BLOCK_N=sizes[1],
        BLOCK_K=sizes[2],
    )


def linear_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    quantize_activation: bool,
    activation_group: int = FP8_GROUP,
) -> torch.Tensor:
    """x [rows, G, K], weight uint8 [G, N, K], scale uint8 [G, N/32, K/32] -> y [rows, G, N] like x."""
    y = linear_fp8_fake(x, weight, scale, quantize_activation, activation_group)
    project_fp8(activations(x, quantize_activation, activation_group), weight, scale, y)
    return y
