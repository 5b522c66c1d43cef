"""Dense linear layer: tiles of 64 rows, the inputs in order; see `kernels/linear.py`.

bf16 operands meet on tensor cores with float32 sums; with a float32 operand, products are float32.
"""

import torch
import triton
import triton.language as tl

from deepinfer.kernels.linear import linear_fake
from deepinfer.kernels.packing import unpack_linear
from deepinfer.kernels.triton.launch import blocks, launch
from deepinfer.kernels.triton.numbers import multiply_add, round_to


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x,
    weight,
    y,
    rows,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    Y_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, INPUTS, BLOCK_K):
        inputs = start + tl.arange(0, BLOCK_K)
        a = tl.load(
            x + row[:, None] * INPUTS + inputs[None, :],
            mask=(row < rows)[:, None] & (inputs < INPUTS)[None, :],
            other=0.0,
        )
        b = tl.load(
            weight + output[:, None].to(tl.int64) * INPUTS + inputs[None, :],
            mask=(output < OUTPUTS)[:, None] & (inputs < INPUTS)[None, :],
            other=0.0,
        )
        total = multiply_add(a, tl.trans(b), total)
    tl.store(
        y + row[:, None] * Y_STRIDE + output[None, :],
        round_to(total, y.dtype.element_ty),
        mask=(row < rows)[:, None] & (output < OUTPUTS)[None, :],
    )


def project(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> None:
    """Write `x [rows, K] @ weight [N, K]^T` to `y [rows, N]`, whose rows may be apart."""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    exact = x.dtype == weight.dtype == torch.bfloat16
    sizes = (64, 64, 64) if exact else (32, 32, 32)
    launch(
        _linear_kernel,
        (blocks(rows, sizes[0]), blocks(outputs, sizes[1])),
        *(x, weight, y, rows),
        stages=3,
        INPUTS=inputs,
        OUTPUTS=outputs,
        Y_STRIDE=y.stride(0),
        BLOCK_M=sizes[0],
        BLOCK_N=sizes[1],
        BLOCK_K=sizes[2],
    )


def linear(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """x [rows, K], weight [N, K], bf16 | fp32 -> y [rows, N]; a packed weight is unpacked at each call."""
    y = linear_fake(x, weight, out_dtype)
    project(x, unpack_linear(weight), y)
    return y
