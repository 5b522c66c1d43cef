"""Figures of a measurement as text for people, and as pictures, which need matplotlib (the extra `plots`)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepinfer.errors import UsageError

_PARTS = ("schedule", "fill", "step graph", "head", "sample", "commit", "other")


def milliseconds(seconds: float) -> str:
    """Three digits."""
    return f"{seconds * 1e3:.3g}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are aligned in plain text too."""
    lines = [list(head), *[list(row) for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    padded = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in lines
    ]
    return "\n".join([padded[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *padded[1:]])


def latency_text(points: Sequence[Mapping[str, Any]], varied: str) -> str:
    """One row per point, one column per kind of time, median (p90, p99) in milliseconds; then the steps."""
    kinds = [
        name for name in ("ttft", "itl", "tpot", "e2e") if any(name in point["seconds"] for point in points)
    ]
    rows = [
        [str(point["workload"][varied]), *(_spread(point["seconds"].get(kind)) for kind in kinds)]
        for point in points
    ]
    head = [varied, *(f"{kind.upper()} ms" for kind in kinds)]
    steps = [
        [
            str(point["workload"][varied]),
            *(milliseconds(point["step_seconds"].get(name, 0.0)) for name in _PARTS),
        ]
        for point in points
    ]
    return (
        table(head, rows)
        + "\n\nmedian (p90, p99). Mean parts of a step in ms:\n\n"
        + table([varied, *_PARTS], steps)
    )


def throughput_text(points: Sequence[Mapping[str, Any]], varied: str) -> str:
    """Rates per second, one row per point."""
    rows = [
        [
            str(point["workload"][varied]),
            *(f"{point['per_second'][name]:.1f}" for name in ("output", "total", "requests")),
            str(point["preemptions"]),
        ]
        for point in points
    ]
    return table([varied, "output tokens/s", "all tokens/s", "requests/s", "preemptions"], rows)


def startup_text(found: Mapping[str, Any]) -> str:
    """The whole and its parts."""
    rows = [["process start to end", _spread(found["seconds"])]]
    rows += [[name, milliseconds(seconds)] for name, seconds in found["parts_seconds"].items()]
    rows += [[f"  load: {name}", milliseconds(seconds)] for name, seconds in found["load_seconds"].items()]
    return table(["part", "ms"], rows)


def graphs_text(found: Mapping[str, Any]) -> str:
    """One row per graph."""
    return table(["graph", "ms"], [[name, _spread(seconds)] for name, seconds in found["seconds"].items()])


def memory_text(peak_bytes: int | None) -> str:
    """The peak of a process as a line."""
    return f"peak memory: {'unknown' if peak_bytes is None else f'{peak_bytes / 2**20:.0f} MiB'}"


def plot_latency(sweeps: Sequence[tuple[str, Sequence[Mapping[str, Any]]]], path: Path) -> None:
    """Two pictures per sweep: times against what was varied, and the parts of a step stacked."""
    pyplot = headless_pyplot()
    figure, rows = pyplot.subplots(
        len(sweeps), 2, figsize=(11, 4.5 * len(sweeps)), layout="constrained", squeeze=False
    )
    for (varied, points), (left, right) in zip(sweeps, rows, strict=True):
        _plot_sweep(left, right, varied, points)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _plot_sweep(left: Any, right: Any, varied: str, points: Sequence[Mapping[str, Any]]) -> None:
    labels = [str(point["workload"][varied]) for point in points]
    name = varied.replace("_", "-")
    for kind in ("ttft", "itl", "tpot", "e2e"):
        values = [point["seconds"].get(kind) for point in points]
        if all(values):
            left.plot(labels, [value["median"] * 1e3 for value in values], marker="o", label=kind.upper())
    left.set(xlabel=name, ylabel="median, ms", yscale="log", title="latency")
    left.legend()
    bottom = [0.0] * len(points)
    for part in _PARTS:
        heights = [max(point["step_seconds"].get(part, 0.0), 0.0) * 1e3 for point in points]
        right.bar(labels, heights, bottom=bottom, label=part)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    right.set(xlabel=name, ylabel="mean, ms", title="parts of a step")
    right.legend(loc="upper left", bbox_to_anchor=(1, 1))


def _spread(summary: Mapping[str, Any] | None) -> str:
    if summary is None:
        return ""
    return (
        f"{milliseconds(summary['median'])} ({milliseconds(summary['p90'])}, {milliseconds(summary['p99'])})"
    )


def headless_pyplot() -> Any:
    """matplotlib's pyplot, for files alone. Raises UsageError where it is not installed."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise UsageError(
            "pictures need matplotlib", where="--plot", action='pip install "deepinfer[plots]"'
        ) from None
    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot
