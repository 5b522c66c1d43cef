"""Same answer always, across buckets: one artifact with several graphs per phase, used in all ways.

Slow: a dozen graphs are compiled, though of a two-layer model. The engine chooses buckets by the number of
rows, so a request that is alone runs through other graphs than in a crowd; its bytes must not show it.
"""

import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from end_to_end import Recorder, Result, greedy
from tiny_checkpoint import write_tiny_checkpoint

from deepinfer.compile import compile_model
from deepinfer.runtime.llm import LLM
from deepinfer.settings import CompileConfig

pytestmark = pytest.mark.slow

DECODE, PREFILL, LOGITS = (1, 2, 4), (8, 16), (1, 2, 4)
LENGTHS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 24, 25, 33)
PROMPTS = [np.random.default_rng(length).integers(3, 64, length).tolist() for length in LENGTHS]
PARAMS = [greedy(4 + 3 * (index % 5)) for index in range(len(LENGTHS))]


@pytest.fixture(scope="module", params=["float32", "native"])
def artifact(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    build_cache_dir: Path | None,
) -> Path:
    folder = tmp_path_factory.mktemp(f"buckets-{request.param}")
    model = write_tiny_checkpoint(folder / "model")
    config = CompileConfig(
        precision=request.param,
        decode_rows=DECODE,
        prefill_tokens=PREFILL,
        logits_rows=LOGITS,
        max_model_len=64,
        max_num_seqs=4,
    )
    compile_model(model, folder / "out", config, cache_dir=build_cache_dir)
    return folder / "out"


@pytest.fixture(scope="module")
def expected(artifact: Path) -> list[Result]:
    """Each prompt alone, with buckets chosen freely."""
    return Recorder(LLM(artifact, num_threads=1)).alone(PROMPTS, PARAMS)


def restricted(artifact: Path, decode: tuple[int, ...], prefill: tuple[int, ...]) -> Recorder:
    """An engine that sees some of the buckets only."""
    llm = LLM(artifact, num_threads=1)
    limits = dataclasses.replace(
        llm.limits,
        decode_buckets=decode,
        prefill_buckets=prefill,
        logits_buckets=tuple(rows for rows in LOGITS if rows in decode),
    )
    llm._engine.runner.limits = limits
    llm._engine.scheduler.limits = limits
    return Recorder(llm)


def assert_same(results: list[Result], expected: list[Result], what: object) -> None:
    for result, other, length in zip(results, expected, LENGTHS, strict=True):
        assert result.token_ids == other.token_ids, (what, length)
        differing = np.flatnonzero((result.logits != other.logits).any(axis=1))
        assert not len(differing), f"{what}: prompt of {length}, output tokens {differing.tolist()} differ"


def test_crowd_uses_other_buckets_and_gives_the_same_bytes(artifact: Path, expected: list[Result]) -> None:
    recorder = Recorder(LLM(artifact, num_threads=1))
    used: Counter[str] = Counter()
    runner = recorder.llm._engine.runner
    original = runner.replay

    def replay(phase: str, bucket: int):  # noqa: ANN202
        used[f"{phase}-{bucket}"] += 1
        return original(phase, bucket)

    runner.replay = replay  # type: ignore[method-assign]
    assert_same(recorder.generate(PROMPTS, PARAMS), expected, "crowd")
    assert_same(recorder.generate(PROMPTS[::-1], PARAMS[::-1])[::-1], expected, "reversed crowd")
    pairs = [recorder.generate(PROMPTS[i : i + 2], PARAMS[i : i + 2]) for i in range(0, len(PROMPTS), 2)]
    assert_same([result for pair in pairs for result in pair], expected, "pairs")
    wanted = {f"decode-{rows}" for rows in DECODE} | {f"prefill-{rows}" for rows in PREFILL}
    assert set(used) == wanted, "some bucket was never used, so nothing was compared"


@pytest.mark.parametrize("decode", [(1,), (2,), (4,)])
@pytest.mark.parametrize("prefill", [(8,), (16,)])
def test_every_pair_of_buckets_gives_the_same_bytes(
    artifact: Path, expected: list[Result], decode: tuple[int, ...], prefill: tuple[int, ...]
) -> None:
    recorder = restricted(artifact, decode, prefill)
    assert_same(recorder.alone(PROMPTS, PARAMS), expected, ("alone", decode, prefill))
    assert_same(recorder.generate(PROMPTS, PARAMS), expected, ("crowd", decode, prefill))


def test_decoded_and_prefilled_tokens_agree_across_buckets(artifact: Path, expected: list[Result]) -> None:
    """A continuation made by one pair of buckets is scored by the other prefill bucket."""
    for prefill in (8, 16):
        recorder = restricted(artifact, (1,), (prefill,))
        for prompt, result in zip(PROMPTS, expected, strict=True):
            cut = len(result.token_ids) - 1
            (scored,) = recorder.generate([prompt + list(result.token_ids[:cut])], greedy(1))
            assert np.array_equal(scored.logits[0], result.logits[cut])
