"""Where the layers of a step keep and find what earlier rows left: one interface, two ways to hold it.

`RegionCaches` is the serving form: records in their byte formats, in regions addressed by block and slot. The
dense form of training (`dense.py`) holds whole sequences and lets gradients through. Layers know neither.
"""

from collections.abc import Callable, Mapping
from typing import Literal, Protocol

import torch
from torch import Tensor

from deepinfer.graphs.rows import Rows

PhaseName = Literal["prefill", "decode"]


class StepCaches(Protocol):
    """State of the step's requests. A method that takes a value of the rows stores it for later steps."""

    def window(self, layer: int, record: Tensor, positions: Tensor) -> Tensor:
        """Store the rows' window `record [T, r]`; return those at `positions [T, W]`: `[T, W, r]`."""
        ...

    def open_group(self, layer: int, parked: Tensor, positions: Tensor) -> Tensor:
        """Store the rows' `parked [T, 2 d]`; return those at `positions [T, n]`: `[T, n, 2 d]`."""
        ...

    def tokens(self, positions: Tensor) -> Tensor:
        """Store the rows' token ids; return those at their `positions [T, n]`, of any integer type."""
        ...

    def write_entries(self, layer: int, kind: str, entries: Tensor, emitted: Tensor, record: Tensor) -> None:
        """Store `record [T, r]` as entry `entries [T]` of a source layer, for the rows that are `emitted`."""
        ...

    def entries_at(self, layer: int, kind: str, entries: Tensor) -> Tensor:
        """Return the records of a source layer's `entries [T, k]`: `[T, k, r]`."""
        ...

    def dot_entries(self, layer: int, kind: str, query: Tensor, decode: Callable[[Tensor], Tensor]) -> Tensor:
        """Multiply `query [T, h, d]` with every decoded entry its request may have: `[T, h, entries]`."""
        ...


class RegionCaches:
    """Records in the declared regions `[blocks or slots, entries, *record]`, mutated in place."""

    def __init__(self, rows: Rows, phase: PhaseName, regions: Mapping[str, Tensor]) -> None:
        self._rows, self._phase, self._regions = rows, phase, regions

    def _region(self, layer: int, kind: str) -> Tensor:
        return self._regions[f"layers.{layer}.{kind}"]

    def window(self, layer: int, record: Tensor, positions: Tensor) -> Tensor:
        """As StepCaches. Decode has one row per request: written first, everything is in the ring."""
        rows, ring = self._rows, self._region(layer, "window")
        length = ring.shape[1]
        address = (rows.ring_write_slots(length), rows.positions % length)
        if self._phase == "decode":
            ring.index_put_(address, record)
            return ring[rows.slots.unsqueeze(1), positions % length]
        # a chunk may overwrite ring entries that its own first rows still need: read first, write last
        history = ring[rows.request_slots].flatten(0, 1)
        in_history = rows.request_index.unsqueeze(1) * length + positions % length
        source = torch.where(rows.in_chunk(positions), rows.row_at(positions), record.shape[0] + in_history)
        records = torch.cat((record, history), dim=0)[source]
        ring.index_put_(address, record)
        return records

    def open_group(self, layer: int, parked: Tensor, positions: Tensor) -> Tensor:
        """As StepCaches, from the ring of open groups or this step's own rows."""
        rows, ring = self._rows, self._region(layer, "open_group")
        length = ring.shape[1]
        from_ring = ring[rows.slots.unsqueeze(1), positions % length]
        found = torch.where(rows.in_chunk(positions).unsqueeze(-1), parked[rows.row_at(positions)], from_ring)
        ring.index_put_((rows.ring_write_slots(length), rows.positions % length), parked)
        return found

    def tokens(self, positions: Tensor) -> Tensor:
        """As StepCaches, from the ring of token ids or this step's own rows."""
        rows, ring = self._rows, self._regions["token_history"]
        length = ring.shape[1]
        from_ring = ring[rows.slots.unsqueeze(1), positions % length].squeeze(-1).long()
        found = torch.where(rows.in_chunk(positions), rows.token_ids[rows.row_at(positions)], from_ring)
        address = (rows.ring_write_slots(length), rows.positions % length)
        ring.index_put_(address, rows.token_ids.unsqueeze(1).to(ring.dtype))
        return found

    def write_entries(self, layer: int, kind: str, entries: Tensor, emitted: Tensor, record: Tensor) -> None:
        """As StepCaches; rows that emit nothing write to block 0."""
        region = self._region(layer, kind)
        region.index_put_(self._rows.paged_address(entries, emitted, region.shape[1]), record)

    def entries_at(self, layer: int, kind: str, entries: Tensor) -> Tensor:
        """As StepCaches, through the rows' block tables."""
        region = self._region(layer, kind)
        blocks = self._rows.blocks.gather(1, entries // region.shape[1])
        return region[blocks, entries % region.shape[1]]

    def dot_entries(self, layer: int, kind: str, query: Tensor, decode: Callable[[Tensor], Tensor]) -> Tensor:
        """As StepCaches: with every entry of the rows' block tables, written or not."""
        keys = decode(self._region(layer, kind)[self._rows.blocks].flatten(1, 2))
        return torch.matmul(query, keys.transpose(1, 2))
