"""Attention over window and picks: one program per row and 64 heads; see `kernels/sparse_attention.py`.

Keys come in tiles of 16 columns of a row's own list, so the order of sums does not depend on where a key is
stored: one step, chunks and decode agree to the bit. Probabilities stay float32: against bf16 keys they are
split into three bf16 parts, whose products are exact.
"""

import torch
import triton
import triton.language as tl

from deepinfer.kernels.quantize_tail import TAIL_GROUP
from deepinfer.kernels.sparse_attention import sparse_attention_fake
from deepinfer.kernels.triton.dequantize_fp4 import decode_fp4
from deepinfer.kernels.triton.dequantize_tail import load_tail_records
from deepinfer.kernels.triton.launch import blocks, launch, power_of_two
from deepinfer.kernels.triton.numbers import (
    INTERPRETED,
    e4m3_decode,
    e8m0_decode,
    multiply_add,
    round_to,
    scale_groups,
    to_float32,
)

_KEYS = 16
_MAX_HEADS = 64  # of a program; with 16 keys at a time they fit its registers at a width of 512


@triton.jit
def _load_vectors(start, kept, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """float32 vectors [n, BLOCK] at addresses [n]; zeros where not kept."""
    column = tl.arange(0, BLOCK)
    return tl.load(start[:, None] + column[None, :], mask=kept[:, None] & (column < SIZE)[None, :], other=0.0)


@triton.jit
def _load_bytes(start, kept, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    return tl.load(start[:, None] + column[None, :], mask=kept[:, None] & (column < COUNT)[None, :], other=0)


@triton.jit
def _window_keys(
    record,
    ring,
    row,
    position,
    start,
    slot,
    offset,
    WINDOW: tl.constexpr,
    LENGTH: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    SIZE: tl.constexpr,
    QUANTIZE: tl.constexpr,
    TAIL: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keys [BLOCK_N, BLOCK] of window columns from `offset` on, float32, and which are real."""
    column = offset + tl.arange(0, BLOCK_N)
    wanted = position - (WINDOW - 1) + column
    visible = (wanted >= 0) & (position >= 0) & (column < WINDOW)
    in_step = visible & (wanted >= start)
    in_ring = visible & (wanted < start)
    width: tl.constexpr = BYTES
    own = record + (row - (position - wanted)) * width
    earlier = ring + slot * SLOT_STRIDE + (tl.maximum(wanted, 0) % LENGTH) * width
    if TAIL > 0:
        keys = load_tail_records(tl.where(in_step, own, earlier), visible, SIZE, TAIL, BLOCK)
    elif QUANTIZE:
        codes = _load_bytes(own, in_step, SIZE, BLOCK) | _load_bytes(earlier, in_ring, SIZE, BLOCK)
        groups: tl.constexpr = SIZE // 32
        scale = _load_bytes(own + SIZE, in_step, groups, BLOCK // 32)
        scale = scale | _load_bytes(earlier + SIZE, in_ring, groups, BLOCK // 32)
        keys = scale_groups(e4m3_decode(codes), e8m0_decode(scale.to(tl.int32)))
    else:
        keys = _load_vectors(own, in_step, SIZE, BLOCK)
        keys = tl.where(in_ring[:, None], _load_vectors(earlier, in_ring, SIZE, BLOCK), keys)
    return keys, visible


@triton.jit
def _picked_keys(
    compressed,
    picks,
    table,
    row,
    position,
    offset,
    PICKS: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    SIZE: tl.constexpr,
    QUANTIZE: tl.constexpr,
    TAIL: tl.constexpr,
    ENTRY_BYTES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keys [BLOCK_N, BLOCK] of picks from `offset` on, float32, and which are real."""
    column = offset + tl.arange(0, BLOCK_N)
    listed = (column < PICKS) & (position >= 0)
    entry = tl.load(picks + row * PICKS + column, mask=listed, other=-1)
    visible = entry >= 0
    entry = tl.maximum(entry, 0)
    block = tl.load(table + entry // ENTRIES, mask=visible, other=0)
    width: tl.constexpr = ENTRY_BYTES
    start = compressed + block * BLOCK_STRIDE + (entry % ENTRIES) * width
    if TAIL > 0:
        keys = load_tail_records(start, visible, SIZE, TAIL, BLOCK)
    elif QUANTIZE:
        packed = _load_bytes(start, visible, SIZE // 2, BLOCK // 2)
        scale = _load_bytes(start + SIZE // 2, visible, SIZE // 16, BLOCK // 16)
        keys = decode_fp4(packed, scale, False)
    else:
        keys = _load_vectors(start, visible, SIZE, BLOCK)
    return keys, visible


@triton.jit
def _logits(query, keys, visible, scale):
    products = multiply_add(query, tl.trans(keys), tl.zeros((query.shape[0], keys.shape[0]), tl.float32))
    return tl.where(visible[None, :], products * scale, float("-inf"))


@triton.jit
def _weigh(shares, keys, total):
    """total + shares keys, with float32 shares."""
    if keys.dtype == tl.bfloat16 and not INTERPRETED:
        # a loop, not three calls in a row: those would keep three sets of sums in registers
        for _ in tl.range(3, num_stages=1):
            part = shares.to(tl.bfloat16)
            total = tl.dot(part, keys, total)
            shares = shares - part.to(tl.float32)
        return total
    else:
        return tl.dot(shares, to_float32(keys), total, input_precision="ieee")


@triton.jit
def _attend_tile(query, keys, visible, scale, top, total, output, EXACT16: tl.constexpr):
    """One tile of keys joins the sums of every head."""
    if EXACT16:
        keys = round_to(keys, tl.bfloat16)
    logits = _logits(query, keys, visible, scale)
    higher = tl.maximum(top, tl.max(logits, axis=1))
    shrink = tl.exp(top - higher)
    shares = tl.exp(logits - higher[:, None])
    total = total * shrink + tl.sum(shares, axis=1)
    return higher, total, _weigh(shares, keys, output * shrink[:, None])


@triton.jit
def _load_query(
    query, row, first, HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr
):
    head = first + tl.arange(0, BLOCK_H)
    column = tl.arange(0, BLOCK)
    place = (row * HEADS + head[:, None]) * SIZE + column[None, :]
    return tl.load(query + place, mask=(head < HEADS)[:, None] & (column < SIZE)[None, :], other=0.0)


@triton.jit
def _sparse_attention_kernel(
    query,
    record,
    ring,
    compressed,
    picks,
    sink,
    scale,
    positions,
    request_index,
    block_table,
    slot_ids,
    num_computed_tokens,
    output,
    sums,
    WINDOW: tl.constexpr,
    LENGTH: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    PICKS: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    TABLE: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    QUANTIZE: tl.constexpr,
    TAIL: tl.constexpr,
    BYTES: tl.constexpr,
    ENTRY_BYTES: tl.constexpr,
    EXACT16: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK_H
    position = tl.load(positions + row)
    valid = position >= 0
    line = tl.load(request_index + row, mask=valid, other=0)
    start = tl.load(num_computed_tokens + line, mask=valid, other=0)
    slot = tl.load(slot_ids + line, mask=valid, other=0)
    asked = _load_query(query, row, first, HEADS, SIZE, BLOCK_H, BLOCK)
    if not EXACT16:
        asked = to_float32(asked)
    top = tl.full((BLOCK_H,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    result = tl.zeros((BLOCK_H, BLOCK), tl.float32)
    seen = 0
    for offset in range(0, WINDOW, BLOCK_N):
        keys, visible = _window_keys(
            record, ring, row, position, start, slot, offset,
            WINDOW, LENGTH, SLOT_STRIDE, SIZE, QUANTIZE, TAIL, BYTES, BLOCK_N, BLOCK,
        )  # fmt: skip
        top, total, result = _attend_tile(asked, keys, visible, scale, top, total, result, EXACT16)
        seen += tl.sum(visible.to(tl.int32), axis=0)
    for offset in range(0, PICKS, BLOCK_N):
        keys, visible = _picked_keys(
            compressed, picks, block_table + line * TABLE, row, position, offset,
            PICKS, ENTRIES, BLOCK_STRIDE, SIZE, QUANTIZE, TAIL, ENTRY_BYTES, BLOCK_N, BLOCK,
        )  # fmt: skip
        top, total, result = _attend_tile(asked, keys, visible, scale, top, total, result, EXACT16)
        seen += tl.sum(visible.to(tl.int32), axis=0)
    head = first + tl.arange(0, BLOCK_H)
    real = head < HEADS
    total += tl.exp(tl.load(sink + head, mask=real, other=0.0) - top)
    result = tl.where(seen > 0, tl.div_rn(result, tl.broadcast_to(total[:, None], result.shape)), 0.0)
    column = tl.arange(0, BLOCK)
    place = (row * HEADS + head[:, None]) * SIZE + column[None, :]
    stored = real[:, None] & (column < SIZE)[None, :]
    tl.store(output + place, round_to(result, output.dtype.element_ty), mask=stored)
    tl.store(sums + (row * HEADS + head) * 2, top, mask=real)
    tl.store(sums + (row * HEADS + head) * 2 + 1, total, mask=real)


@triton.jit
def _attention_mass_kernel(
    query,
    record,
    ring,
    compressed,
    picks,
    scale,
    positions,
    request_index,
    block_table,
    slot_ids,
    num_computed_tokens,
    sums,
    mass,
    WINDOW: tl.constexpr,
    LENGTH: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    PICKS: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    TABLE: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    QUANTIZE: tl.constexpr,
    TAIL: tl.constexpr,
    BYTES: tl.constexpr,
    ENTRY_BYTES: tl.constexpr,
    EXACT16: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The share of every key, summed over heads; one program per row and tile of keys."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    tiles: tl.constexpr = (WINDOW + BLOCK_N - 1) // BLOCK_N
    position = tl.load(positions + row)
    valid = position >= 0
    line = tl.load(request_index + row, mask=valid, other=0)
    if tile < tiles:
        start = tl.load(num_computed_tokens + line, mask=valid, other=0)
        slot = tl.load(slot_ids + line, mask=valid, other=0)
        first = 0
        count = WINDOW
        offset = tile * BLOCK_N
        keys, visible = _window_keys(
            record, ring, row, position, start, slot, offset,
            WINDOW, LENGTH, SLOT_STRIDE, SIZE, QUANTIZE, TAIL, BYTES, BLOCK_N, BLOCK,
        )  # fmt: skip
    else:
        first = WINDOW
        count = PICKS
        offset = (tile - tiles) * BLOCK_N
        keys, visible = _picked_keys(
            compressed, picks, block_table + line * TABLE, row, position, offset,
            PICKS, ENTRIES, BLOCK_STRIDE, SIZE, QUANTIZE, TAIL, ENTRY_BYTES, BLOCK_N, BLOCK,
        )  # fmt: skip
    if EXACT16:
        keys = round_to(keys, tl.bfloat16)
    share = tl.zeros((BLOCK_N,), tl.float32)
    for first_head in range(0, HEADS, BLOCK_H):
        asked = _load_query(query, row, first_head, HEADS, SIZE, BLOCK_H, BLOCK)
        if not EXACT16:
            asked = to_float32(asked)
        head = first_head + tl.arange(0, BLOCK_H)
        real = head < HEADS
        top = tl.load(sums + (row * HEADS + head) * 2, mask=real, other=0.0)
        total = tl.load(sums + (row * HEADS + head) * 2 + 1, mask=real, other=1.0)
        weights = tl.exp(_logits(asked, keys, visible, scale) - top[:, None])
        weights = tl.div_rn(weights, tl.broadcast_to(total[:, None], weights.shape))
        share += tl.sum(tl.where(real[:, None], weights, 0.0), axis=0)
    column = offset + tl.arange(0, BLOCK_N)
    # without a visible key the sum of a head may be zero
    share = tl.where(visible, share, 0.0)
    tl.store(mass + row * (WINDOW + PICKS) + first + column, share, mask=column < count)


def sparse_attention(
    query: torch.Tensor,
    record: torch.Tensor,
    ring: torch.Tensor,
    compressed: torch.Tensor,
    picks: torch.Tensor,
    sink: torch.Tensor,
    scale: float,
    window: int,
    positions: torch.Tensor,
    request_index: torch.Tensor,
    block_table: torch.Tensor,
    slot_ids: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    quantize: bool,
    with_mass: bool,
    tail: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """query [T, H, d], the caches as defined -> output like query, mass [T, window + k] or [T, 0]."""
    requests = (positions, request_index, block_table, slot_ids, num_computed_tokens)
    output, mass = sparse_attention_fake(
        query, record, ring, compressed, picks, sink, scale, window, *requests, quantize, with_mass, tail
    )
    rows, heads, size = query.shape
    sums = query.new_empty((rows, heads, 2), dtype=torch.float32)
    block_heads = min(_MAX_HEADS, power_of_two(heads, 16))
    sizes = {
        "WINDOW": window,
        "LENGTH": ring.shape[1],
        "SLOT_STRIDE": ring.stride(0),
        "PICKS": picks.shape[1],
        "ENTRIES": max(1, compressed.shape[1]),
        "BLOCK_STRIDE": compressed.stride(0),
        "TABLE": block_table.shape[1],
        "HEADS": heads,
        "SIZE": size,
        "QUANTIZE": quantize,
        "TAIL": tail if quantize else 0,
        "BYTES": record.shape[1],
        "ENTRY_BYTES": compressed.shape[2],
        "EXACT16": quantize and query.dtype == torch.bfloat16,
        "BLOCK_H": block_heads,
        "BLOCK_N": _KEYS,
        "BLOCK": power_of_two(size, TAIL_GROUP),
    }
    caches = (query, record, ring, compressed, picks)
    launch(
        _sparse_attention_kernel,
        (rows, blocks(heads, block_heads)),
        *(*caches, sink, scale, *requests, output, sums),
        warps=8,
        **sizes,
    )
    if with_mass:
        tiles = blocks(window, _KEYS) + blocks(picks.shape[1], _KEYS)
        launch(
            _attention_mass_kernel,
            (rows, tiles),
            *(*caches, scale, *requests, sums, mass),
            warps=4,
            **sizes,
        )
    return output, mass
