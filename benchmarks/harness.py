"""Times contenders against each other: they take turns in one process, and the ratio per round counts.

A slow moment of the machine then hits neighbours of one round alike and leaves their ratio alone. Calls that
are short against the clock are batched. What is shown are medians and quartiles: no best of, no mean. A floor
is missed if the median misses it and so does the ratio of the shortest times, which others disturb the least.

A file `bench_AREA.py` offers `run(threads: int) -> list[Line]`; `make bench` runs all of them.
The folder is on the path: `from harness import Line, compare`.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

Call = Callable[[], object]
Clock = Callable[[], float]

MAX_CALLS: Final = 1 << 20
# A batch may take this share of the wanted time: calibration must not hunt for the last percent.
_LONG_ENOUGH: Final = 0.5


@dataclass(frozen=True)
class Line:
    """One measured ratio: how many times faster than its base something is."""

    name: str
    ratio: float  # median over the rounds
    low: float  # quartiles
    high: float
    floor: float | None = None  # the least ratio that is acceptable; None: for information
    detail: str = ""
    best: float | None = None  # ratio of the shortest times, where there are several

    @property
    def missed(self) -> bool:
        """Whether the floor is above both the median and the ratio of the shortest times."""
        reached = self.ratio if self.best is None else max(self.ratio, self.best)
        return self.floor is not None and not reached >= self.floor


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        """Of at least one value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(low, median, high)


@dataclass(frozen=True)
class Comparison:
    """Seconds per call of every contender, round by round; entry i of all lists comes from round i."""

    rounds: dict[str, list[float]]

    def seconds(self, name: str) -> Spread:
        """Of one call."""
        return Spread.of(self.rounds[name])

    def ratio(self, name: str, base: str) -> Spread:
        """How many times faster `name` is than `base`, over the paired rounds."""
        pairs = zip(self.rounds[base], self.rounds[name], strict=True)
        return Spread.of([slow / fast for slow, fast in pairs])

    def line(self, label: str, name: str, base: str, floor: float | None = None, detail: str = "") -> Line:
        """The ratio as a row of the table; the detail names both times unless one is given."""
        ratio = self.ratio(name, base)
        times = f"{name} {in_units(self.seconds(name).median)}, {base} {in_units(self.seconds(base).median)}"
        best = min(self.rounds[base]) / min(self.rounds[name])
        return Line(label, ratio.median, ratio.low, ratio.high, floor, detail or times, best)


def compare(
    contenders: Mapping[str, Call], *, rounds: int = 9, min_seconds: float = 0.005, clock: Clock | None = None
) -> Comparison:
    """Time every contender once per round, in turns; each turn lasts about `min_seconds` or one call.

    Every contender is warmed up and calibrated first, alone. The order is reversed in every other round, so
    that none always runs in the wake of the same neighbour. Garbage collection is off while the clock runs.
    """
    clock = time.perf_counter if clock is None else clock
    calls = {name: _calibrated(call, min_seconds, clock) for name, call in contenders.items()}
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    with _no_collection():
        for number in range(rounds):
            names = list(contenders)[:: 1 if number % 2 == 0 else -1]
            for name in names:
                taken[name].append(_timed(contenders[name], calls[name], clock) / calls[name])
    return Comparison(taken)


def in_units(seconds: float) -> str:
    """Three digits with a unit, 12.3 us."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def table(lines: list[Line], threads: int, judged: bool = True) -> str:
    """Aligned text, one row per line. Floors that are not judged are shown as such."""
    head = ("threads", "what", "ratio", "quartiles", "shortest", "floor", "", "detail")
    rows = [head] + [
        (
            str(threads),
            line.name,
            f"{line.ratio:.2f}x",
            f"{line.low:.2f} - {line.high:.2f}",
            "" if line.best is None else f"{line.best:.2f}x",
            "" if line.floor is None else f"{line.floor:g}x",
            "" if line.floor is None else "not judged" if not judged else "MISSED" if line.missed else "ok",
            line.detail,
        )
        for line in lines
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _calibrated(call: Call, min_seconds: float, clock: Clock) -> int:
    """Calls per turn; runs `call` at least twice."""
    call()
    count = 1
    while count < MAX_CALLS:
        seconds = _timed(call, count, clock)
        if seconds >= min_seconds * _LONG_ENOUGH:
            return max(1, round(count * min_seconds / seconds)) if seconds < min_seconds else count
        growth = min_seconds / seconds if seconds > 0 else 16.0
        count = min(MAX_CALLS, max(count + 1, int(count * min(growth, 16.0))))
    return count


def _timed(call: Call, count: int, clock: Clock) -> float:
    start = clock()
    for _ in range(count):
        call()
    return clock() - start


@contextmanager
def _no_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
