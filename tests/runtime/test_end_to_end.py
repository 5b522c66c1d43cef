"""From a real artifact to tokens, in a process that has neither model code nor a compiler within reach."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from end_to_end import LENGTHS, PROMPTS, Recorder, generate_isolated, greedy, make_prompt, tree_state

from deepinfer.graphs.eager import EagerModel, single_request_inputs
from deepinfer.graphs.rows import StepInputs
from deepinfer.runtime.llm import LLM
from deepinfer.runtime.sampling_params import SamplingParams

MAX_TOKENS = 64
SHORTER = [21, 64, 5, 34, 1, 50, 16]  # max_tokens of a crowd whose members leave at different times


def eager_continuations(model_dir: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy tokens of the eager model: each prompt prefilled at once, then all decoded side by side."""
    model = EagerModel.load(model_dir, "float32", max_model_len=256, max_num_seqs=len(prompts))
    width = model.layout.max_blocks_per_request
    table = 1 + torch.arange(len(prompts) * width).view(-1, width)
    slots = 1 + torch.arange(len(prompts))
    first = []
    for line, prompt in enumerate(prompts):
        hidden = model.step("prefill", single_request_inputs(prompt, 0, table[line], int(slots[line])))
        first.append(model.logits(hidden[-1:]).argmax(dim=1))
    tokens = [torch.cat(first)]  # argmax takes the lowest id among equals
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    lines = torch.arange(len(prompts))
    for made in range(count - 1):
        positions = lengths + made
        inputs = StepInputs(
            token_ids=tokens[-1],
            positions=positions,
            request_index=lines,
            block_table=table,
            slot_ids=slots,
            num_computed_tokens=positions,
            row_starts=lines,
            row_counts=torch.ones_like(lines),
        )
        tokens.append(model.logits(model.step("decode", inputs)).argmax(dim=1))
    continuations: list[list[int]] = torch.stack(tokens, dim=1).tolist()
    return continuations


def request(prompt: list[int], **params: Any) -> dict[str, Any]:
    return {"prompt_token_ids": prompt, "ignore_eos": True, **params}


def sampled(prompt: list[int], seed: int) -> dict[str, Any]:
    return request(prompt, temperature=0.7, seed=seed, max_tokens=12)


@pytest.fixture(scope="module")
def continuations(golden_dir: Path) -> list[list[int]]:
    return eager_continuations(golden_dir, PROMPTS, MAX_TOKENS)


