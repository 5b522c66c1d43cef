"""Packed layouts of weight matrices: what the native products read fastest. The values stay the same.

A panel is 16 outputs; its bytes lie together, inputs ascending. "Packed" is told by one more axis than the
plain form has. A matrix that does not fit a layout stays plain, which every op takes as well, with the same
results to the bit. N must be a multiple of 16, and K even (bfloat16) or a multiple of 32 (FP8, FP4).

    float32     [N, K]       -> [N/16, K, 16]
    bfloat16    [N, K]       -> [N/16, K, 16]        in memory [N/16, K/2, 16 outputs, 2 inputs]
    either      [G, N, K]    -> [G, N/16, K, 16]     unquantised, where FP8 or FP4 is the rule; no scales
    FP8         [G, N, K]    -> [G, N/16, K, 16]     in memory [G, N/16, K/2, 16 outputs, 2 inputs]
    FP4         [E, N, K/2]  -> [E, N/16, K/2, 16]   32 bytes: 16 outputs, 4 inputs; see `pack_linear_fp4`
    scales      of either    -> [G | E, N/16, K/32, 16], one byte per output and 32 inputs
"""

from __future__ import annotations

import torch

from deepinfer.kernels.checks import FLOAT_DTYPES, check_multiple, check_tensor
from deepinfer.kernels.formats import E4M3_NAN, E8M0_NAN, FP8_GROUP, pack_nibbles

PANEL = 16
Weights = tuple[torch.Tensor, torch.Tensor]


def pack_linear(weight: torch.Tensor) -> torch.Tensor:
    """Return the packed form of `weight [N, K]`, bf16 or float32; one that does not fit stays plain."""
    step = input_step(weight.dtype)
    if weight.numel() == 0 or weight.shape[0] % PANEL or weight.shape[1] % step:
        return weight
    return _interleave(weight, step)


def unpack_linear(weight: torch.Tensor) -> torch.Tensor:
    """Return `weight` as `[N, K]`, whether it is plain or packed."""
    return weight if weight.dim() == 2 else _separate(weight, input_step(weight.dtype))


def pack_groups(weight: torch.Tensor) -> torch.Tensor:
    """Return the packed form of unquantised `weight [G, N, K]`; one that does not fit stays plain."""
    step = input_step(weight.dtype)
    if weight.numel() == 0 or weight.shape[1] % PANEL or weight.shape[2] % step:
        return weight
    return _interleave(weight, step)


def unpack_groups(weight: torch.Tensor) -> torch.Tensor:
    """Return unquantised `weight` as `[G, N, K]`, whether it is plain or packed."""
    return weight if weight.dim() == 3 else _separate(weight, input_step(weight.dtype))


def pack_linear_fp8(weight: torch.Tensor, scale: torch.Tensor) -> Weights:
    """Return the packed form of `weight [G, N, K]` and its tile scales; one that does not fit stays plain.

    A NaN code gives its output and its 32 inputs the NaN scale, so that products need not look for it.
    """
    groups, outputs, inputs = weight.shape
    if weight.numel() == 0 or outputs % PANEL or inputs % FP8_GROUP:
        return weight, scale
    has_nan = ((weight & 0x7F) == E4M3_NAN).unflatten(-1, (-1, FP8_GROUP)).any(-1)
    rows = torch.where(has_nan, E8M0_NAN, scale.repeat_interleave(FP8_GROUP, 1)[:, :outputs])
    return _interleave(weight, 2), _interleave(rows, 1)


def unpack_linear_fp8(weight: torch.Tensor, scale: torch.Tensor) -> Weights:
    """Return codes `[G, N, K]` and one scale per output and 32 inputs, `[G, N, K/32]`, of a packed weight."""
    return _separate(weight, 2), _separate(scale, 1)


