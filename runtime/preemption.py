"""Who gives its memory up when blocks run out (spec engine D.7). Pure functions of what requests hold."""

from collections.abc import Collection

from deepinfer.runtime.request import Request
from deepinfer.runtime.scheduler_config import SchedulerConfig


def progress(request: Request) -> tuple[int, int]:
    """Orders requests by outputs, then by arrival: the first are served first, the last give way first."""
    return len(request.output_token_ids), request.arrival


def choose_victim(
    request: Request, others: Collection[Request], waits: bool, config: SchedulerConfig, capacity: int
) -> Request | None:
    """Who gives way so that `request` gets a block; None if nobody can.

    others: the requests that decode and were not served in this step. waits: whether anybody would go on if
    `request` itself gave way. capacity: blocks of the pool.

    The longest of the others; one that was preempted often is spared while it is small. If all are spared,
    the request itself, unless it is spared too.
    """

    def spared(own: Request) -> bool:
        return own.num_preemptions >= config.max_preemptions and len(own.block_table) < capacity / 2

    unspared = [own for own in others if not spared(own)]
    if waits and not unspared and not spared(request):
        return request
    return max(unspared or others, key=progress, default=request if waits else None)
