"""Expert linear layer: pairs of row and expert by expert, in tiles of 64; see `kernels/linear_fp4.py`.

A tile holds pairs of one expert alone; where a pair stands in its tile changes none of its bits.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from deepinfer.kernels.formats import FP8_GROUP
from deepinfer.kernels.linear_fp4 import linear_fp4_fake
from deepinfer.kernels.packing import unpack_linear_fp4
from deepinfer.kernels.triton.dequantize_fp4 import decode_fp4
from deepinfer.kernels.triton.launch import blocks, launch, require
from deepinfer.kernels.triton.linear_fp8 import activations
from deepinfer.kernels.triton.numbers import multiply_add, round_to

_ROWS = 64


class ExpertTiles(NamedTuple):
    """Pairs (row * picks + pick) in the order of their experts, cut into tiles; all int64."""

    order: torch.Tensor  # [pairs]
    bounds: torch.Tensor  # [E + 1], where an expert's pairs begin
    first: torch.Tensor  # [E], number of an expert's first tile
    expert: torch.Tensor  # [tiles], whose a tile is; E: nobody's


def expert_tiles(expert_ids: torch.Tensor, experts: int) -> ExpertTiles:
    """Lay out `expert_ids [rows, picks]`; the number of tiles is that of the worst case, so it is static."""
    ids, order = torch.sort(expert_ids.flatten(), stable=True)
    every = torch.arange(experts + 1, device=ids.device)
    bounds = torch.searchsorted(ids, every)
    ends = ((bounds.diff() + _ROWS - 1) // _ROWS).cumsum(0)
    first = torch.cat((ends.new_zeros(1), ends[:-1]))
    tiles = ids.shape[0] // _ROWS + min(experts, ids.shape[0])
    expert = torch.searchsorted(ends, torch.arange(tiles, device=ids.device), right=True)
    return ExpertTiles(order, bounds, first, expert)


@triton.jit
def _linear_fp4_kernel(
    x,
    weight,
    scale,
    order,
    bounds,
    first,
    tile_expert,
    y,
    EXPERTS: tl.constexpr,
    PAIRS_PER_VECTOR: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    expert = tl.load(tile_expert + tile)
    if expert < EXPERTS:
        begin = tl.load(bounds + expert) + (tile - tl.load(first + expert)) * BLOCK_M
        place = begin + tl.arange(0, BLOCK_M)
        used = place < tl.load(bounds + expert + 1)
        pair = tl.load(order + place, mask=used, other=0)
        output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        real = (output < OUTPUTS)[:, None]
        matrix = (expert * OUTPUTS + output[:, None]).to(tl.int64)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, INPUTS, BLOCK_K):
            inputs = start + tl.arange(0, BLOCK_K)
            a = tl.load(
                x + (pair // PAIRS_PER_VECTOR)[:, None] * INPUTS + inputs[None, :],
                mask=used[:, None] & (inputs < INPUTS)[None, :],
                other=0.0,
            )
            byte = start // 2 + tl.arange(0, BLOCK_K // 2)
            packed = tl.load(
                weight + matrix * (INPUTS // 2) + byte[None, :],
                mask=real & (byte < INPUTS // 2)[None, :],
                other=0,
            )
            group = start // 32 + tl.arange(0, BLOCK_K // 32)
            factor = tl.load(
                scale + matrix * (INPUTS // 32) + group[None, :],
                mask=real & (group < INPUTS // 32)[None, :],
                other=0,
            )
            b = decode_fp4(packed, factor, True)
            if a.dtype == tl.bfloat16:
                b = round_to(b, tl.bfloat16)
            total = multiply_add(a, tl.trans(b), total)
        tl.store(
            y + pair[:, None] * OUTPUTS + output[None, :],
            round_to(total, y.dtype.element_ty),
            mask=used[:, None] & (output < OUTPUTS)[None, :],
        )


def project_fp4(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, tiles: ExpertTiles, y: torch.Tensor
) -> None:
    """Write to `y [rows, P, N]` the products of `x [rows, 1 | P, K]`; pairs of nobody stay."""
    require("linear_fp4", not weight.is_floating_point(), "weights that are not quantised")
    weight, scale = unpack_linear_fp4(weight, scale)
    experts, outputs, _ = weight.shape
    columns = 64 if x.dtype == torch.bfloat16 else 32
    launch(
        _linear_fp4_kernel,
        (tiles.expert.shape[0], blocks(outputs, columns)),
        *(x, weight, scale, *tiles, y),
        stages=2,
        EXPERTS=experts,
        PAIRS_PER_VECTOR=y.shape[1] // x.shape[1],
        INPUTS=x.shape[2],
        OUTPUTS=outputs,
        BLOCK_M=_ROWS,
        BLOCK_N=columns,
        BLOCK_K=columns,
    )


def linear_fp4(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    expert_ids: torch.Tensor,
    quantize_activation: bool,
    activation_group: int = FP8_GROUP,
) -> torch.Tensor:
    """x [rows, 1 | P, K], weight uint8 [E, N, K/2], scale [E, N, K/32], ids [rows, P] -> y [rows, P, N]."""
    y = linear_fp4_fake(x, weight, scale, expert_ids, quantize_activation, activation_group)
    y.zero_()
    tiles = expert_tiles(expert_ids, weight.shape[0])
    if y.numel():
        project_fp4(activations(x, quantize_activation, activation_group), weight, scale, tiles, y)
    return y
