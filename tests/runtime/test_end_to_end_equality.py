"""Same answer always: within one artifact a request's logits have the same bytes in whatever company.

Compared are compiled graphs with themselves, by bytes, in both precisions: alone, in a crowd, in any order,
in another process, after junk in the caches, prefilled or decoded, at every place in a prefill chunk.
"""

import itertools
from pathlib import Path

import numpy as np
import pytest
from end_to_end import LENGTHS, PROMPTS, Recorder, Result, generate_isolated, greedy, make_prompt

from deepinfer.runtime.llm import LLM
from deepinfer.runtime.sampling_params import SamplingParams

COUNTS = [9, 30, 1, 14, 5, 22, 3]
PARAMS = [
    SamplingParams(max_tokens=count, ignore_eos=True, seed=count, temperature=0.7 * (index % 2))
    for index, count in enumerate(COUNTS)
]


@pytest.fixture(scope="module", params=["float32", "native"])
def artifact(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(f"{request.param}_artifact")
    return path


@pytest.fixture(scope="module")
def recorder(artifact: Path) -> Recorder:
    return Recorder(LLM(artifact, num_threads=1))


@pytest.fixture(scope="module")
def alone(recorder: Recorder) -> list[Result]:
    return recorder.alone(PROMPTS, PARAMS)


def assert_same(results: list[Result], expected: list[Result]) -> None:
    for result, other, length in zip(results, expected, LENGTHS, strict=True):
        differing = np.flatnonzero((result.logits != other.logits).any(axis=1))
        assert not len(differing), f"prompt of {length}: logits of output token {differing[0]} differ"
        assert result.digest == other.digest and result.token_ids == other.token_ids


def test_crowd_in_any_order_gives_the_bytes_of_each_alone(recorder: Recorder, alone: list[Result]) -> None:
    orders = [list(range(7)), list(range(7))[::-1], [3, 0, 6, 1, 5, 2, 4]]
    for order in orders:
        crowd = recorder.generate([PROMPTS[i] for i in order], [PARAMS[i] for i in order])
        assert_same([crowd[order.index(i)] for i in range(7)], alone)


def test_copies_of_one_request_are_identical_to_each_other(recorder: Recorder, alone: list[Result]) -> None:
    copies = recorder.generate([PROMPTS[3]] * 8, greedy(16))
    (single,) = recorder.generate([PROMPTS[3]], greedy(16))
    assert {copy.digest for copy in copies} == {single.digest}


def test_other_instance_gives_the_same_bytes(artifact: Path, alone: list[Result]) -> None:
    """Also one that runs fewer requests at a time, so that the crowd is batched in another way."""
    for max_num_seqs in (None, 3, 1):
        other = Recorder(LLM(artifact, num_threads=1, max_num_seqs=max_num_seqs))
        assert_same(other.generate(PROMPTS, PARAMS), alone)


def test_number_of_threads_does_not_matter(artifact: Path, alone: list[Result]) -> None:
    try:
        assert_same(Recorder(LLM(artifact, num_threads=2)).generate(PROMPTS, PARAMS), alone)
    finally:
        LLM(artifact, num_threads=1)  # the number is the process's


def test_other_process_gives_the_same_bytes(artifact: Path, alone: list[Result], tmp_path: Path) -> None:
    call = [
        {
            "prompt_token_ids": prompt,
            "max_tokens": own.max_tokens,
            "ignore_eos": True,
            "seed": own.seed,
            "temperature": own.temperature,
        }
        for prompt, own in zip(PROMPTS, PARAMS, strict=True)
    ]
    (crowd,) = generate_isolated(artifact, [call], tmp_path)["calls"]
    assert [result["logits"] for result in crowd] == [result.digest for result in alone]
    assert [tuple(result["token_ids"]) for result in crowd] == [result.token_ids for result in alone]


@pytest.mark.parametrize("junk", [0x00, 0x7F, 0xFF])
def test_bytes_of_earlier_owners_are_never_seen(recorder: Recorder, alone: list[Result], junk: int) -> None:
    """Every cache byte is overwritten first; 0x7F and 0xFF make NaNs of most record formats."""
    arenas = recorder.llm._loaded.arenas
    arenas.blocks.fill_(junk)
    arenas.slots.fill_(junk)
    assert_same(recorder.generate(PROMPTS, PARAMS), alone)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 48])
def test_token_gets_the_same_logits_prefilled_or_decoded(recorder: Recorder, length: int) -> None:
    """A continuation is scored again as part of longer and longer prompts, across the chunks' edges."""
    prompt = make_prompt(length, seed=1)
    (decoded,) = recorder.generate([prompt], greedy(18))
    for cut in (1, 2, 7, 14, 15, 16, 17):
        (scored,) = recorder.generate([prompt + list(decoded.token_ids[:cut])], greedy(1))
        assert np.array_equal(scored.logits[0], decoded.logits[cut]), f"position {length + cut}"


def test_place_of_a_chunk_does_not_matter(recorder: Recorder) -> None:
    """A prompt is cut into chunks of 1 to 16 rows by hand; every cut gives the same bytes."""
    prompt = make_prompt(40, seed=2)
    (expected,) = recorder.generate([prompt], greedy(6))
    scheduler = type(recorder.llm._engine.scheduler)
    for sizes in ([1], [2], [3, 5], [7], [15, 1], [16, 9, 3]):
        cycle = itertools.cycle(sizes)

        def budget(self, cycle=cycle):  # noqa: ANN001, ANN202
            return next(cycle)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scheduler, "_prefill_budget", budget)
            (result,) = recorder.generate([prompt], greedy(6))
        assert result.digest == expected.digest, f"chunks of {sizes}"


def test_later_tokens_never_reach_earlier_ones(recorder: Recorder) -> None:
    """Two prompts that differ in one token agree, to the last bit, at every position before it."""
    prompt = make_prompt(40, seed=3)
    for place in (1, 15, 16, 17, 33, 39):
        other = list(prompt)
        other[place] = (other[place] + 101) % 400 + 3
        one = prefill_hidden(recorder, prompt)
        two = prefill_hidden(recorder, other)
        assert np.array_equal(one[:place], two[:place]) and not np.array_equal(one[place], two[place])


def prefill_hidden(recorder: Recorder, prompt: list[int]) -> np.ndarray:
    """Hidden rows [tokens, D] of every position of a prompt, as the prefill graph makes them."""
    runner = recorder.llm._engine.runner
    original, rows = runner.replay, []

    def replay(phase: str, bucket: int):  # noqa: ANN202
        outputs = original(phase, bucket)
        if phase == "prefill":
            used = int((runner._buffers[phase, bucket].positions >= 0).sum())
            rows.append(outputs[0][:used].float().numpy().copy())
        return outputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "replay", replay)
        recorder.generate([prompt], greedy(1))
    return np.concatenate(rows)