def pack_linear_fp4(weight: torch.Tensor, scale: torch.Tensor) -> Weights:
    """Return the packed form of `weight [E, N, K/2]` and its scales; one that does not fit stays plain.

    Byte 16 a + 8 b + 2 c + d of 32 holds output 8 b + 4 a + c: input d in its low, input 2 + d in its high
    nibble. So unpacked to 16 bits and shifted into floats, neighbours fall into place without a shuffle.
    """
    experts, outputs, half = weight.shape
    if weight.numel() == 0 or outputs % PANEL or 2 * half % FP8_GROUP:
        return weight, scale
    codes = torch.stack((weight & 0xF, weight >> 4), dim=-1)  # [E, N, K/2, d]
    codes = codes.reshape(experts, outputs // PANEL, 2, 2, 4, half // 2, 2, 2)  # b, a, c, 4 inputs, nibble, d
    ordered = codes.permute(0, 1, 5, 3, 2, 4, 7, 6)  # 4 inputs, a, b, c, d, nibble
    packed = pack_nibbles(ordered.reshape(experts, outputs // PANEL, half, 2 * PANEL))
    return packed, _interleave(scale, 1)


def unpack_linear_fp4(weight: torch.Tensor, scale: torch.Tensor) -> Weights:
    """Return `weight` and `scale` in the plain form, whether they are plain or packed."""
    if weight.dim() == 3:
        return weight, scale
    experts, panels, half, _ = weight.shape
    codes = torch.stack((weight & 0xF, weight >> 4), dim=-1)
    codes = codes.reshape(experts, panels, half // 2, 2, 2, 4, 2, 2)  # 4 inputs, a, b, c, d, nibble
    ordered = codes.permute(0, 1, 4, 3, 5, 2, 7, 6)  # b, a, c, 4 inputs, nibble, d
    return pack_nibbles(ordered.reshape(experts, panels * PANEL, 2 * half)), _separate(scale, 1)


def check_linear_weight(op: str, name: str, weight: torch.Tensor, inputs: int) -> None:
    """`weight` must be `[any, inputs]` or its packed form, bf16 or float32."""
    if weight.dim() == 3:
        check_tensor(op, name, weight, (None, inputs, PANEL), FLOAT_DTYPES)
        check_multiple(op, f"inputs of the packed {name}", inputs, input_step(weight.dtype))
    else:
        check_tensor(op, name, weight, (None, inputs), FLOAT_DTYPES)


def check_fp8_weight(
    op: str, name: str, weight: torch.Tensor, scale: torch.Tensor, groups: int, inputs: int
) -> None:
    """`weight` and `scale`, named `name` and a name derived from it: FP8 or unquantised, plain or packed."""
    if weight.is_floating_point():
        _check_unquantised(op, name, weight, scale, groups, inputs)
        return
    if weight.dim() == 4:
        _check_packed(op, name, weight, scale, (groups, inputs, inputs))
        return
    check_tensor(op, name, weight, (groups, None, inputs), (torch.uint8,))
    tiles = (groups, -(-weight.shape[1] // FP8_GROUP), -(-inputs // FP8_GROUP))
    check_tensor(op, scale_name(name), scale, tiles, (torch.uint8,))


def check_fp4_weight(op: str, name: str, weight: torch.Tensor, scale: torch.Tensor, inputs: int) -> None:
    """`weight` and `scale`, named `name` and a name derived from it: FP4 or unquantised, plain or packed."""
    if weight.is_floating_point():
        _check_unquantised(op, name, weight, scale, None, inputs)
        return
    if weight.dim() == 4:
        _check_packed(op, name, weight, scale, (None, inputs, inputs // 2))
        return
    check_tensor(op, name, weight, (None, None, inputs // 2), (torch.uint8,))
    experts, outputs, _ = weight.shape
    check_tensor(op, scale_name(name), scale, (experts, outputs, inputs // FP8_GROUP), (torch.uint8,))


def linear_outputs(weight: torch.Tensor) -> int:
    """Return how many outputs `weight` has, plain or packed."""
    return weight.shape[0] if weight.dim() == 2 else weight.shape[0] * PANEL


def scaled_outputs(weight: torch.Tensor) -> int:
    """Return how many outputs a `weight` with a leading axis has, plain or packed."""
    return weight.shape[1] if weight.dim() == 3 else weight.shape[1] * PANEL


def input_step(dtype: torch.dtype) -> int:
    """How many neighbouring inputs of one output lie side by side in a packed `linear` weight."""
    return 2 if dtype == torch.bfloat16 else 1


def scale_name(name: str) -> str:
    """The argument that holds the scales of the weight argument `name`."""
    return "scale" if name == "weight" else f"{name}_scale"


def _check_unquantised(
    op: str, name: str, weight: torch.Tensor, scale: torch.Tensor, count: int | None, inputs: int
) -> None:
    if weight.dim() == 4:
        check_tensor(op, name, weight, (count, None, inputs, PANEL), FLOAT_DTYPES)
        check_multiple(op, f"inputs of the packed {name}", inputs, input_step(weight.dtype))
    else:
        check_tensor(op, name, weight, (count, None, inputs), FLOAT_DTYPES)
    check_tensor(op, scale_name(name), scale, (0, 0, 0), (torch.uint8,))


def _check_packed(
    op: str, name: str, weight: torch.Tensor, scale: torch.Tensor, sizes: tuple[int | None, int, int]
) -> None:
    count, inputs, panel_inputs = sizes
    check_multiple(op, f"inputs of the packed {name}", inputs, FP8_GROUP)
    check_tensor(op, name, weight, (count, None, panel_inputs, PANEL), (torch.uint8,))
    shape = (weight.shape[0], weight.shape[1], inputs // FP8_GROUP, PANEL)
    check_tensor(op, scale_name(name), scale, shape, (torch.uint8,))


def _interleave(matrix: torch.Tensor, step: int) -> torch.Tensor:
    """[..., N, K] -> [..., N/16, K, 16]; `step` inputs of one output stay side by side."""
    panels = matrix.unflatten(-2, (-1, PANEL)).unflatten(-1, (-1, step)).transpose(-3, -2)
    return panels.flatten(-3).unflatten(-1, (-1, PANEL)).contiguous()


def _separate(panels: torch.Tensor, step: int) -> torch.Tensor:
    """Inverse of `_interleave`."""
    steps = panels.flatten(-2).unflatten(-1, (-1, PANEL, step))
    return steps.transpose(-3, -2).flatten(-2).flatten(-3, -2).contiguous()
