"""Run every bench_*.py here and print the table: `make bench`, `make bench BENCH="--only AREA"`.

Exit code 1 when a floor is missed, 3 when none is but the machine was too busy to judge some.
"""

import argparse
import dataclasses
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from deepinfer.kernels import native

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))  # not there by itself under PYTHONSAFEPATH

import history  # noqa: E402
import quiet  # noqa: E402
from harness import Line, table  # noqa: E402


def areas() -> list[str]:
    """Names that `--only` takes."""
    return sorted(path.stem.removeprefix("bench_") for path in FOLDER.glob("bench_*.py"))


def markdown(figures: list[dict[str, Any]], load: float) -> str:
    """All ratios as one table: a row per thing measured, a column per number of threads."""
    threads = sorted({figure["threads"] for figure in figures})
    rows: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for figure in figures:
        rows.setdefault((figure["area"], figure["name"]), {})[figure["threads"]] = figure
    head = ["what", *(f"{count} thread{'s' * (count > 1)}" for count in threads), "floor", "times"]
    lines = [
        "# Figures",
        "",
        f"`make bench` on {machine()}; load {load:.1f}.",
        "How many times faster the first time is than the second: median and quartiles of paired rounds.",
        "A floor is missed if the ratio of the shortest times misses it too.",
        "The times are those of the most threads.",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
    ]
    for (_, name), by_threads in rows.items():
        last = by_threads[max(by_threads)]
        ratios = [_ratio(by_threads.get(count)) for count in threads]
        floor = "" if last["floor"] is None else f"{last['floor']:g}x"
        lines.append("| " + " | ".join([name, *ratios, floor, last["detail"]]) + " |")
    return "\n".join(lines) + "\n"


def _ratio(figure: dict[str, Any] | None) -> str:
    if figure is None:
        return ""
    text = f"{figure['ratio']:.2f} ({figure['low']:.2f} - {figure['high']:.2f})"
    if figure["floor"] is None:
        return text
    if not figure["judged"]:
        return f"{text}, not judged"
    if figure["missed"]:
        return f"**{text}, missed**"
    return text if figure["ratio"] >= figure["floor"] else f"{text}, shortest {figure['best']:.2f}"


def machine() -> str:
    """Processor, cores, instruction set and the versions that matter."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "?")
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores of {model} ({native.host_isa()}), torch {torch.__version__}"


def commit() -> str:
    """The revision that is measured, with a mark if the tree has changes."""
    command = ["git", "-C", str(FOLDER), "describe", "--always", "--dirty", "--exclude", "*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _measured(area: str, threads: int) -> list[dict[str, Any]]:
    """The figures of an area, printed. They are judged if the machine was quiet right before."""
    idle = quiet.idle_share()
    judged = idle >= quiet.LEAST_IDLE
    torch.set_num_threads(threads)
    lines: list[Line] = importlib.import_module(f"bench_{area}").run(threads)
    note = "" if judged else f" (not judged: {idle:.0%} of the processors idle before)"
    print(f"\n{area}{note}\n{table(lines, threads, judged)}", flush=True)
    return [
        {
            "area": area,
            "threads": threads,
            "judged": judged,
            "missed": judged and line.missed,
            **dataclasses.asdict(line),
        }
        for line in lines
    ]


def _remember(figures: list[dict[str, Any]], load: float, path: Path) -> None:
    """Prints what moved, and adds what was measured on a quiet machine."""
    kept = [figure for figure in figures if figure["judged"]]
    run = history.entry(kept, machine(), load, commit())
    for line in history.changes(run, history.read(path)):
        print(f"changed  {line}")
    if kept:
        history.append(run, path)
    if len(kept) < len(figures):
        print(f"not kept in {path.name}: {len(figures) - len(kept)} figures of a busy machine")


def main(arguments: list[str] | None = None) -> int:
    """Run, print, and say whether every floor holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", action="append", choices=areas(), metavar="AREA", help="one area; repeatable"
    )
    parser.add_argument("--threads", default="1,2", help="thread counts, separated by commas")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="and there as a table, with the machine"
    )
    parser.add_argument(
        "--history", type=Path, default=history.FILE, metavar="FILE", help="runs before; this one is added"
    )
    options = parser.parse_args(arguments)

    native.load_host_library()
    figures: list[dict[str, Any]] = []
    load_before = os.getloadavg()[0]  # of others: our own work comes on top
    before = torch.get_num_threads()
    try:
        for area in options.only or areas():
            for threads in (int(count) for count in options.threads.split(",")):
                figures += _measured(area, threads)
    finally:
        torch.set_num_threads(before)
    load = os.getloadavg()[0]
    _remember(figures, load_before, options.history)
    floors = [figure for figure in figures if figure["floor"] is not None]
    missed, open_ones = (
        sum(figure["missed"] for figure in floors),
        sum(not figure["judged"] for figure in floors),
    )
    print(f"\n{missed} of {len(floors)} floors missed, {open_ones} not judged; load {load:.1f}")
    if options.json:
        options.json.write_text(json.dumps({"load": load, "lines": figures}, indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(markdown(figures, load))
    return 1 if missed else 3 if open_ones else 0


if __name__ == "__main__":
    sys.exit(main())
