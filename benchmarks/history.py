"""What was measured before: one JSON line per run in history.jsonl, and how the figures moved since.

Only runs on the same machine are compared: a ratio depends on the processor. Busy runs are kept out.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "history.jsonl"
_SAME = 0.05  # a change below this share is not worth a line

Figures = Sequence[Mapping[str, Any]]


def entry(figures: Figures, machine: str, load: float, commit: str) -> dict[str, Any]:
    """One run: when, where, of what, and the median of every ratio."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
        "commit": commit,
        "machine": machine,
        "load": round(load, 1),
        "ratios": {_name(figure): round(figure["ratio"], 3) for figure in figures},
    }


def read(path: Path = FILE) -> list[dict[str, Any]]:
    """All runs so far, the oldest first."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def append(run: Mapping[str, Any], path: Path = FILE) -> None:
    """Adds a run."""
    with path.open("a") as file:
        file.write(json.dumps(run, sort_keys=True) + "\n")


def changes(run: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line per ratio that moved by 5 % or more since the last run on this machine that had it."""
    lines = []
    for name, ratio in run["ratios"].items():
        before = next(
            (
                old["ratios"][name]
                for old in reversed(runs)
                if old["machine"] == run["machine"] and name in old["ratios"]
            ),
            None,
        )
        if before and abs(ratio / before - 1) >= _SAME:
            lines.append(f"{name}: {before:.2f}x -> {ratio:.2f}x ({ratio / before - 1:+.0%})")
    return lines


def _name(figure: Mapping[str, Any]) -> str:
    threads = figure["threads"]
    return f"{figure['name']}, {threads} thread{'s' * (threads > 1)}"
