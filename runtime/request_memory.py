"""What requests hold of the caches: blocks, slots, and the copies that forks are owed. Integers only.

Decides nothing: the scheduler says who gets memory and who gives it back.
"""

from collections.abc import Collection

from deepinfer.runtime.block_pool import BlockPool
from deepinfer.runtime.limits import Limits
from deepinfer.runtime.request import Request, RequestStatus, StateCopy


class RequestMemory:
    """Two pools, and what each request has of them."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.blocks = BlockPool(limits.num_blocks, "cache block")
        self.slots = BlockPool(limits.num_slots, "state slot")
        self._copies: dict[str, StateCopy] = {}  # by request id, for the next step

    @property
    def has_room_for_fork(self) -> bool:
        """Whether a fork could start: it needs a slot, and a block at most."""
        return self.slots.num_free > 0 and self.blocks.num_free > 0

    def has_room_for(self, request: Request) -> bool:
        """Whether everything the request has so far could be held."""
        return self.slots.num_free > 0 and self.blocks.num_free >= self._num_blocks(request)

    def start(self, request: Request) -> None:
        """Gives a request a slot and the blocks of everything it has so far."""
        self._take(request, self.blocks.allocate(self._num_blocks(request)))

    def start_fork(self, request: Request, parent: Request, num_computed_tokens: int) -> None:
        """Gives a request its parent's full blocks, and copies of the slot and of the block in use.

        The copies are made before the next step, when the parent has computed so many tokens.
        """
        full, unfilled = divmod(num_computed_tokens, self.limits.block_tokens)
        shared = parent.block_table[:full]
        own = self.blocks.allocate(1 if unfilled else 0)
        self.blocks.share(shared)
        self._take(request, shared + own)
        self._copies[request.request_id] = StateCopy(
            parent.slot_id, request.slot_id, *((parent.block_table[full], own[0]) if unfilled else ())
        )
        request.num_computed_tokens = num_computed_tokens
        request.status = RequestStatus.RUNNING

    def extend(self, request: Request) -> bool:
        """Gives a request the blocks that its next row needs; False, and nothing, if they are not there."""
        missing = self._num_blocks(request) - len(request.block_table)
        if missing > self.blocks.num_free:
            return False
        if missing > 0:
            request.block_table += self.blocks.allocate(missing)
            request.num_peak_blocks = max(request.num_peak_blocks, len(request.block_table))
        return True

    def is_ready(self, request: Request) -> bool:
        """Whether a request has the blocks that its next row needs."""
        return len(request.block_table) * self.limits.block_tokens >= request.num_tokens

    def give_back(self, request: Request) -> None:
        """Takes back all a request holds."""
        self.blocks.free(request.block_table)
        if request.slot_id:
            self.slots.free((request.slot_id,))
        request.block_table, request.slot_id, request.cache_state = (), 0, None
        self._copies.pop(request.request_id, None)

    def take_copies(self) -> tuple[StateCopy, ...]:
        """The copies that are due before the next step."""
        copies, self._copies = tuple(self._copies.values()), {}
        return copies

    def reset(self) -> None:
        """Makes everything free, also what was taken by an interrupted step that recorded no owner."""
        self._copies.clear()
        self.blocks.reset()
        self.slots.reset()

    def check_integrity(self, requests: Collection[Request]) -> None:
        """Asserts that pools and all unfinished requests agree."""
        self.blocks.check_integrity(block for request in requests for block in request.block_table)
        self.slots.check_integrity(request.slot_id for request in requests if request.slot_id)
        for request in requests:
            held = request.status in (RequestStatus.PREFILLING, RequestStatus.RUNNING)
            assert bool(request.slot_id) is bool(request.block_table) is held, request.request_id
            assert 0 not in request.block_table

    def _num_blocks(self, request: Request) -> int:
        return self.limits.blocks_for(request.num_tokens)

    def _take(self, request: Request, block_table: tuple[int, ...]) -> None:
        request.block_table = block_table
        (request.slot_id,) = self.slots.allocate(1)
        request.num_peak_blocks = max(request.num_peak_blocks, len(block_table))
