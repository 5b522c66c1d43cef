"""The rows of one step: who they belong to, where they stand, where their state lives.

A step is a ragged batch of rows. A row is one token position of one request; rows of a request follow each
other in position order. Padding rows (position -1) read and write only block 0 and slot 0, which nobody owns.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class StepInputs(NamedTuple):
    """Inputs of prefill and decode, all int64; T rows, R lines of the request table (decode: R == T).

    `request_index` names a row's line. `num_computed_tokens` is the position of the request's first row in
    this step, `row_starts` that row's index, `row_counts` how many rows it has (0: the line is unused).
    """

    token_ids: Tensor  # [T]
    positions: Tensor  # [T], -1 marks padding
    request_index: Tensor  # [T]
    block_table: Tensor  # [R, max_blocks_per_request], 0 where there is no block
    slot_ids: Tensor  # [R]
    num_computed_tokens: Tensor  # [R]
    row_starts: Tensor  # [R]
    row_counts: Tensor  # [R]


@dataclass(frozen=True)
class Rows:
    """What the layers need to know of the step's rows, derived once per step."""

    token_ids: Tensor  # [T]
    positions: Tensor  # [T], padding rows at 0
    valid: Tensor  # [T] bool
    row_index: Tensor  # [T]
    request_index: Tensor  # [T]
    slots: Tensor  # [T], 0 for padding
    request_slots: Tensor  # [R]
    blocks: Tensor  # [T, max_blocks_per_request], 0 for padding
    chunk_starts: Tensor  # [T], position of the first row of the row's request in this step
    chunk_ends: Tensor  # [T], one past the position of its last row

    @classmethod
    def from_inputs(cls, inputs: StepInputs) -> "Rows":
        valid = inputs.positions >= 0
        line = inputs.request_index
        starts = inputs.num_computed_tokens[line]
        return cls(
            token_ids=torch.where(valid, inputs.token_ids, 0),
            positions=inputs.positions.clamp(min=0),
            valid=valid,
            row_index=torch.arange(inputs.positions.shape[0]),
            request_index=line,
            slots=torch.where(valid, inputs.slot_ids[line], 0),
            request_slots=inputs.slot_ids,
            blocks=torch.where(valid.unsqueeze(1), inputs.block_table[line], 0),
            chunk_starts=starts,
            chunk_ends=starts + inputs.row_counts[line],
        )

    def in_chunk(self, positions: Tensor) -> Tensor:
        """Return which of a row's earlier `positions [T, n]` are rows of this step (bool, same shape)."""
        return positions >= self.chunk_starts.unsqueeze(1)

    def row_at(self, positions: Tensor) -> Tensor:
        """Return the row index of a row's own-request `positions [T, n]`; meaningful where `in_chunk`."""
        return (self.row_index.unsqueeze(1) - (self.positions.unsqueeze(1) - positions)).clamp(min=0)

    def ring_write_slots(self, ring_length: int) -> Tensor:
        """Return the slot a row writes its ring entry to: 0 unless it is among its request's last rows.

        A chunk longer than the ring would otherwise write two rows to one entry, in no defined order.
        """
        kept = self.valid & (self.positions >= self.chunk_ends - ring_length)
        return torch.where(kept, self.slots, 0)

    def paged_address(
        self, entries: Tensor, emitted: Tensor, entries_per_block: int
    ) -> tuple[Tensor, Tensor]:
        """Return block ids and offsets `[T]` of the rows' `entries [T]`; block 0 where not `emitted`."""
        block = self.blocks.gather(1, (entries // entries_per_block).unsqueeze(1)).squeeze(1)
        return torch.where(emitted, block, 0), entries % entries_per_block
