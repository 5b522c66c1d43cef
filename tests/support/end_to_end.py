"""What tests of a whole artifact share: prompts, recorded logits, a copy of the tree's state, a bare process.

Imports nothing that compiles, since the bare process uses it too.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.runtime.llm import LLM
from deepinfer.runtime.request import Batch
from deepinfer.runtime.sampling_params import SamplingParams

LENGTHS = (1, 2, 3, 17, 33, 60, 100)  # below, at and above window, compression ratio and prefill bucket
VOCAB = 512
END_TOKEN, IMAGE_TOKEN = 1, 500
SUPPORT = Path(__file__).parent


def make_prompt(length: int, seed: int = 0) -> list[int]:
    """A prompt of ordinary tokens; another seed gives another one."""
    return np.random.default_rng(1000 * seed + length).integers(3, IMAGE_TOKEN, length).tolist()


PROMPTS = [make_prompt(length) for length in LENGTHS]


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    """Parameters that make exactly `max_tokens` tokens."""
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, **options)


@dataclass(frozen=True)
class Result:
    """What one request gave: its tokens and the logits [tokens, vocab] each was drawn from."""

    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: int | str | None
    text: str | None
    seed: int
    logits: NDArray[np.float32]

    @property
    def digest(self) -> str:
        """SHA-256 of the logits' bytes."""
        return hashlib.sha256(self.logits.tobytes()).hexdigest()


class Recorder:
    """Generates with an LLM and keeps the logits of every request."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._rows: dict[str, list[NDArray[np.float32]]] = {}
        self._run = llm._engine.runner.run
        llm._engine.runner.run = self._record  # type: ignore[method-assign]

    def _record(self, batch: Batch) -> Tensor:
        logits = self._run(batch)
        for request, row in zip(batch.sampled_requests, logits.numpy(), strict=True):
            self._rows.setdefault(request.request_id, []).append(row.copy())
        return logits

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Result]:
        """All prompts together; results in the order of the prompts."""
        self._rows.clear()
        outputs = self.llm.generate(list(prompts), params, use_tqdm=False)
        return [
            Result(
                output.outputs[0].token_ids,
                output.outputs[0].finish_reason,
                output.outputs[0].stop_reason,
                output.outputs[0].text,
                output.seed,
                np.stack(self._rows[output.request_id]),
            )
            for output in outputs
        ]

    def alone(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Result]:
        """Every prompt in a call of its own."""
        return [self.generate([prompt], own)[0] for prompt, own in zip(prompts, params, strict=True)]


def resident_bytes() -> int:
    """Memory of this process that is anonymous and resident: what a leak would grow."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the system does not say")


def tree_state(directory: Path) -> dict[str, tuple[int, int, int]]:
    """Size, change time and mode of everything below a directory: equal if nothing was touched."""
    entries = [directory, *directory.rglob("*")]
    return {
        str(path): (path.stat().st_size, path.stat().st_mtime_ns, path.stat().st_mode) for path in entries
    }


def bare_environment(tmp_path: Path) -> dict[str, str]:
    """The environment of a process that finds no program at all, with a temporary folder of its own."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    (tmp_path / "tmp").mkdir(exist_ok=True)
    kept = {name: os.environ[name] for name in ("HOME", "XDG_CONFIG_HOME") if name in os.environ}
    return {
        **kept,
        "PATH": str(tmp_path / "bin"),
        "TMPDIR": str(tmp_path / "tmp"),
        "PYTHONPATH": str(SUPPORT),
        "OMP_NUM_THREADS": "1",
        "LC_ALL": "C.UTF-8",
    }


def generate_isolated(
    artifact: Path, calls: Sequence[Sequence[dict[str, Any]]], tmp_path: Path
) -> dict[str, Any]:
    """The answer of isolated_generate.py, which see."""
    done = subprocess.run(
        [sys.executable, "-P", str(SUPPORT / "isolated_generate.py")],
        input=json.dumps({"artifact": str(artifact), "calls": calls}),
        env=bare_environment(tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "tmp").iterdir()), "temporary files are left"
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