@pytest.fixture(scope="module")
def bare(float32_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a bare process generates: each prompt alone, all in a crowd, and with seeds."""
    before = tree_state(float32_artifact)
    calls = [[request(prompt, temperature=0, max_tokens=MAX_TOKENS)] for prompt in PROMPTS]
    calls.append(
        [request(prompt, temperature=0, max_tokens=n) for prompt, n in zip(PROMPTS, SHORTER, strict=True)]
    )
    calls.append([sampled(prompt, seed=7 + index) for index, prompt in enumerate(PROMPTS)])
    answer = generate_isolated(float32_artifact, calls, tmp_path_factory.mktemp("bare"))
    assert tree_state(float32_artifact) == before, "something was written into the artifact"
    return answer


@pytest.fixture(scope="module")
def recorder(float32_artifact: Path) -> Recorder:
    return Recorder(LLM(float32_artifact, num_threads=1))


@pytest.mark.parametrize("index", range(len(LENGTHS)), ids=[f"length{length}" for length in LENGTHS])
def test_bare_process_reproduces_the_eager_greedy_continuation(
    bare: dict[str, Any], continuations: list[list[int]], index: int
) -> None:
    (result,) = bare["calls"][index]
    assert result["token_ids"] == continuations[index]
    assert len(result["token_ids"]) == MAX_TOKENS and result["finish_reason"] == "length"


def test_crowd_of_mixed_lengths_gives_each_what_it_gets_alone(
    bare: dict[str, Any], continuations: list[list[int]]
) -> None:
    crowd = bare["calls"][len(PROMPTS)]
    assert [result["token_ids"] for result in crowd] == [
        tokens[:count] for tokens, count in zip(continuations, SHORTER, strict=True)
    ]


def test_bare_process_compiled_nothing_and_started_nothing(bare: dict[str, Any]) -> None:
    assert bare["guards_hold"] and bare["refused"] == [] and bare["compiler_modules"] == []
    for counts in (bare["counters"], bare["load_counts"]):
        assert counts["compiler_modules_imported"] == counts["child_processes_seen"] == 0
    assert bare["counters"]["tokens"] == MAX_TOKENS * len(PROMPTS) + sum(SHORTER) + 12 * len(PROMPTS)


def test_continuations_are_worth_comparing(continuations: list[list[int]]) -> None:
    """A model that says one token for ever would pass any comparison."""
    assert all(len(set(tokens)) >= 5 for tokens in continuations)
    assert len({tuple(tokens) for tokens in continuations}) == len(continuations)


def test_seed_gives_the_same_tokens_alone_in_a_crowd_and_after_a_restart(
    bare: dict[str, Any], recorder: Recorder
) -> None:
    params = [
        SamplingParams(temperature=0.7, seed=7 + index, max_tokens=12, ignore_eos=True)
        for index in range(len(PROMPTS))
    ]
    alone = recorder.alone(PROMPTS, params)
    crowd = recorder.generate(PROMPTS[::-1], params[::-1])[::-1]
    for one, other, restarted in zip(alone, crowd, bare["calls"][-1], strict=True):
        assert one.token_ids == other.token_ids == tuple(restarted["token_ids"])
        assert one.digest == other.digest == restarted["logits"]


def test_other_seeds_give_other_tokens_and_a_drawn_seed_is_recorded(recorder: Recorder) -> None:
    prompt = make_prompt(5)
    by_seed = {
        seed: recorder.generate([prompt], SamplingParams(temperature=0.7, seed=seed, ignore_eos=True))[0]
        for seed in (0, 1, 2**64 - 1)
    }
    assert len({result.token_ids for result in by_seed.values()}) == 3
    assert {seed: result.seed for seed, result in by_seed.items()} == {seed: seed for seed in by_seed}
    drawn = recorder.generate([prompt, prompt], SamplingParams(temperature=0.7, ignore_eos=True))
    assert drawn[0].seed != drawn[1].seed and drawn[0].token_ids != drawn[1].token_ids
    for result in drawn:
        params = SamplingParams(temperature=0.7, seed=result.seed, ignore_eos=True)
        assert recorder.generate([prompt], params)[0].token_ids == result.token_ids


def test_stop_tokens_and_length_end_a_request_at_the_right_token(recorder: Recorder) -> None:
    prompt = make_prompt(17)
    (free,) = recorder.generate([prompt], greedy(24))
    stop = free.token_ids[9]
    first = free.token_ids.index(stop)
    stopped, last, short = recorder.generate(
        [prompt, prompt, prompt],
        [greedy(24, stop_token_ids=[stop]), greedy(first + 1, stop_token_ids=[stop]), greedy(first)],
    )
    for result in (stopped, last):  # also as the very last token allowed, a stop token wins over the length
        assert (result.finish_reason, result.stop_reason) == ("stop", stop)
        assert result.token_ids == free.token_ids[: first + 1]
        assert result.text is not None and free.text is not None and free.text.startswith(result.text)
    assert (short.finish_reason, short.stop_reason) == ("length", None) and len(short.token_ids) == first


def test_end_token_of_the_model_ends_a_request_unless_ignored(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's end token is given a huge logit from the fourth token on."""
    runner = recorder.llm._engine.runner
    original, end = runner._graphs["logits-4"], recorder.llm.limits.eos_token_ids[0]
    calls: list[int] = []

    class Wishful:
        def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            logits = original.run(inputs)[0].clone()
            calls.append(len(calls))
            if len(calls) % 8 == 4:
                logits[:, end] = 1e9
            return [logits]

    monkeypatch.setitem(runner._graphs, "logits-4", Wishful())
    (stopped,) = recorder.generate([make_prompt(3)], SamplingParams(max_tokens=8, temperature=0))
    assert (stopped.finish_reason, stopped.stop_reason, len(stopped.token_ids)) == ("stop", None, 4)
    assert stopped.token_ids[-1] == end
    calls.clear()
    (ignored,) = recorder.generate([make_prompt(3)], greedy(8))
    assert (ignored.finish_reason, len(ignored.token_ids)) == ("length", 8) and end in ignored.token_ids


def test_request_without_numbers_ends_alone(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not-a-number logits in one row end that row's request; its neighbours and successors are unharmed."""
    prompts, params = PROMPTS[:4], [greedy(8) for _ in range(4)]
    expected = recorder.generate(prompts, params)
    runner = recorder.llm._engine.runner
    original = runner._graphs["logits-4"]
    counts, poisoned = recorder.llm._engine.counts, []
    third = counts["decode_steps"] + 2

    class Poisoned:
        def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            logits = original.run(inputs)[0].clone()
            if counts["decode_steps"] == third and not poisoned:
                poisoned.append(True)
                logits[1, 5] = float("nan")
            return [logits]

    monkeypatch.setitem(runner._graphs, "logits-4", Poisoned())
    results = recorder.generate(prompts, params)
    monkeypatch.undo()
    broken = [index for index, result in enumerate(results) if result.finish_reason == "error"]
    assert len(broken) == 1
    (bad,) = broken
    assert results[bad].stop_reason == "numerical_error"
    assert results[bad].token_ids == expected[bad].token_ids[:3]
    for index in set(range(4)) - {bad}:
        assert results[index].token_ids == expected[index].token_ids
        assert results[index].digest == expected[index].digest
    again = recorder.generate(prompts, params)
    assert [result.digest for result in again] == [result.digest for result in expected]


def test_summary_of_loading_names_every_part(recorder: Recorder) -> None:
    summary = recorder.llm.load_summary
    for part in ("verify", "op library", "weights", "graphs", "caches", "tokenizer", "total"):
        assert part in summary
    assert "compiler_modules_imported: 0" in summary and "child_processes_seen: 0" in summary
    assert json.dumps(recorder.llm.counters) and np.isfinite(recorder.llm.counters["tokens"])
