"""How the time of a step grows with its rows and with the context, and that of a prompt with its length.

The trained small model, its config stretched to 32,768 positions. A line compares a size with the one before:
the ratio is the growth of the size over that of the time. 1 is linear and more is better; below the floor the
time grows faster than the size, which nothing in a step explains. A whole prompt may grow a little faster:
every token looks for the compressed tokens before it, so its floor is lower.

`python benchmarks/bench_curves.py --plot FILE.png` draws the curves.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from bench_step import MODELS
from harness import Comparison, Line, Spread, compare, in_units

from deepinfer.benchmark_report import headless_pyplot
from deepinfer.compile import compile_model
from deepinfer.runtime.engine import Engine
from deepinfer.runtime.loader import LoadedArtifact, load_artifact
from deepinfer.runtime.request import Batch, Request, ScheduledRows
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.settings import CompileConfig

ROWS = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 512, 2048, 8192, 32_000)
PROMPTS = (64, 128, 256, 512, 1024, 2048, 4096)
MAX_MODEL_LEN = 32_768
ROWS_CONTEXT = 128
MORE_TOKENS = 700  # of a request, while others are prefilled
STEP_FLOOR = 0.85  # of linear; the rest is noise
PROMPT_FLOOR = 0.7  # twice the tokens, of which each looks at up to twice as much

Curve = tuple[str, Sequence[int], Comparison]


def run(threads: int) -> list[Line]:
    """The lines of this area."""
    return growth(curves(threads))


def growth(measured: Sequence[Curve]) -> list[Line]:
    """A line for every size but the first of each curve."""
    lines = []
    for name, sizes, times in measured:
        floor = PROMPT_FLOOR if name.startswith("prompt") else STEP_FLOOR
        for before, size in zip(sizes, sizes[1:], strict=False):
            pairs = zip(times.rounds[str(before)], times.rounds[str(size)], strict=True)
            ratio = Spread.of([size / before * short / long for short, long in pairs])
            ends = [in_units(times.seconds(str(end)).median) for end in (before, size)]
            label = f"{name}, {before:,} to {size:,}: growth to that of the time"
            lines.append(Line(label, ratio.median, ratio.low, ratio.high, floor, " to ".join(ends)))
    return lines


def curves(threads: int) -> list[Curve]:
    """Name, sizes and times of each curve, sizes taking turns."""
    with tempfile.TemporaryDirectory(prefix="deepinfer-bench-") as folder:
        loaded = _built(Path(folder))
        torch.set_num_threads(threads)  # loading sets its own
        return [
            ("decode step by rows", ROWS, _by_rows(loaded)),
            ("decode step of one row by context", CONTEXTS, _by_context(loaded)),
            ("prompt by length", PROMPTS, _by_prompt(loaded)),
        ]


def _built(folder: Path) -> LoadedArtifact:
    """The shipped model with more positions: weights as they are, a config of its own."""
    checkpoint = folder / "checkpoint"
    shutil.copytree(MODELS["trained"], checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = MAX_MODEL_LEN
    (checkpoint / "config.json").write_text(json.dumps(config))
    options = CompileConfig(
        decode_rows=ROWS,
        prefill_tokens=(64, 128, 256),
        logits_rows=ROWS,
        max_num_seqs=max(ROWS),
        max_model_len=MAX_MODEL_LEN,
        taps="off",
    )
    compile_model(checkpoint, folder / "artifact", options, certify=False)
    return load_artifact(folder / "artifact")


def _prefilled(loaded: LoadedArtifact, lengths: Sequence[int]) -> list[Request]:
    """Requests of so many prompt tokens, each with its first token, in slots and blocks of their own."""
    engine, numbers = Engine(loaded.runner), np.random.default_rng(3)
    params = SamplingParams(max_tokens=MORE_TOKENS, temperature=0, ignore_eos=True)
    requests = {}
    # the longest first: those that are there grow while others are prefilled
    for place in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        requests[place] = engine.add_request(numbers.integers(3, 3000, lengths[place]).tolist(), params)
    while engine.scheduler.waiting or engine.scheduler.prefilling:
        engine.step()
    assert not any(request.finish_reason for request in requests.values()), "all are there together"
    return [requests[place] for place in range(len(lengths))]


def _step_of(loaded: LoadedArtifact, requests: Sequence[Request]) -> Callable[[], object]:
    """The last step of these requests, to be run again and again: its memory is there."""
    rows = tuple(ScheduledRows(request, request.num_computed_tokens - 1, 1) for request in requests)
    batch = Batch("decode", len(requests), rows)
    return lambda: loaded.runner.run(batch)


def _by_rows(loaded: LoadedArtifact) -> Comparison:
    requests = _prefilled(loaded, [ROWS_CONTEXT] * max(ROWS))
    steps = {str(rows): _step_of(loaded, requests[:rows]) for rows in ROWS}
    return compare(steps, rounds=11, min_seconds=0.05)


def _by_context(loaded: LoadedArtifact) -> Comparison:
    requests = _prefilled(loaded, CONTEXTS)
    steps = {str(length): _step_of(loaded, [one]) for length, one in zip(CONTEXTS, requests, strict=True)}
    return compare(steps, rounds=11, min_seconds=0.05)


def _by_prompt(loaded: LoadedArtifact) -> Comparison:
    def prefill(length: int) -> Callable[[], object]:
        prompt = np.random.default_rng(length).integers(3, 3000, length).tolist()

        def call() -> None:
            engine = Engine(loaded.runner)
            engine.add_request(prompt, SamplingParams(max_tokens=1, temperature=0))
            while engine.has_work:
                engine.step()

        return call

    return compare({str(length): prefill(length) for length in PROMPTS}, rounds=5)


def draw(drawn: Sequence[Curve], path: Path) -> None:
    """One picture per curve: medians and quartiles in milliseconds, and what linear growth would be."""
    pyplot = headless_pyplot()
    figure, axes = pyplot.subplots(1, len(drawn), figsize=(4.6 * len(drawn), 4), layout="constrained")
    for axis, (name, sizes, times) in zip(axes, drawn, strict=True):
        spreads = [times.seconds(str(size)) for size in sizes]
        medians = [spread.median * 1e3 for spread in spreads]
        axis.plot(sizes, medians, marker="o", label="median")
        axis.fill_between(
            sizes, [one.low * 1e3 for one in spreads], [one.high * 1e3 for one in spreads], alpha=0.25
        )
        linear = [medians[-1] * size / sizes[-1] for size in sizes]
        axis.plot(sizes, linear, linestyle=":", color="gray", label="linear, through the last")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=45)
        axis.set_ylim(bottom=min(medians) / 2, top=max(medians) * 1.5)
        axis.set_title(name)
        axis.set_xlabel(name.rsplit(" by ")[-1])
        axis.set_ylabel("ms")
        axis.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> int:
    """Measure the curves, print the times and draw them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--plot", type=Path, required=True, metavar="FILE")
    options = parser.parse_args(arguments)
    found = curves(options.threads)
    for name, sizes, times in found:
        print(
            name + ": " + ", ".join(f"{size:,} {in_units(times.seconds(str(size)).median)}" for size in sizes)
        )
    draw(found, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
