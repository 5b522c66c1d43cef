"""`deepinfer bench`: how fast an artifact is, as its users meet it."""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer.cli.common import (
    StrictParser,
    add_output_flags,
    integer_list,
    progress_for,
    to_json,
    writable_report,
    write_report,
)
from deepinfer.errors import UsageError
from deepinfer.peak_memory import peak_memory_bytes
from deepinfer.settings import UNSET, load_settings

if TYPE_CHECKING:
    from deepinfer.benchmark import Workload
    from deepinfer.runtime.llm import LLM

KINDS = {
    "latency": "time to the first token, between tokens and in all, at each concurrency",
    "throughput": "tokens per second under full load, at each concurrency",
    "startup": "a fresh process from its start to the first token",
    "kernels": "every compiled graph by itself",
}
_KINDS_HELP = "; ".join(f"{name}: {text}" for name, text in KINDS.items())


def add_parser(commands: "argparse._SubParsersAction[StrictParser]") -> None:
    """The flags of `deepinfer bench`."""
    parser = commands.add_parser("bench", help="measure an artifact", description="Measure an artifact.")
    parser.add_argument("kind", metavar="KIND", choices=tuple(KINDS), help=_KINDS_HELP)
    parser.add_argument("artifact", metavar="OUT", type=Path, help="artifact to run")
    parser.add_argument(
        "--concurrency", metavar="N,...", type=integer_list, default=[1], help="requests at a time (1)"
    )
    parser.add_argument("--input-len", metavar="N", type=int, default=64, help="prompt tokens (64)")
    parser.add_argument("--output-len", metavar="N", type=int, default=32, help="tokens to generate (32)")
    parser.add_argument(
        "--chunk-size", metavar="N", type=int, help="token rows of a prefill step (the largest graph)"
    )
    parser.add_argument(
        "--num-requests", metavar="N", type=int, help="throughput: requests in all (4 per place)"
    )
    parser.add_argument(
        "--vary",
        metavar="NAME=N,...",
        action="append",
        help="vary one of the above (or num-threads), keep the rest fixed; repeatable, one after the other",
    )
    parser.add_argument(
        "--repeats", metavar="N", type=int, default=5, help="measured runs after a warm-up (5)"
    )
    parser.add_argument(
        "--num-threads", metavar="N", type=int, default=UNSET, help="threads (physical cores)"
    )
    parser.add_argument("--output-json", metavar="FILE", type=Path, help="write the figures there")
    parser.add_argument("--output-markdown", metavar="FILE", type=Path, help="write the tables there")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="latency: write a picture (PNG) there")
    parser.add_argument(
        "--trace", metavar="FILE", type=Path, help="write one run there for chrome://tracing or Perfetto"
    )
    parser.add_argument("--config", metavar="FILE", type=Path, help="settings in YAML; flags win over it")
    add_output_flags(parser, "print the figures as one JSON object")


def run(options: argparse.Namespace) -> int:
    """Measure and print. Raises DeepInferError."""
    if options.repeats < 1:
        raise UsageError(f"{options.repeats} is below 1", where="--repeats")
    if options.plot is not None and options.kind != "latency":
        raise UsageError("only latency has a picture", where="--plot")
    if options.trace is not None and options.kind not in ("latency", "throughput"):
        raise UsageError("only latency and throughput run an engine", where="--trace")
    for path in (options.output_json, options.output_markdown, options.plot, options.trace):
        writable_report(path, options.artifact)
    serve = load_settings(options.config, serve_flags={"num_threads": options.num_threads}).serve
    from deepinfer import benchmark
    from deepinfer.runtime.threads import checked_num_threads

    if options.kind == "startup":
        threads = checked_num_threads(serve.num_threads)
        figures = benchmark.startup(options.artifact, threads, options.repeats)
        return _print(options, {"num_threads": threads, **figures}, _report().startup_text(figures))
    from deepinfer.runtime.llm import LLM

    llm = LLM(options.artifact, num_threads=serve.num_threads)
    if options.kind == "kernels":
        figures = benchmark.graphs(llm)
        return _print(options, {**_manifest(llm), **figures}, _report().graphs_text(figures))
    sweeps = _sweeps(options)
    measure, text = _measurement(options, llm)
    with progress_for(options) as progress:
        measured: list[tuple[str, list[dict[str, Any]]]] = []
        progress.start(options.kind, sum(len(workloads) for _, workloads in sweeps))
        for varied, workloads in sweeps:
            points: list[dict[str, Any]] = []
            measured.append((varied, points))
            for workload in workloads:
                points.append(measure(workload))
                progress.advance(f"{varied}={getattr(workload, varied)}")
    if options.trace is not None:
        write_report(options.trace, json.dumps({"traceEvents": benchmark.trace(llm, sweeps[-1][1][-1])}))
    if options.plot is not None:
        _report().plot_latency(measured, options.plot)
    found = [{"varied": varied, "points": points} for varied, points in measured]
    tables = "\n\n".join(text(points, varied) for varied, points in measured)
    figures = {**_manifest(llm), **(found[0] if len(found) == 1 else {"sweeps": found})}
    return _print(options, figures, tables)


def _sweeps(options: argparse.Namespace) -> list[tuple[str, "list[Workload]"]]:
    """What is varied, one after the other, and one workload per value."""
    from deepinfer.benchmark import Workload, sweep

    base = Workload(
        concurrency=options.concurrency[0],
        input_len=options.input_len,
        output_len=options.output_len,
        chunk_size=options.chunk_size,
    )
    if options.vary is None:
        return [("concurrency", sweep(base, "concurrency", options.concurrency))]
    sweeps = []
    for text in options.vary:
        name, equals, values = text.partition("=")
        if not equals:
            raise UsageError(f"{text!r} is not NAME=N,...", where="--vary")
        try:
            numbers = integer_list(values)
        except argparse.ArgumentTypeError as error:
            raise UsageError(str(error), where="--vary") from None
        name = name.strip().replace("-", "_")
        sweeps.append((name, sweep(base, name, numbers)))
    return sweeps


def _measurement(
    options: argparse.Namespace, llm: "LLM"
) -> tuple[Callable[["Workload"], dict[str, Any]], Callable[[Sequence[dict[str, Any]], str], str]]:
    from deepinfer import benchmark

    if options.kind == "latency":
        return lambda workload: benchmark.latency(llm, workload, options.repeats), _report().latency_text

    def throughput(workload: "Workload") -> dict[str, Any]:
        places = min(workload.concurrency, llm.limits.num_slots - 1)
        return benchmark.throughput(llm, workload, options.num_requests or 4 * places, options.repeats)

    return throughput, _report().throughput_text


def _manifest(llm: "LLM") -> dict[str, object]:
    """What was measured."""
    return {"artifact_id": llm.artifact_id, "num_threads": llm.num_threads}


def _report() -> Any:
    from deepinfer import benchmark_report

    return benchmark_report


def _print(options: argparse.Namespace, figures: dict[str, Any], text: str) -> int:
    # of this process, unless the figures are those of others
    figures = {"kind": options.kind, "peak_memory_bytes": peak_memory_bytes(), **figures}
    text = f"{text}\n\n{_report().memory_text(figures['peak_memory_bytes'])}"
    if options.output_json is not None:
        write_report(options.output_json, to_json(figures, indent=1) + "\n")
    if options.output_markdown is not None:
        write_report(options.output_markdown, f"# {options.kind}\n\n{text}\n")
    print(to_json(figures) if options.json else text)
    return 0
