"""Rings of a request's last positions: the rows of a step take their places (spec 5.5).

    ring[slot_ids[l], positions[t] mod L] = values[t]        l = request_index[t]

Shapes    ring [slots, L, width] uint8 | int32 | fp32, mutated, the outer axis at any stride; values
          [T, width] of the same dtype (or int64 for int32); positions, request_index [T], slot_ids,
          num_computed_tokens, row_counts [R], all int64
Numerics  bytes are copied. Only a request's last L rows of the step write, so that no entry is written twice;
          padding rows (position -1) write nothing. Faults are found before anything is written.
"""

from __future__ import annotations

import torch

from deepinfer.kernels.checks import check_region, check_tensor, check_values
from deepinfer.kernels.registry import Op

_DTYPES = (torch.uint8, torch.int32, torch.float32)
_INT64 = (torch.int64,)


def _check(
    ring: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    request_index: torch.Tensor,
    slot_ids: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    row_counts: torch.Tensor,
) -> None:
    check_region("ring_write", "ring", ring, (None, None, None), _DTYPES)
    dtypes = (torch.int32, torch.int64) if ring.dtype == torch.int32 else (ring.dtype,)
    check_tensor("ring_write", "values", values, (None, ring.shape[2]), dtypes)
    rows = values.shape[0]
    check_tensor("ring_write", "positions", positions, (rows,), _INT64)
    check_tensor("ring_write", "request_index", request_index, (rows,), _INT64)
    check_tensor("ring_write", "slot_ids", slot_ids, (None,), _INT64)
    lines = slot_ids.shape[0]
    check_tensor("ring_write", "num_computed_tokens", num_computed_tokens, (lines,), _INT64)
    check_tensor("ring_write", "row_counts", row_counts, (lines,), _INT64)


def write_kept(
    region: torch.Tensor, first: torch.Tensor, second: torch.Tensor, values: torch.Tensor, kept: torch.Tensor
) -> None:
    """Write row t of `values [T, r]` to `region[first[t], second[t]]` where `kept [T]`.

    The others give block or slot 0, which nobody owns, what it has: the number of writes is always T.
    """
    address = (torch.where(kept, first, 0), torch.where(kept, second, 0))
    old = region[address]
    region.index_put_(address, torch.where(kept.unsqueeze(1), values.to(region.dtype), old))


def ring_write_reference(
    ring: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    request_index: torch.Tensor,
    slot_ids: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    row_counts: torch.Tensor,
) -> None:
    """The definition; see the module text."""
    _check(ring, values, positions, request_index, slot_ids, num_computed_tokens, row_counts)
    slots, length, _ = ring.shape
    valid = positions >= 0
    known = ~valid | ((request_index >= 0) & (request_index < slot_ids.shape[0]))
    check_values("ring_write", "request_index", known, f"must lie in 0 .. {slot_ids.shape[0] - 1}")
    if not slot_ids.shape[0]:  # no request: all rows are padding
        return
    line = torch.where(valid, request_index, 0)
    slot = slot_ids[line]
    owned = ~valid | ((slot >= 1) & (slot < slots))
    check_values("ring_write", "slot_ids", owned, f"must lie in 1 .. {slots - 1}")
    kept = valid & (positions >= (num_computed_tokens + row_counts)[line] - length)
    write_kept(ring, slot, positions % length, values, kept)


def ring_write_fake(
    ring: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    request_index: torch.Tensor,
    slot_ids: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    row_counts: torch.Tensor,
) -> None:
    """Shape rule."""
    _check(ring, values, positions, request_index, slot_ids, num_computed_tokens, row_counts)


def _make_inputs(rows: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, ...]:
    """One request per row."""
    generator = torch.Generator().manual_seed(seed)
    stored = torch.uint8 if dtype == torch.bfloat16 else torch.float32
    ring = torch.zeros(rows + 1, 22, 66, dtype=stored)
    values = torch.randint(0, 256, (rows, 66), generator=generator).to(stored)
    positions = torch.randint(0, 60, (rows,), generator=generator)
    lines = torch.arange(rows)
    slots = torch.randperm(rows, generator=generator) + 1
    return ring, values, positions, lines, slots, positions.clone(), torch.ones_like(lines)


ring_write = Op(
    name="ring_write",
    schema=(
        "ring_write(Tensor(a!) ring, Tensor values, Tensor positions, Tensor request_index, Tensor slot_ids, "
        "Tensor num_computed_tokens, Tensor row_counts) -> ()"
    ),
    reference=ring_write_reference,
    fake=ring_write_fake,
    make_inputs=_make_inputs,
    tolerance={torch.float32: (0.0, 0.0), torch.bfloat16: (0.0, 0.0)},
    composite=True,
)
