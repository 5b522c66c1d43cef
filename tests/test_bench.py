"""`deepinfer bench`: figures that add up, sweeps that vary one thing, files that open, bad input refused."""

import json
from pathlib import Path

import pytest

from deepinfer import benchmark
from deepinfer.benchmark import Workload, summarize, sweep
from deepinfer.cli.main import main
from deepinfer.errors import UsageError
from deepinfer.runtime.llm import LLM


@pytest.fixture(scope="module")
def llm(float32_artifact: Path) -> LLM:
    return LLM(float32_artifact, num_threads=1)


def bench(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    assert main(["bench", *map(str, arguments), "--json", "-q"]) == 0
    found: dict = json.loads(capsys.readouterr().out)
    return found


def test_percentiles_are_samples() -> None:
    summary = summarize([float(n) for n in range(100, 0, -1)])
    assert (summary.median, summary.p90, summary.p99, summary.count) == (50.5, 90.0, 99.0, 100)
    assert summarize([3.0]).p99 == 3.0


def test_latencies_of_a_run_add_up(llm: LLM) -> None:
    """TTFT and the gaps between tokens are the whole; as many samples as tokens."""
    found = benchmark.latency(llm, Workload(concurrency=2, input_len=20, output_len=5), repeats=3)
    seconds = found["seconds"]
    assert seconds["ttft"]["count"] == seconds["e2e"]["count"] == seconds["tpot"]["count"] == 2 * 3
    assert seconds["itl"]["count"] == 2 * 3 * 4
    assert 0 < seconds["ttft"]["median"] < seconds["e2e"]["median"]
    assert seconds["itl"]["median"] <= seconds["itl"]["p90"] <= seconds["itl"]["p99"] < seconds["e2e"]["p99"]
    steps = found["step_seconds"]
    assert set(steps) == {"schedule", "fill", "step graph", "head", "sample", "commit", "other"}
    assert all(value > 0 for value in steps.values()), steps


def test_the_engine_is_untouched_after_a_trace(llm: LLM) -> None:
    runner = llm._loaded.runner
    events = benchmark.trace(llm, Workload(concurrency=2, input_len=20, output_len=3))
    assert "replay" not in vars(runner) and "fill_step" not in vars(runner)
    names = {event["args"]["name"]: event["tid"] for event in events if event["ph"] == "M"}
    assert set(names) == {"engine", "scheduler", "graph", "sampling"}
    spans = [event for event in events if event["ph"] == "X"]
    steps = [span for span in spans if span["name"] == "step"]
    assert [span["args"]["phase"] for span in steps] == ["prefill"] * 3 + ["decode"] * 2
    for step in steps:
        inside = [span for span in spans if span["args"]["step"] == step["args"]["step"] and span is not step]
        assert {span["name"] for span in inside} >= {"schedule", "fill", "step graph", "head", "commit"}
        assert all(step["ts"] <= span["ts"] for span in inside)
        assert all(span["ts"] + span["dur"] <= step["ts"] + step["dur"] + 0.01 for span in inside)


@pytest.mark.parametrize("concurrency", [3, 4])
def test_the_head_is_a_part_of_its_own(llm: LLM, concurrency: int) -> None:
    """Also in a step that fills its bucket, whose head reads the step's rows where they are."""
    events = benchmark.trace(llm, Workload(concurrency=concurrency, input_len=5, output_len=3))
    spans = [event for event in events if event["ph"] == "X"]
    steps = [span["args"]["step"] for span in spans if span["name"] == "step"]
    assert [span["args"]["step"] for span in spans if span["name"] == "head"] == steps


def test_throughput_counts_all_requests(llm: LLM) -> None:
    found = benchmark.throughput(llm, Workload(concurrency=2, input_len=8, output_len=4), 5, repeats=2)
    rates = found["per_second"]
    assert rates["total"] == pytest.approx(rates["output"] * 3)
    assert rates["output"] == pytest.approx(rates["requests"] * 4)


def test_every_graph_is_measured(llm: LLM) -> None:
    found = benchmark.graphs(llm, repeats=3)["seconds"]
    limits = llm.limits
    assert set(found) == (
        {f"prefill-{rows}" for rows in limits.prefill_buckets}
        | {f"decode-{rows}" for rows in limits.decode_buckets}
        | {f"logits-{rows}" for rows in limits.logits_buckets}
    )
    assert all(summary["count"] == 3 and summary["median"] > 0 for summary in found.values())


def test_a_sweep_varies_one_setting() -> None:
    base = Workload(concurrency=2, input_len=7)
    assert [point.output_len for point in sweep(base, "output_len", [1, 9])] == [1, 9]
    assert all(point.input_len == 7 for point in sweep(base, "output_len", [1, 9]))
    with pytest.raises(UsageError, match="'drafts' cannot be varied.*input-len, output-len"):
        sweep(base, "drafts", [1])


def test_files_of_a_measurement_open(
    float32_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures, tables, trace = tmp_path / "f.json", tmp_path / "t.md", tmp_path / "trace.json"
    found = bench(
        capsys, "latency", float32_artifact, "--vary", "input-len=4,20", "--output-len", 3, "--repeats", 1,
        "--num-threads", 1, "--output-json", figures, "--output-markdown", tables, "--trace", trace,
    )  # fmt: skip
    assert json.loads(figures.read_text()) == found
    assert [point["workload"]["input_len"] for point in found["points"]] == [4, 20]
    text = tables.read_text()
    assert 2**20 < found["peak_memory_bytes"] < 2**36 and "peak memory: " in text
    assert text.startswith("# latency") and "TTFT ms" in text and "| 20 " in text
    assert {event["ph"] for event in json.loads(trace.read_text())["traceEvents"]} == {"M", "X"}


def test_several_sweeps_vary_one_setting_each(
    float32_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    picture, tables = tmp_path / "p.png", tmp_path / "t.md"
    found = bench(
        capsys, "latency", float32_artifact, "--vary", "input-len=4,20", "--vary", "chunk-size=8", "--vary",
        "num-threads=1,2", "--output-len", 3, "--repeats", 1, "--plot", picture, "--output-markdown", tables,
    )  # fmt: skip
    sweeps = {sweep["varied"]: [point["workload"] for point in sweep["points"]] for sweep in found["sweeps"]}
    assert {name: [workload[name] for workload in found] for name, found in sweeps.items()} == {
        "input_len": [4, 20],
        "chunk_size": [8],
        "num_threads": [1, 2],
    }
    fixed = {"concurrency": 1, "input_len": 64, "output_len": 3, "chunk_size": None, "num_threads": None}
    for name, workloads in sweeps.items():
        assert all(workload | {name: None} == fixed | {name: None} for workload in workloads)
    assert tables.read_text().count("TTFT ms") == 3
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_is_written(
    float32_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "p.png"
    bench(
        capsys, "latency", float32_artifact, "--concurrency", "1,2", "--output-len", 3, "--repeats", 1,
        "--num-threads", 1, "--plot", picture,
    )  # fmt: skip
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_fresh_process_is_measured(float32_artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = bench(capsys, "startup", float32_artifact, "--repeats", 1, "--num-threads", 1)
    assert 2**20 < found["peak_memory_bytes"] < 2**36
    parts = found["parts_seconds"]
    assert set(parts) == {"import torch", "other imports, open and load", "first token", "interpreter"}
    assert sum(parts.values()) == pytest.approx(found["seconds"]["median"], rel=0.02)
    assert sum(found["load_seconds"].values()) <= parts["other imports, open and load"]


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["latency", "--input-len", "100000"], "exceed"),
        (["latency", "--output-len", "0"], "--output-len: 0 is below 1"),
        (["latency", "--repeats", "0"], "--repeats"),
        (["latency", "--vary", "speed=1"], "cannot be varied"),
        (["latency", "--vary", "input-len"], "NAME=N"),
        (["latency", "--vary", "input-len=a"], "integers"),
        (["startup", "--plot", "x.png"], "only latency"),
        (["kernels", "--trace", "x.json"], "run an engine"),
        (["latency", "--output-json", "missing/folder/f.json"], "cannot be written"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    float32_artifact: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], fault: str
) -> None:
    kind, *flags = arguments
    assert main(["bench", kind, str(float32_artifact), *flags]) == 2
    captured = capsys.readouterr()
    assert fault in captured.err and captured.out == "" and captured.err.count("\n") == 1
