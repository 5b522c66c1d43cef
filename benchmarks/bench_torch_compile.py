"""The artifact against `torch.compile(mode="reduce-overhead")` of the plain eager step, in one process.

A decode step of one request of the trained small model; then what stands before the first step: loading the
artifact here, there tracing and compiling with empty caches ("cold") and with full ones ("warm").
"""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from bench_step import CONTEXT, MODELS, decode_rows
from harness import Line, compare

from deepinfer.compile import compile_model
from deepinfer.graphs.cache_layout import cache_layout
from deepinfer.graphs.checkpoint import Checkpoint
from deepinfer.graphs.config import load_config
from deepinfer.graphs.eager import allocate_caches
from deepinfer.graphs.records import PRECISIONS
from deepinfer.graphs.step import forward_step
from deepinfer.graphs.store import build_store
from deepinfer.runtime.loader import LoadedArtifact, load_artifact
from deepinfer.settings import CompileConfig

MAX_MODEL_LEN = 256
FLOOR_STEP, FLOOR_COLD, FLOOR_WARM = 1.3, 150.0, 30.0


def run(threads: int) -> list[Line]:
    """The lines of this area."""
    with tempfile.TemporaryDirectory(prefix="deepinfer-bench-") as name:
        folder = Path(name)
        options = CompileConfig(
            decode_rows=(1,), prefill_tokens=(16,), max_num_seqs=1, max_model_len=MAX_MODEL_LEN, taps="off"
        )
        compile_model(MODELS["trained"], folder / "artifact", options, certify=False)
        step = _plain_step()
        loaded, ours = _seconds(lambda: _load(folder / "artifact"))
        torch.set_num_threads(threads)  # loading sets its own
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
        compiled, cold = _seconds(lambda: _compiled(step))
        _, warm = _seconds(lambda: _compiled(step))
        lines = [_against(loaded, compiled)]
        if threads == 1:  # a process that has compiled before is not cold
            lines += [_start("cold", ours, cold, FLOOR_COLD), _start("warm", ours, warm, FLOOR_WARM)]
        return lines


def _plain_step() -> Callable[[], torch.Tensor]:
    folder = MODELS["trained"]
    config = load_config(folder)
    layout = cache_layout(config, "native", max_num_seqs=1, max_model_len=MAX_MODEL_LEN)
    weights = build_store(Checkpoint(folder, config), config, MAX_MODEL_LEN, packed=False)
    inputs, caches = decode_rows(layout, 1), allocate_caches(layout)

    def step() -> torch.Tensor:
        return forward_step(config, PRECISIONS["native"], weights, inputs, caches)

    return step


def _compiled(step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Compiled anew, and called once."""
    torch._dynamo.reset()
    compiled = torch.compile(step, mode="reduce-overhead")
    with torch.no_grad():
        compiled()
    return compiled


def _load(folder: Path) -> LoadedArtifact:
    """Loaded, and one step run."""
    loaded = load_artifact(folder)
    _replay(loaded)()
    return loaded


def _replay(loaded: LoadedArtifact) -> Callable[[], object]:
    config = load_config(MODELS["trained"])
    layout = cache_layout(config, "native", max_num_seqs=1, max_model_len=MAX_MODEL_LEN)
    static = loaded.runner.inputs("decode", 1)
    for buffer, value in zip(static, decode_rows(layout, 1), strict=False):  # the regions follow
        buffer.copy_(value)
    return lambda: loaded.runner.replay("decode", 1)


def _against(loaded: LoadedArtifact, compiled: Callable[[], torch.Tensor]) -> Line:
    def theirs() -> torch.Tensor:
        with torch.no_grad():
            return compiled()

    result = compare({"artifact": _replay(loaded), "torch.compile": theirs})
    label = f"decode, trained, native, 1 row of {CONTEXT} tokens: to torch.compile"
    return result.line(label, "artifact", "torch.compile", floor=FLOOR_STEP)


def _start(kind: str, ours: float, theirs: float, floor: float) -> Line:
    ratio = theirs / ours
    detail = f"artifact {ours * 1e3:.0f} ms, torch.compile {theirs:.1f} s"
    return Line(
        f"first step after start, {kind} caches: to torch.compile", ratio, ratio, ratio, floor, detail
    )


def _seconds(call: Callable[[], object]) -> tuple[object, float]:
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start
