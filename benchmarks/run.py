"""Run every bench_*.py here and print the table: `make bench`, `make bench BENCH="--only AREA"`.

Exit code 1 when a floor is missed.
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
    missed = figure["floor"] is not None and not figure["ratio"] >= figure["floor"]
    text = f"{figure['ratio']:.2f} ({figure['low']:.2f} - {figure['high']:.2f})"
    return f"**{text}, missed**" if missed else text


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


def _remember(figures: list[dict[str, Any]], load: float, path: Path) -> None:
    """Prints what moved, and adds the run if the machine was quiet when it began."""
    run = history.entry(figures, machine(), load, commit())
    for line in history.changes(run, history.read(path)):
        print(f"changed  {line}")
    if load <= history.QUIET_LOAD:
        history.append(run, path)
    else:
        print(f"not kept in {path.name}: a load of {load:.1f} before the first measurement")


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
    figures, missed = [], 0
    load_before = os.getloadavg()[0]  # of others: our own work comes on top
    before = torch.get_num_threads()
    try:
        for area in options.only or areas():
            for threads in (int(count) for count in options.threads.split(",")):
                torch.set_num_threads(threads)
                lines: list[Line] = importlib.import_module(f"bench_{area}").run(threads)
                print(f"\n{area}\n{table(lines, threads)}", flush=True)
                missed += sum(line.missed for line in lines)
                figures += [{"area": area, "threads": threads, **dataclasses.asdict(line)} for line in lines]
    finally:
        torch.set_num_threads(before)
    load = os.getloadavg()[0]
    _remember(figures, load_before, options.history)
    print(f"\n{missed} of {sum(f['floor'] is not None for f in figures)} floors missed; load {load:.1f}")
    if options.json:
        options.json.write_text(json.dumps({"load": load, "lines": figures}, indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(markdown(figures, load))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
