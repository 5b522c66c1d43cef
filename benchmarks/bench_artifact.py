"""A decode step of the trained small model from its artifact, against the eager step and an unfused artifact.

Graphs are called as the engine calls them, on static buffers. The unfused artifact is the same model with
every fusion switched off: what Inductor makes of the plain graph. Both are built first, or taken from the
build cache; that takes minutes and is not measured.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from bench_step import CONTEXT, MODELS, decode_rows
from harness import Line, compare

from deepinfer.compile import compile_model
from deepinfer.graphs.cache_layout import cache_layout
from deepinfer.graphs.checkpoint import Checkpoint
from deepinfer.graphs.config import load_config
from deepinfer.graphs.eager import allocate_caches, pad_rows
from deepinfer.graphs.records import PRECISIONS
from deepinfer.graphs.step import forward_step
from deepinfer.graphs.store import build_store
from deepinfer.passes.pipeline import PASSES_EXACT
from deepinfer.runtime.loader import LoadedArtifact, load_artifact
from deepinfer.settings import CompileConfig

ROWS = (1, 4, 16)
MAX_MODEL_LEN = 256
FLOOR_EAGER, FLOOR_UNFUSED = 3.0, 2.0
UNFUSED = tuple(step.name for step in PASSES_EXACT if step.name.startswith("fuse_")) + ("check_invariance",)


def run(threads: int) -> list[Line]:
    """The lines of this area."""
    with tempfile.TemporaryDirectory(prefix="deepinfer-bench-") as folder:
        loaded = {name: _built(Path(folder) / name, passes) for name, passes in _ARTIFACTS.items()}
        torch.set_num_threads(threads)  # loading sets its own
        return [line for rows in ROWS for line in _decode(loaded, rows)]


_ARTIFACTS: dict[str, tuple[str, ...]] = {"artifact": (), "unfused": UNFUSED}


def _built(target: Path, disabled: tuple[str, ...]) -> LoadedArtifact:
    options = CompileConfig(
        decode_rows=ROWS,
        prefill_tokens=(16,),
        max_num_seqs=max(ROWS),
        max_model_len=MAX_MODEL_LEN,
        taps="off",
        disabled_passes=disabled,
    )
    compile_model(MODELS["trained"], target, options, certify=False)
    return load_artifact(target)


def _decode(loaded: dict[str, LoadedArtifact], rows: int) -> list[Line]:
    folder = MODELS["trained"]
    config = load_config(folder)
    layout = cache_layout(config, "native", max_num_seqs=rows, max_model_len=MAX_MODEL_LEN)
    weights = build_store(Checkpoint(folder, config), config, MAX_MODEL_LEN, packed=False)
    inputs = decode_rows(layout, rows)
    padded, caches = pad_rows(inputs, -rows % 8, pad_table=True), allocate_caches(layout)

    def eager() -> torch.Tensor:
        with torch.no_grad():
            return forward_step(config, PRECISIONS["native"], weights, padded, caches)

    def replay(name: str) -> Callable[[], object]:
        runner = loaded[name].runner
        static = runner.inputs("decode", rows)
        for buffer, value in zip(static, inputs, strict=False):  # the regions follow
            buffer.copy_(value)
        return lambda: runner.replay("decode", rows)

    result = compare({"eager": eager, **{name: replay(name) for name in loaded}})
    label = f"decode, trained, native, {rows} rows of {CONTEXT} tokens"
    return [
        result.line(f"{label}: to eager", "artifact", "eager", floor=FLOOR_EAGER),
        result.line(f"{label}: to unfused", "artifact", "unfused", floor=FLOOR_UNFUSED),
    ]
