"""`LLM.stream`, `score` and `chat` over fake graphs: the same results as `generate`, piece by piece."""

import math
from pathlib import Path

import pytest
from fake_artifact import OpenedFakes, write_artifact
from fake_graphs import expected_tokens

from deepinfer.artifacts import TrustStore
from deepinfer.errors import RequestError
from deepinfer.runtime import loader
from deepinfer.runtime.llm import LLM
from deepinfer.runtime.output_collector import merged
from deepinfer.runtime.outputs import RequestOutput
from deepinfer.runtime.sampling_params import SamplingParams

PROMPTS = ["w3 w4 w5", [7, 8], "w9"]


@pytest.fixture
def llm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LLM:
    monkeypatch.setattr(loader.CompiledGraph, "open", OpenedFakes().open)
    store = TrustStore(tmp_path / "trust")
    store.trust(write_artifact(tmp_path / "out"))
    return LLM(tmp_path / "out", num_threads=1, trust_store=store)


def sampled(**options: object) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 9, "seed": 3, "ignore_eos": True, "logprobs": 1} | options))


def parts(output: RequestOutput) -> list[tuple]:
    return [(own.text, own.token_ids, own.logprobs, own.spans, own.finish_reason) for own in output.outputs]


@pytest.mark.parametrize("options", [{}, {"n": 2}, {"stop": ["4", "w12 w"]}])
def test_pieces_in_sum_are_what_generate_returns(llm: LLM, options: dict) -> None:
    whole = llm.generate(PROMPTS, sampled(**options))
    pieces: dict[str, list[RequestOutput]] = {}
    for output in llm.stream(PROMPTS, sampled(**options)):
        pieces.setdefault(output.request_id, []).append(output)
    assert sorted(pieces) == ["0", "1", "2"]
    for index, expected in enumerate(whole):
        joined = merged(pieces[str(index)])
        assert parts(joined) == parts(expected) and joined.usage == expected.usage
        assert [piece.finished for piece in pieces[str(index)]].count(True) == 1
        assert len(pieces[str(index)]) > 1 or "stop" in options


def test_leaving_a_stream_ends_its_requests(llm: LLM) -> None:
    for _ in llm.stream(PROMPTS, sampled(max_tokens=40)):
        break
    (after,) = llm.generate([[3, 4, 5]], sampled())
    assert list(after.outputs[0].token_ids) == expected_tokens([3, 4, 5], sampled(), 3)
    assert llm._engine.scheduler.blocks.num_used == 0


def test_a_stream_that_nobody_reads_holds_nothing(llm: LLM) -> None:
    unread = [llm.stream([[5, 6, 7]] * 3, SamplingParams(max_tokens=40, ignore_eos=True)) for _ in range(2)]
    assert not llm._engine.has_work
    del unread
    assert not llm._engine.has_work


def test_other_calls_go_on_while_a_stream_is_open(llm: LLM) -> None:
    stream = llm.stream(PROMPTS, sampled())
    seen = [next(stream)]
    (between,) = llm.generate([[3, 4, 5]], sampled())
    assert list(between.outputs[0].token_ids) == expected_tokens([3, 4, 5], sampled(), 3)
    seen += stream
    whole = llm.generate(PROMPTS, sampled())
    for index, expected in enumerate(whole):
        own = [output for output in seen if output.request_id == str(index)]
        assert parts(merged(own)) == parts(expected)


def test_a_stream_refuses_at_once_what_cannot_be_served(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"prompts\[1\]"):
        llm.stream([[3], []], sampled())
    assert not llm._engine.has_work


def test_a_stop_string_across_tokens_ends_the_text(llm: LLM) -> None:
    tokens = expected_tokens([3, 4, 5], sampled(), 3)
    free = llm.generate([[3, 4, 5]], sampled())[0].outputs[0]
    assert free.text is not None
    stop = free.text[6:11]  # from within one word into the next
    assert " " in stop.strip()
    (output,) = llm.generate([[3, 4, 5]], sampled(stop=stop))
    answer = output.outputs[0]
    assert answer.text == free.text[: free.text.index(stop)] and answer.stop_reason == stop
    assert list(answer.token_ids) == tokens[: len(answer.token_ids)] and len(answer.token_ids) < len(tokens)


def test_a_score_is_the_logprob_of_each_token_and_texts_join_to_the_text(llm: LLM) -> None:
    """Decoding and scoring agree: a drawn token scores what its own log-probability said."""
    params = sampled(logprobs=0, logprobs_mode="raw", temperature=1.0)
    answer = llm.generate([[3, 4, 5]], params)[0].outputs[0]
    assert answer.logprobs is not None
    text, ids = llm.score(["w3 w4 w5 w6", [3, 4, 5, *answer.token_ids]])
    assert text.texts is not None and "".join(text.texts) == "w3 w4 w5 w6"
    assert text.logprobs[0] is None and len(text.logprobs) == 4
    for value, token, entry in zip(ids.logprobs[3:], answer.token_ids, answer.logprobs, strict=True):
        assert value == pytest.approx(entry[token].logprob, abs=1e-6)
    assert ids.total_logprob == pytest.approx(sum(value for value in ids.logprobs if value is not None))
    assert all(math.isfinite(value) and value <= 0 for value in ids.logprobs[1:] if value is not None)
    assert llm.counters["tokens"] == len(answer.token_ids)


def test_results_say_what_they_depend_on(llm: LLM) -> None:
    """Everything that is known, and the seed in use."""
    (output,) = llm.generate([[3]], SamplingParams(max_tokens=2))
    told = output.provenance
    assert told is not None and told.artifact_id == llm.artifact_id
    assert told.sampling_params["seed"] == output.seed and told.sampling_params["max_tokens"] == 2
    (again,) = llm.generate([[3]], SamplingParams(**told.sampling_params))
    assert again.outputs[0].token_ids == output.outputs[0].token_ids
    assert told.settings == {"num_threads": 1, "max_num_seqs": llm.limits.num_slots - 1}
    assert told.versions["torch"] and told.model["weights_sha256"] and told.sampler == "compiled"
    assert output.usage is not None and output.usage.prompt_tokens == 1


def test_conversations_need_a_form(llm: LLM) -> None:
    with pytest.raises(RequestError, match="chat template"):
        llm.chat([{"role": "user", "content": "w3"}])


def test_a_conversation_is_generated_like_its_token_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader.CompiledGraph, "open", OpenedFakes().open)
    template = "{% for m in messages %}{{ m.content }} w2 {% endfor %}"
    store = TrustStore(tmp_path / "trust")
    store.trust(write_artifact(tmp_path / "out", chat_template=template))
    llm = LLM(tmp_path / "out", num_threads=1, trust_store=store)
    messages = [{"role": "user", "content": "w3"}, {"role": "user", "content": "w4"}]
    assert llm.encode_chat(messages) == [3, 2, 4, 2]
    with pytest.raises(RequestError, match="'foo' is no option.*reasoning_effort"):
        llm.chat(messages, sampled(), foo=1)
    expected = llm.generate([[3, 2, 4, 2]], sampled())[0]
    assert parts(llm.chat(messages, sampled())[0]) == parts(expected)
    assert len(llm.chat([messages, messages], sampled())) == 2
