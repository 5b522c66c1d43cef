"""`LLM.generate` over fake graphs: forms of prompts, order of results, text, refusal, recovery."""

import math
import threading
from pathlib import Path

import pytest
import torch
from fake_artifact import OpenedFakes, write_artifact
from fake_graphs import EOS, expected_tokens

from deepinfer.artifacts import TrustStore
from deepinfer.errors import RequestError, UsageError
from deepinfer.runtime import loader
from deepinfer.runtime.llm import LLM
from deepinfer.runtime.sampling_params import SamplingParams

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options: object) -> LLM:
    monkeypatch.setattr(loader.CompiledGraph, "open", OpenedFakes().open)
    store = TrustStore(tmp_path / "trust")
    tokenizer = {"tokenizer": options.pop("tokenizer")} if "tokenizer" in options else {}
    store.trust(write_artifact(tmp_path / "out", **tokenizer))
    return LLM(tmp_path / "out", num_threads=1, trust_store=store, **options)


@pytest.fixture
def llm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LLM:
    return load(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "prompts",
    [
        "w3 w4 w5",
        [3, 4, 5],
        ["w3 w4 w5"],
        [[3, 4, 5]],
        {"prompt": "w3 w4 w5"},
        [{"prompt_token_ids": [3, 4, 5]}],
    ],
)
def test_every_form_of_a_prompt_gives_the_same(llm: LLM, prompts: object) -> None:
    (output,) = llm.generate(prompts, GREEDY)
    tokens = expected_tokens([3, 4, 5], GREEDY, 0)
    assert output.prompt_token_ids == (3, 4, 5)
    assert output.outputs[0].token_ids == tuple(tokens)
    assert output.outputs[0].text == "".join(f" w{token}" for token in tokens if token != 1)
    assert (output.outputs[0].finish_reason, output.outputs[0].index, output.finished) == ("length", 0, True)
    assert set(output.timing_seconds) == {"queue", "first_token", "decode", "total"}
    assert output.prompt == ("w3 w4 w5" if "w3" in str(prompts) else None)


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["w2", [30] * 40, {"prompt": "w9 w8"}, [7, 7, 7]]
    params = [SamplingParams(max_tokens=n, seed=n, ignore_eos=True) for n in (9, 2, 1, 14)]
    outputs = llm.generate(prompts, params)
    for output, ids, own in zip(outputs, ([2], [30] * 40, [9, 8], [7, 7, 7]), params, strict=True):
        assert output.prompt_token_ids == tuple(ids)
        assert output.outputs[0].token_ids == tuple(expected_tokens(ids, own, own.seed))
        assert output.seed == own.seed
    assert llm.generate([], GREEDY) == []


def test_place_in_the_list_does_not_matter_with_one_seed_for_all(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, seed=42, ignore_eos=True)
    prompts = [[5], [6], [7], [5]]
    together = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    alone = [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts]
    assert together == alone and together[0] == together[3]


def test_text_ends_before_the_token_that_stopped_it(llm: LLM) -> None:
    tokens = expected_tokens([3, 4, 5], GREEDY, 0)
    stop = tokens[2]
    (output,) = llm.generate([3, 4, 5], SamplingParams(temperature=0, ignore_eos=True, stop_token_ids=[stop]))
    made = output.outputs[0].token_ids
    assert made[-1] == stop == output.outputs[0].stop_reason
    assert output.outputs[0].text == "".join(f" w{token}" for token in made[:-1] if token != 1)


@pytest.mark.parametrize(
    ("prompts", "params"),
    [
        ("", GREEDY),
        ([""], GREEDY),
        ([[]], GREEDY),
        ([[3], [50]], GREEDY),
        ([[3], [49]], GREEDY),
        ([[3], [-1]], GREEDY),
        ([[3], [3] * 60], GREEDY),
        ([3, 1.5], GREEDY),
        ([3, True], GREEDY),
        ([3, "w4"], GREEDY),
        ([None], GREEDY),
        (None, GREEDY),
        (7, GREEDY),
        (b"w3", GREEDY),
        ({"prompt": "w3", "prompt_token_ids": [3]}, GREEDY),
        ({"prompt": 3}, GREEDY),
        ({"text": "w3"}, GREEDY),
        ({}, GREEDY),
        ({"prompt_token_ids": "345"}, GREEDY),
        ("\ud800", GREEDY),
        ([[3], [4]], [GREEDY]),
        ([3], {"temperature": 0}),
        ([3], [None]),
        ("w3 " * 3000, GREEDY),
    ],
)
def test_what_cannot_be_served_is_refused_before_any_work(llm: LLM, prompts: object, params: object) -> None:
    with pytest.raises(RequestError):
        llm.generate(prompts, params)
    assert llm.counters["tokens"] == 0 and not llm._engine.has_work


