"""KV compression with position biases: as `compress.py`; see `kernels/compress_biased.py`.

Gates are parked with their bias, both halves of a projection side by side.
"""

import torch
import triton
import triton.language as tl

from deepinfer.errors import UsageError
from deepinfer.kernels.compress_biased import compress_biased_fake
from deepinfer.kernels.packing import linear_outputs, unpack_linear
from deepinfer.kernels.triton.compress import pool_norm
from deepinfer.kernels.triton.index_key import write_entries
from deepinfer.kernels.triton.launch import launch, power_of_two
from deepinfer.kernels.triton.linear import project
from deepinfer.kernels.triton.ring_write import write_ring


@triton.jit
def _add_bias_kernel(parked, bias, positions, RATIO: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Each gate gets the bias of its position within the window."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.maximum(tl.load(positions + row), 0)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    gates = parked + row * (2 * WIDTH) + WIDTH + column
    added = tl.load(bias + (position % RATIO) * WIDTH + column, mask=inside, other=0.0)
    tl.store(gates, tl.load(gates, mask=inside, other=0.0) + added, mask=inside)


def compress_biased(
    x: torch.Tensor,
    wkv: torch.Tensor,
    wgate: torch.Tensor,
    bias: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    open_group: torch.Tensor,
    table: torch.Tensor,
    region: torch.Tensor,
    positions: torch.Tensor,
    request_index: torch.Tensor,
    block_table: torch.Tensor,
    slot_ids: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    row_counts: torch.Tensor,
    ratio: int,
    overlap: bool,
    quantize: bool,
    index: bool,
) -> torch.Tensor:
    """x [T, D], wkv and wgate [w, D], bias [ratio, w] -> latent [T, d]; writes to open_group and region."""
    paged = (positions, request_index, block_table)
    requests = (slot_ids, num_computed_tokens, row_counts)
    caches = (open_group, table, region)
    latent = compress_biased_fake(
        *(x, wkv, wgate, bias, norm_weight, eps, *caches, *paged, *requests),
        *(ratio, overlap, quantize, index),
    )
    rows, size = latent.shape
    if index and size != power_of_two(size):
        raise UsageError(f"must give a power of two of values, got {size}", where="compress_biased: wkv")
    width = linear_outputs(wkv)
    parked = x.new_empty((rows, 2 * width), dtype=torch.float32)
    project(x, unpack_linear(wkv), parked[:, :width])
    project(x, unpack_linear(wgate), parked[:, width:])
    sizes = {"RATIO": ratio, "WIDTH": width, "BLOCK": power_of_two(width)}
    launch(_add_bias_kernel, (rows,), *(parked, bias, positions), **sizes)
    rows_of_requests = (positions, request_index, slot_ids, num_computed_tokens)
    pool_norm(parked, open_group, norm_weight, eps, latent, rows_of_requests, ratio, overlap)
    write_ring(open_group, parked, positions, request_index, *requests)
    form = ("hadamard" if index else "tail") if quantize else "plain"
    write_entries(latent, table, region, *paged, ratio, form)
    return latent
