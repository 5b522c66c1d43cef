"""Packed layouts of weight matrices: what the native products read fastest. The values stay the same.

A panel is 16 outputs; its bytes lie together, inputs ascending. "Packed" is told by one more axis than the
plain form has. A matrix that does not fit a layout stays plain, which every op takes as well, with the same
results to the bit.

    float32     [N, K]    -> [N/16, K, 16]             N a multiple of 16
    bfloat16    [N, K]    -> [N/16, K, 16]             N a multiple of 16, K even; memory [N/16, K/2, 16, 2]
"""

from __future__ import annotations

import torch

from deepinfer.kernels.checks import FLOAT_DTYPES, check_multiple, check_tensor

PANEL = 16


def pack_linear(weight: torch.Tensor) -> torch.Tensor:
    """Return the packed form of `weight [N, K]`, bf16 or float32; one that does not fit stays plain."""
    outputs, inputs = weight.shape
    step = input_step(weight.dtype)
    if outputs == 0 or inputs == 0 or outputs % PANEL or inputs % step:
        return weight
    panels = weight.reshape(outputs // PANEL, PANEL, inputs // step, step)
    return panels.transpose(1, 2).reshape(outputs // PANEL, inputs, PANEL).contiguous()


def unpack_linear(weight: torch.Tensor) -> torch.Tensor:
    """Return `weight` as `[N, K]`, whether it is plain or packed."""
    if weight.dim() == 2:
        return weight
    panels, inputs, _ = weight.shape
    step = input_step(weight.dtype)
    pairs = weight.reshape(panels, inputs // step, PANEL, step)
    return pairs.transpose(1, 2).reshape(panels * PANEL, inputs).contiguous()


def check_linear_weight(op: str, name: str, weight: torch.Tensor, inputs: int) -> None:
    """`weight` must be `[any, inputs]` or its packed form, bf16 or float32."""
    if weight.dim() == 3:
        check_tensor(op, name, weight, (None, inputs, PANEL), FLOAT_DTYPES)
        check_multiple(op, f"inputs of the packed {name}", inputs, input_step(weight.dtype))
    else:
        check_tensor(op, name, weight, (None, inputs), FLOAT_DTYPES)


def linear_outputs(weight: torch.Tensor) -> int:
    """Return how many outputs `weight` has, plain or packed."""
    return weight.shape[0] if weight.dim() == 2 else weight.shape[0] * PANEL


def input_step(dtype: torch.dtype) -> int:
    """How many neighbouring inputs of one output lie side by side in a packed `linear` weight."""
    return 2 if dtype == torch.bfloat16 else 1
