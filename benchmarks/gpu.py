"""Everything that needs a card, with nothing but torch, Triton and this tree: `make gpu`.

    python benchmarks/gpu.py [--dry-run] [--only OP,...] [--json FILE] [--skip checks|times]

Checks kernels against their references, rows against batches, replays against eager calls; then measures
latency and bandwidth at the released model's shapes against a copy of the device, and the host's share of a
step. Prints tables, writes JSON, exits 1 if a check failed. `--dry-run` does the same without a card: small
shapes, Triton's interpreter, times that mean nothing. Nothing is installed or fetched.
"""

import argparse
import json
import os
import platform
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tests" / "support")]
COPY_BYTES = 1 << 30


def main(arguments: list[str] | None = None) -> int:
    """Run what was asked for; 0 if every check passed, 1 if one failed, 2 without a card, for bad flags."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="small shapes on the CPU, interpreted")
    parser.add_argument("--only", metavar="OP,...", help="these operations alone")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything there too")
    parser.add_argument("--skip", choices=("checks", "times"), help="leave out a half")
    options = parser.parse_args(arguments)
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    if not options.dry_run and not torch.cuda.is_available():
        print("torch finds no CUDA device here; --dry-run tries the script without one", file=sys.stderr)
        return 2
    from gpu_backend import Backend, Card, Interpreter

    from deepinfer.kernels import OPS

    names = {op.name for op in OPS}
    if options.only is not None:
        asked = set(options.only.split(","))
        if unknown := sorted(asked - names):
            parser.error(f"no such operation: {', '.join(unknown)} (known: {', '.join(sorted(names))})")
        names = asked
    backend: Backend
    if options.dry_run:
        from interpreter import patch_interpreter

        patch_interpreter()
        backend = Interpreter()
    else:
        backend = Card()
    report: dict[str, Any] = {"environment": _environment(backend), "dry_run": options.dry_run}
    print("\n".join(f"{name:<12} {value}" for name, value in report["environment"].items()))
    if options.skip != "checks":
        report["checks"] = _checks(backend, names, options.dry_run)
    if options.skip != "times":
        report["times"] = _times(backend, names, options.dry_run)
        report["host"] = _host(backend, options.dry_run)
    failed = [check for check in report.get("checks", []) if check["wrong"]]
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
        print(f"wrote {options.json}")
    print(f"{len(failed)} of {len(report.get('checks', []))} checks failed")
    return 1 if failed else 0


def _environment(backend: Any) -> dict[str, str]:
    import torch
    import triton

    facts = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": triton.__version__,
    }
    facts["device"] = backend.name
    if backend.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(backend.device)
        facts |= {"arch": f"sm_{major}{minor}", "cuda": str(torch.version.cuda)}
    return facts


def _checks(backend: Any, names: set[str], quick: bool) -> list[dict[str, Any]]:
    """Run every check; one that raises has failed, with the error as the reason."""
    from gpu_checks import gate_checks, kernel_checks

    found = []
    everything = [*kernel_checks(backend, names, quick)]
    if "moe_gate" in names:
        everything += gate_checks(backend, quick)
    everything.append(("steps", "runner of captured graphs", lambda: _steps(backend)))
    everything.append(("steps", "contents of caches", lambda: _caches(backend)))
    for kind, subject, check in everything:
        started = time.perf_counter()
        try:
            wrong = check()
        except Exception as error:  # the others still run
            wrong = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            if os.environ.get("DEEPINFER_LOG") == "debug":
                traceback.print_exc()
        found.append({"kind": kind, "subject": subject, "wrong": wrong})
        if wrong:
            print(f"FAILED       {kind:<10} {subject}: {wrong}", flush=True)
        elif time.perf_counter() - started > 30:
            print(f"slow         {kind:<10} {subject}: {time.perf_counter() - started:.0f} s", flush=True)
    for kind in dict.fromkeys(check["kind"] for check in found):
        of_kind = [check for check in found if check["kind"] == kind]
        print(f"checks       {kind:<10} {sum(not c['wrong'] for c in of_kind)} of {len(of_kind)} fine")
    return found


def _runner(backend: Any) -> tuple[Any, Any]:
    """The executor and its device; without a card one that queues and replays like one."""
    from gpu_steps import runner_on

    if backend.device.type == "cuda":
        from deepinfer.runtime.cuda_device import CudaDevice

        device: Any = CudaDevice(backend.device)
    else:
        from recording_device import RecordingDevice

        device = RecordingDevice()
    return runner_on(backend, device), device


def _steps(backend: Any) -> str | None:
    from gpu_steps import replayed_steps

    runner, device = _runner(backend)
    return replayed_steps(backend, runner, device.wait)


def _caches(backend: Any) -> str | None:
    from gpu_steps import cache_contents

    return cache_contents(*_runner(backend))


def _times(backend: Any, names: set[str], quick: bool) -> list[dict[str, Any]]:
    """Latency of every call of the released model at 8 rows, and its bytes per second against a copy's."""
    from gpu_times import copy_bandwidth, small_calls, time_call

    if quick:
        calls = small_calls(names)
    else:
        from gpu_calls import released_calls

        calls = [call for call in released_calls() if call.op.name in names]
    measured = copy_bandwidth(backend, 1 << 16 if quick else COPY_BYTES)
    print(f"copy         {measured / 1e9:,.0f} GB/s read and written" + _note(backend))
    lines = []
    for call in calls:
        line = time_call(backend, call, measured, rounds=20)
        lines.append(line)
        told = line["skipped"] or f"{line['microseconds']:>10.1f} us"
        share = (
            ""
            if line["share"] is None
            else f" {line['gigabytes_per_second']:>8.0f} GB/s {line['share']:>6.0%}"
        )
        print(
            f"time         {line['op']:<18} {line['language']:<7} {line['form']:<40} {told}{share}",
            flush=True,
        )
    return lines


def _host(backend: Any, quick: bool) -> dict[str, float]:
    from gpu_steps import host_microseconds

    runner, device = _runner(backend)
    taken = host_microseconds(runner, device.wait, steps=3 if quick else 200)
    for name, value in taken.items():
        print(f"host         {name:<18} {value:>10.1f} us a step" + _note(backend))
    return taken


def _note(backend: Any) -> str:
    return "" if backend.measures else " (no card)"


if __name__ == "__main__":
    sys.exit(main())
