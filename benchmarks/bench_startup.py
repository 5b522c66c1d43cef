"""From the start of a fresh process to its first token, Python and torch included.

The shipped model, as it is built by default. The ratio says how often the time taken fits into three seconds.
"""

import tempfile
from pathlib import Path

from bench_step import MODELS
from harness import Line, Spread, in_units

from deepinfer.benchmark import startup
from deepinfer.compile import compile_model

MOST_SECONDS = 3.0
ROUNDS = 5


def run(threads: int) -> list[Line]:
    """One line, with the parts of the time."""
    with tempfile.TemporaryDirectory(prefix="deepinfer-bench-") as folder:
        artifact = Path(folder) / "artifact"
        compile_model(MODELS["trained"], artifact, certify=False)
        found = [startup(artifact, threads, repeats=1) for _ in range(ROUNDS)]
    taken = Spread.of([one["seconds"]["median"] for one in found])
    parts = {
        name: Spread.of([one["parts_seconds"][name] for one in found]).median
        for name in found[0]["parts_seconds"]
    }
    detail = ", ".join(f"{name} {in_units(seconds)}" for name, seconds in parts.items())
    return [
        Line(
            "fresh process to first token, trained, against 3 s",
            MOST_SECONDS / taken.median,
            MOST_SECONDS / taken.high,
            MOST_SECONDS / taken.low,
            1.0,
            f"{in_units(taken.median)}: {detail}",
        )
    ]
