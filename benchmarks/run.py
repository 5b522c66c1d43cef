"""Run every bench_*.py here and print the table: `make bench`, `make bench BENCH="--only AREA"`.

Exit code 1 when a floor is missed.
"""

import argparse
import dataclasses
import importlib
import json
import os
import sys
from pathlib import Path

import torch

from deepinfer.kernels import native

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))  # not there by itself under PYTHONSAFEPATH

from harness import Line, table  # noqa: E402


def areas() -> list[str]:
    """Names that `--only` takes."""
    return sorted(path.stem.removeprefix("bench_") for path in FOLDER.glob("bench_*.py"))


def main(arguments: list[str] | None = None) -> int:
    """Run, print, and say whether every floor holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", action="append", choices=areas(), metavar="AREA", help="one area; repeatable"
    )
    parser.add_argument("--threads", default="1,2", help="thread counts, separated by commas")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args(arguments)

    native.load_host_library()
    figures, missed = [], 0
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
    print(f"\n{missed} of {sum(f['floor'] is not None for f in figures)} floors missed; load {load:.1f}")
    if options.json:
        options.json.write_text(json.dumps({"load": load, "lines": figures}, indent=1) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
