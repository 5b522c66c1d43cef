"""Whether the machine is quiet enough to judge by: what others use of the processors while we do nothing."""

import time
from pathlib import Path

LEAST_IDLE = 0.85  # share of the processors' time; below it a figure says as much of others as of us
_STAT = Path("/proc/stat")


def idle_share(seconds: float = 1.0, stat: Path = _STAT) -> float:
    """Share of the time of all processors that nobody used while this slept for `seconds`."""
    idle, total = _times(stat)
    time.sleep(seconds)
    idle_after, total_after = _times(stat)
    return (idle_after - idle) / max(1, total_after - total)


def _times(stat: Path) -> tuple[int, int]:
    """Ticks without work and ticks in all, since the machine started."""
    ticks = [int(field) for field in stat.read_text().splitlines()[0].split()[1:9]]  # user ... steal
    return ticks[3] + ticks[4], sum(ticks)  # idle and iowait