def test_text_is_never_cut_though_the_tokenizer_file_asks_for_it(llm: LLM) -> None:
    (output,) = llm.generate("w2 w3 w4 w5 w6", GREEDY)
    assert output.prompt_token_ids == (2, 3, 4, 5, 6)


def test_artifact_without_tokenizer_takes_token_ids_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = load(tmp_path, monkeypatch, tokenizer=None)
    with pytest.raises(RequestError, match="prompt_token_ids"):
        llm.generate("w3", GREEDY)
    (output,) = llm.generate([3], GREEDY)
    assert output.outputs[0].text is None and len(output.outputs[0].token_ids) == 6


def test_interrupt_leaves_the_object_usable(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, calls = llm._engine.runner, []
    original = runner.run

    def interrupted(batch):  # noqa: ANN001, ANN202
        calls.append(batch)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return original(batch)

    monkeypatch.setattr(runner, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[3] * 30, [4], [5]], GREEDY)
    assert not llm._engine.has_work
    llm._engine.scheduler.check_integrity()
    assert llm._engine.scheduler.blocks.num_free == llm._engine.scheduler.blocks.capacity
    (output,) = llm.generate([3, 4, 5], GREEDY)
    assert output.outputs[0].token_ids == tuple(expected_tokens([3, 4, 5], GREEDY, 0))


def test_threads_may_call_generate_at_once(llm: LLM) -> None:
    results: dict[int, tuple] = {}

    def work(token: int) -> None:
        results[token] = llm.generate([token], GREEDY)[0].outputs[0].token_ids

    threads = [threading.Thread(target=work, args=(token,)) for token in range(2, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {token: tuple(expected_tokens([token], GREEDY, 0)) for token in range(2, 10)}


def test_counters_show_work_and_no_compiling(llm: LLM) -> None:
    llm.generate([[3] * 20, [4]], GREEDY)
    counters = llm.counters
    assert (counters["prefill_rows"], counters["tokens"]) == (21, 12)
    assert counters["compiler_modules_imported"] == counters["child_processes_seen"] == 0
    assert "verify" in llm.load_summary and torch.get_num_threads() == 1


def test_fewer_requests_at_a_time_change_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load(tmp_path, monkeypatch, max_num_seqs=1)
    outputs = llm.generate([[5], [6], [7]], GREEDY)
    assert [list(o.outputs[0].token_ids) for o in outputs] == [
        expected_tokens([t], GREEDY, 0) for t in (5, 6, 7)
    ]
    assert llm.limits.num_slots == 2 and llm.counters["decode_rows"] == llm.counters["decode_steps"]


@pytest.mark.parametrize("options", [{"max_num_seqs": 0}, {"max_num_seqs": 5}, {"max_num_seqs": True}])
def test_impossible_number_of_requests_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict
) -> None:
    with pytest.raises(UsageError, match="max_num_seqs"):
        load(tmp_path, monkeypatch, **options)


def test_output_holds_logprobs_and_their_sum(llm: LLM) -> None:
    """SPN-16, ROW-11."""
    params = [
        SamplingParams(max_tokens=5, seed=2, temperature=0.5, ignore_eos=True, logprobs=3, logprobs_mode=mode)
        for mode in ("processed", "raw")
    ]
    processed, raw = [output.outputs[0] for output in llm.generate([[3, 4]] * 2, params)]
    assert processed.token_ids == raw.token_ids and processed.logprobs != raw.logprobs
    for completion, mode in ((processed, "processed"), (raw, "raw")):
        assert completion.logprobs is not None and completion.logprobs_mode == mode
        own = [
            entry[token].logprob
            for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)
        ]
        assert completion.cumulative_logprob == sum(own)
        assert all(math.isfinite(value) and value <= 0 for value in own)
        assert all({1, 2, 3} <= {one.rank for one in entry.values()} for entry in completion.logprobs)
    (plain,) = llm.generate([[3, 4]], SamplingParams(max_tokens=5, seed=2, temperature=0.5, ignore_eos=True))
    assert plain.outputs[0].token_ids == processed.token_ids
    assert (plain.outputs[0].logprobs, plain.outputs[0].cumulative_logprob) == (None, None)


def test_bad_words_as_text_are_those_of_the_tokenizer(llm: LLM) -> None:
    options = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    tokens = expected_tokens([3, 4, 5], SamplingParams(**options), 0)
    word = next(token for token in tokens if token != EOS)
    as_text, as_ids = llm.generate(
        [[3, 4, 5]] * 2,
        [SamplingParams(bad_words=[f"w{word}"], **options), SamplingParams(bad_words=[[word]], **options)],
    )
    assert as_text.outputs[0].token_ids == as_ids.outputs[0].token_ids
    assert word not in as_text.outputs[0].token_ids


def test_bad_words_as_text_need_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load(tmp_path, monkeypatch, tokenizer=None)
    with pytest.raises(RequestError) as caught:
        llm.generate([[3]], SamplingParams(bad_words=["w7"]))
    assert caught.value.where == "bad_words"
