"""Hyper-connection coefficients: products in 16 splits, then a program per row; see `kernels/mhc_mix.py`."""

import torch
import triton
import triton.language as tl

from deepinfer.kernels.mhc_mix import Coefficients, mhc_mix_fake
from deepinfer.kernels.triton.launch import blocks, launch, power_of_two
from deepinfer.kernels.triton.numbers import to_float32

_SPLITS = 16  # of the inputs, so that a few rows still keep the device busy
_ROWS, _INPUTS = 16, 64


@triton.jit(do_not_specialize=["rows"])
def _mix_products_kernel(
    residual,
    fn,
    partial,
    rows,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(1) * SPLIT
    output = tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, SPLIT, BLOCK_K):
        inputs = first + start + tl.arange(0, BLOCK_K)
        inside = inputs < INPUTS
        x = to_float32(
            tl.load(
                residual + row[:, None] * INPUTS + inputs[None, :],
                mask=(row < rows)[:, None] & inside[None, :],
                other=0.0,
            )
        )
        weight = tl.load(
            fn + output[:, None] * INPUTS + inputs[None, :],
            mask=(output < OUTPUTS)[:, None] & inside[None, :],
            other=0.0,
        )
        total = tl.dot(x, tl.trans(weight), total, input_precision="ieee")
        squares += tl.sum(x * x, axis=1)
    # the column behind the products holds the squares
    total = tl.where((output == OUTPUTS)[None, :], squares[:, None], total)
    place = (row * tl.num_programs(1) + tl.program_id(1)) * BLOCK_N
    tl.store(partial + place[:, None] + output[None, :], total, mask=(row < rows)[:, None])


@triton.jit
def _split_sum(partial, row, output, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Sum of the splits, first to last, of one or more outputs of a row."""
    total = tl.load(partial + row * SPLITS * BLOCK_N + output)
    for split in range(1, SPLITS):
        total += tl.load(partial + (row * SPLITS + split) * BLOCK_N + output)
    return total


@triton.jit
def _sigmoid(x):
    return tl.div_rn(1.0, 1.0 + tl.exp(-x))


@triton.jit
def _mix_coefficients_kernel(
    partial,
    base,
    scale,
    pre,
    post,
    comb,
    rms_eps,
    hc_eps,
    ITERATIONS: tl.constexpr,
    STREAMS: tl.constexpr,
    INPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    mean = tl.div_rn(_split_sum(partial, row, (2 + STREAMS) * STREAMS, SPLITS, BLOCK_N), INPUTS * 1.0)
    rms = tl.div_rn(1.0, tl.sqrt_rn(mean + rms_eps))
    stream = tl.arange(0, BLOCK)
    inside = stream < STREAMS
    index = tl.where(inside, stream, 0)
    logits = _split_sum(partial, row, index, SPLITS, BLOCK_N) * rms * tl.load(scale)
    values = _sigmoid(logits + tl.load(base + index)) + hc_eps
    tl.store(pre + row * STREAMS + stream, values, mask=inside)
    logits = _split_sum(partial, row, STREAMS + index, SPLITS, BLOCK_N) * rms * tl.load(scale + 1)
    values = 2.0 * _sigmoid(logits + tl.load(base + STREAMS + index))
    tl.store(post + row * STREAMS + stream, values, mask=inside)
    cell = index[:, None] * STREAMS + index[None, :]
    real = inside[:, None] & inside[None, :]
    place = 2 * STREAMS + cell
    logits = _split_sum(partial, row, place, SPLITS, BLOCK_N) * rms * tl.load(scale + 2)
    logits = tl.where(real, logits + tl.load(base + place), float("-inf"))
    top = tl.max(logits, axis=1)
    mixing = tl.where(real, tl.exp(logits - tl.where(inside, top, 0.0)[:, None]), 0.0)
    total = tl.where(inside, tl.sum(mixing, axis=1), 1.0)
    mixing = tl.where(real, tl.div_rn(mixing, tl.broadcast_to(total[:, None], mixing.shape)) + hc_eps, 0.0)
    for step in range(2 * ITERATIONS - 1):
        if step % 2 == 0:
            line = tl.broadcast_to((tl.sum(mixing, axis=0) + hc_eps)[None, :], mixing.shape)
        else:
            line = tl.broadcast_to((tl.sum(mixing, axis=1) + hc_eps)[:, None], mixing.shape)
        mixing = tl.where(real, tl.div_rn(mixing, tl.where(real, line, 1.0)), 0.0)
    tl.store(comb + row * STREAMS * STREAMS + cell, mixing, mask=real)


def mhc_mix(
    residual: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    sinkhorn_iters: int,
    rms_eps: float,
    hc_eps: float,
) -> Coefficients:
    """residual [T, n, D]; fn, base, scale as in the definition -> pre, post [T, n], comb [T, n, n]."""
    outputs = mhc_mix_fake(residual, fn, base, scale, sinkhorn_iters, rms_eps, hc_eps)
    rows, streams, _ = residual.shape
    inputs = fn.shape[1]
    width = power_of_two(fn.shape[0] + 1, 16)
    partial = fn.new_empty((rows, _SPLITS, width))
    launch(
        _mix_products_kernel,
        (blocks(rows, _ROWS), _SPLITS),
        *(residual, fn, partial, rows),
        stages=2,
        INPUTS=inputs,
        OUTPUTS=fn.shape[0],
        SPLIT=blocks(blocks(inputs, _SPLITS), _INPUTS) * _INPUTS,
        BLOCK_M=_ROWS,
        BLOCK_N=width,
        BLOCK_K=_INPUTS,
    )
    launch(
        _mix_coefficients_kernel,
        (rows,),
        *(partial, base, scale, *outputs, rms_eps, hc_eps),
        warps=1,
        ITERATIONS=sinkhorn_iters,
        STREAMS=streams,
        INPUTS=inputs,
        SPLITS=_SPLITS,
        BLOCK_N=width,
        BLOCK=power_of_two(streams, 2),
    )
    return outputs
