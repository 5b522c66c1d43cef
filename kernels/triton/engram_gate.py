"""Gate of the n-gram memory: one program per row and stream; see `kernels/engram_gate.py`."""

import torch
import triton
import triton.language as tl

from deepinfer.kernels.engram_gate import MIN_DOT, engram_gate_fake
from deepinfer.kernels.triton.launch import launch, power_of_two
from deepinfer.kernels.triton.numbers import round_to, to_float32
from deepinfer.kernels.triton.rms_norm import inverse_rms


@triton.jit
def _engram_gate_kernel(
    residual,
    key_and_value,
    qk_weight,
    y,
    eps,
    LEAST: tl.constexpr,
    SCALE: tl.constexpr,
    STREAMS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    stream = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    place = (row * STREAMS + stream) * SIZE + column
    own = to_float32(tl.load(residual + place, mask=inside, other=0.0))
    memory = key_and_value + row * (STREAMS + 1) * SIZE + column
    key = to_float32(tl.load(memory + stream * SIZE, mask=inside, other=0.0))
    value = to_float32(tl.load(memory + STREAMS * SIZE, mask=inside, other=0.0))
    weight = tl.load(qk_weight + stream * SIZE + column, mask=inside, other=0.0)
    dot = tl.sum(own * weight * key, axis=0)
    dot = dot * inverse_rms(own, SIZE, eps) * inverse_rms(key, SIZE, eps) * SCALE
    magnitude = tl.abs(dot)
    # a comparison lets a NaN through
    root = tl.sqrt_rn(tl.where(magnitude < LEAST, LEAST, magnitude))
    gate = tl.div_rn(1.0, 1.0 + tl.exp(tl.where(dot < 0.0, root, -root)))
    tl.store(y + place, round_to(own + gate * value, y.dtype.element_ty), mask=inside)


def engram_gate(
    residual: torch.Tensor, key_and_value: torch.Tensor, qk_weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """residual [T, n, D], key_and_value [T, (n + 1) D], qk_weight [n, D] -> y like residual."""
    y = engram_gate_fake(residual, key_and_value, qk_weight, eps)
    rows, streams, size = residual.shape
    launch(
        _engram_gate_kernel,
        (rows, streams),
        *(residual, key_and_value, qk_weight, y, eps),
        warps=8 if size > 2048 else 4,
        LEAST=MIN_DOT,
        SCALE=size**-0.5,
        STREAMS=streams,
        SIZE=size,
        BLOCK=power_of_two(size),
    )
    return y
