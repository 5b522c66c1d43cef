"""Pools of numbered cache units: blocks and state slots. Integers only; knows nothing of requests or memory.

Id 0 is the unit that padding rows write to; it is never handed out. A unit has exactly one owner from
`allocate` to `free`. Freed ids go to the tail of the free list, so a unit rests as long as possible before
its next use and stale reads show up in tests rather than by luck seeing the right bytes.
"""

from collections import deque
from collections.abc import Iterable

from deepinfer.errors import ResourceError


class BlockPool:
    """Ids 1 .. num_units - 1, each either free or owned."""

    def __init__(self, num_units: int, name: str = "block") -> None:
        assert num_units >= 2, num_units
        self.name = name
        self.num_units = num_units
        self.reset()

    @property
    def capacity(self) -> int:
        """Units that can be owned at once."""
        return self.num_units - 1

    @property
    def num_free(self) -> int:
        """Units free now."""
        return len(self._free)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Hands out `count` ids, all or none. Raises ResourceError where fewer are free."""
        assert count >= 0, count
        if count > len(self._free):
            raise ResourceError(f"{count} {self.name}s wanted, {len(self._free)} of {self.capacity} free")
        ids = tuple(self._free.popleft() for _ in range(count))
        self._owned.update(ids)
        return ids

    def free(self, ids: Iterable[int]) -> None:
        """Takes ids back. Each must be owned: freeing twice, or id 0, is a programmer's mistake."""
        for unit in ids:
            assert unit in self._owned, f"{self.name} {unit} is not owned"
            self._owned.remove(unit)
            self._free.append(unit)

    def reset(self) -> None:
        """Makes every unit free again; only when no owner remains."""
        self._free = deque(range(1, self.num_units))
        self._owned: set[int] = set()

    def check_integrity(self) -> None:
        """Asserts that every id except 0 is in exactly one of the two sets."""
        free = set(self._free)
        assert len(free) == len(self._free), f"a {self.name} is free twice"
        assert not free & self._owned, f"{self.name}s both free and owned: {sorted(free & self._owned)}"
        assert free | self._owned == set(range(1, self.num_units)), f"{self.name}s lost or invented"
