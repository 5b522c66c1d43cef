"""Memory of the caches: two arenas of bytes, and the typed region views that graphs read and mutate.

The layout comes from the artifact; this file allocates and addresses it, and knows nothing of what the
records mean nor of who owns a block (that is `block_pool.py`).

A block or slot that changes owner is not cleared. It need not be: a graph masks every read by position, and a
request writes an entry, a ring slot or an open group before the first step that may read it, so the bytes of
an earlier owner are never visible. Arenas are anonymous memory maps: untouched pages cost nothing.
"""

import math
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.artifacts.schema import CacheLayout, CacheRegion
from deepinfer.errors import ResourceError
from deepinfer.runtime.request import CacheState, StateCopy

_DTYPES = {
    "uint8": torch.uint8,
    "int32": torch.int32,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}
_HOST = torch.device("cpu")


@dataclass(frozen=True)
class CacheArenas:
    """The block arena, the slot arena, and one view of either per region."""

    blocks: Tensor  # uint8 [num_blocks * block_bytes]
    slots: Tensor  # uint8 [num_slots * slot_bytes]
    regions: dict[str, Tensor]  # in layout order: [num_blocks or num_slots, entries, *record_shape]
    block_bytes: int
    slot_bytes: int

    @classmethod
    def allocate(cls, layout: CacheLayout, device: torch.device = _HOST) -> "CacheArenas":
        """Reserves both arenas, zero-filled. Raises ResourceError if the memory is not to be had."""
        blocks = _allocate(layout.num_blocks * layout.block_bytes, "cache blocks", device)
        slots = _allocate(layout.num_slots * layout.slot_bytes, "state slots", device)
        regions = {
            region.name: _view(blocks, layout.num_blocks, layout.block_bytes, region)
            if region.kind == "paged"
            else _view(slots, layout.num_slots, layout.slot_bytes, region)
            for region in layout.regions
        }
        return cls(blocks, slots, regions, layout.block_bytes, layout.slot_bytes)

    def copies(self, copies: Sequence[StateCopy]) -> Iterator[tuple[Tensor, Tensor]]:
        """Target and source of each copy, in order: of a slot, and of a block where one is named."""
        for each in copies:
            yield self._slot(each.slot), self._slot(each.source_slot)
            if each.block:
                yield self._block(each.block), self._block(each.source_block)

    def copy(self, copies: Sequence[StateCopy]) -> None:
        """Makes the copies in order."""
        for target, source in self.copies(copies):
            target.copy_(source)

    def read(self, block_table: Sequence[int], slot_id: int) -> CacheState:
        """The bytes of these blocks and this slot."""
        blocks = b"".join(self._block(block).cpu().numpy().tobytes() for block in block_table)
        return CacheState(blocks, self._slot(slot_id).cpu().numpy().tobytes())

    def contents(
        self, block_table: Sequence[int], slot_id: int, state: CacheState
    ) -> Iterator[tuple[Tensor, NDArray[np.uint8]]]:
        """This slot and these blocks, each with the bytes of `state` that belong there.

        The last block may have none: it is that of the newest token, which nothing was computed for. Raises
        ResourceError, before the first of them, where the sizes are of another artifact.
        """
        sizes = [count * self.block_bytes for count in (len(block_table), len(block_table) - 1)]
        if len(state.slot) != self.slot_bytes or len(state.blocks) not in sizes:
            raise ResourceError(
                "the cache contents of a request have other sizes than this artifact's caches",
                action="hand requests only to engines of the same artifact",
            )
        yield self._slot(slot_id), np.frombuffer(state.slot, np.uint8)
        blocks = np.frombuffer(state.blocks, np.uint8)
        for block, start in zip(block_table, range(0, len(blocks), self.block_bytes or 1), strict=False):
            yield self._block(block), blocks[start : start + self.block_bytes]

    def write(self, block_table: Sequence[int], slot_id: int, state: CacheState) -> None:
        """Fills these blocks and this slot. Raises ResourceError where the sizes are of another artifact."""
        for unit, content in self.contents(block_table, slot_id, state):
            unit.copy_(torch.from_numpy(content.copy()))

    def _block(self, block: int) -> Tensor:
        return self.blocks[block * self.block_bytes : (block + 1) * self.block_bytes]

    def _slot(self, slot_id: int) -> Tensor:
        return self.slots[slot_id * self.slot_bytes : (slot_id + 1) * self.slot_bytes]

    @property
    def total_bytes(self) -> int:
        """Bytes of address space of both arenas."""
        return self.blocks.numel() + self.slots.numel()


def _allocate(num_bytes: int, what: str, device: torch.device) -> Tensor:
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8, device=device)
    try:
        if device != _HOST:
            return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        memory = mmap.mmap(-1, num_bytes)
    except (OSError, OverflowError, torch.OutOfMemoryError) as error:
        raise ResourceError(
            f"{num_bytes} bytes for {what} are not to be had: {error}",
            action="build the artifact with a smaller max_model_len or max_num_seqs",
        ) from error
    return torch.frombuffer(memory, dtype=torch.uint8)  # keeps the map alive


def _view(arena: Tensor, count: int, unit_bytes: int, region: CacheRegion) -> Tensor:
    """The region inside every unit of the arena, [count, entries, *record_shape], without a copy."""
    dtype = _DTYPES[region.dtype]
    record = math.prod(region.record_shape)
    end = region.offset_bytes + region.entries * record * dtype.itemsize
    # The reader has checked the layout; a view past its unit would corrupt memory, so look once more.
    if end > unit_bytes or region.offset_bytes % dtype.itemsize or unit_bytes % dtype.itemsize:
        raise AssertionError(f"region {region.name} does not fit its unit of {unit_bytes} bytes: {region}")
    strides = [math.prod(region.record_shape[axis + 1 :]) for axis in range(len(region.record_shape))]
    return arena.view(dtype).as_strided(
        (count, region.entries, *region.record_shape),
        (unit_bytes // dtype.itemsize, record, *strides),
        region.offset_bytes // dtype.itemsize,
    )
