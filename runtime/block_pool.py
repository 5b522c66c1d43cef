"""Pools of numbered cache units: blocks and state slots. Integers only; knows nothing of requests or memory.

Id 0 is the unit that padding rows write to; it is never handed out. A unit is owned from `allocate` until
every owner has freed it; `share` adds an owner (a fork shares the full blocks of its parent). Freed ids go to
the tail of the free list, so a unit rests as long as possible before its next use and stale reads show up in
tests rather than by luck seeing the right bytes.
"""

from collections import Counter, deque
from collections.abc import Iterable

from deepinfer.errors import ResourceError


class BlockPool:
    """Ids 1 .. num_units - 1, each free or with one owner or more."""

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

    @property
    def num_used(self) -> int:
        """Units owned now, each counted once."""
        return self.capacity - len(self._free)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Hands out `count` ids, all or none. Raises ResourceError where fewer are free."""
        assert count >= 0, count
        if count > len(self._free):
            raise ResourceError(f"{count} {self.name}s wanted, {len(self._free)} of {self.capacity} free")
        ids = tuple(self._free.popleft() for _ in range(count))
        self._owners.update(dict.fromkeys(ids, 1))
        return ids

    def share(self, ids: Iterable[int]) -> None:
        """Adds an owner to each; all must be owned."""
        for unit in ids:
            assert unit in self._owners, f"{self.name} {unit} is not owned"
            self._owners[unit] += 1

    def free(self, ids: Iterable[int]) -> None:
        """Takes one owner from each. Freeing what is not owned, or id 0, is a programmer's mistake."""
        for unit in ids:
            assert unit in self._owners, f"{self.name} {unit} is not owned"
            self._owners[unit] -= 1
            if not self._owners[unit]:
                del self._owners[unit]
                self._free.append(unit)

    def reset(self) -> None:
        """Makes every unit free again; only when no owner remains."""
        self._free = deque(range(1, self.num_units))
        self._owners: dict[int, int] = {}

    def check_integrity(self, owned: Iterable[int]) -> None:
        """Asserts that each id but 0 is free, or owned as often as `owned` (of all owners) has it."""
        free, owners = set(self._free), Counter(owned)
        assert len(free) == len(self._free), f"a {self.name} is free twice"
        assert not free & self._owners.keys(), f"{self.name}s both free and owned"
        assert free | self._owners.keys() == set(range(1, self.num_units)), f"{self.name}s lost or invented"
        assert owners == self._owners, f"{self.name}s and their owners disagree: {owners} {self._owners}"
