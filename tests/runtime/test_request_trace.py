"""The trace of requests: what each step did, bounded, and no content without leave."""

import json

import pytest
from text_engine import saying, text_engine

from deepinfer.errors import UsageError
from deepinfer.runtime.engine import Engine
from deepinfer.runtime.request_trace import RequestTrace, TracePassport
from deepinfer.runtime.sampling_params import SamplingParams

PASSPORT = TracePassport("internal", "a defect", "its finder", "a week", "none", "of the disk", "nowhere")


def traced(trace: RequestTrace, engine: Engine, *requests: tuple[list[int], SamplingParams]) -> None:
    for prompt, params in requests:
        engine.add_request(prompt, params)
    with trace.recording():
        while engine.has_work:
            engine.step()


def test_a_record_says_what_was_computed_read_and_chosen() -> None:
    """OBS-02: a prompt of 7 and the first decode step, whose cache grows from 7 to 8."""
    engine = text_engine()
    trace = RequestTrace(engine)
    traced(trace, engine, ([3, 4, 5, 6, 7, 8, 9], saying(b"x", b"y", b"<end>", max_tokens=9)))
    prefill, decode, last = trace.records
    assert (prefill.phase, prefill.position_start, prefill.position_count) == ("prefill", 0, 7)
    assert (prefill.cached_before, prefill.cached_after, prefill.output_index) == (0, 7, 0)
    assert (decode.phase, decode.position_start, decode.position_count) == ("decode", 7, 1)
    assert (decode.cached_before, decode.cached_after, decode.output_index) == (7, 8, 1)
    assert (decode.blocks, decode.draw_position, decode.visible) == (2, 8, 2)
    assert (last.finish_reason, last.triggers, last.blocks) == ("stop", ("eos",), 0)
    assert [record.step for record in trace.records] == [0, 1, 2]
    assert len({record.request_digest for record in trace.records}) == 1
    assert not any(record.seconds < 0 for record in trace.records)


def test_a_trace_holds_no_content_without_leave() -> None:
    """OBS-06, OBS-04: neither the prompt nor the answer, in no form; with a passport both kinds are there."""
    canary = [101, 102, 103, 104, 105, 106]
    pieces = [b"word ", b"hello<", b"ST"]
    engine = text_engine()
    trace = RequestTrace(engine)
    traced(trace, engine, (canary, saying(*pieces, logprobs=0)))
    written = json.dumps(list(trace.as_dicts()))
    assert "word" not in written and "hello" not in written
    assert all(record.content is None for record in trace.records)
    told = RequestTrace(engine, passport=PASSPORT)
    traced(told, engine, (canary, saying(*pieces, logprobs=0)))
    contents = [record.content for record in told.records]
    assert contents[-1] is not None and contents[-1].text == "word hello<ST"
    assert all(content is not None and content.logprob is not None for content in contents)


@pytest.mark.parametrize("empty", range(7))
def test_a_passport_that_leaves_something_open_is_none(empty: int) -> None:
    """OBS-04."""
    words = ["x"] * 7
    words[empty] = " "
    with pytest.raises(UsageError):
        TracePassport(*words)


def test_a_trace_keeps_the_newest_and_counts_what_it_dropped() -> None:
    """OBS-03."""
    engine = text_engine()
    trace = RequestTrace(engine, max_records=5)
    traced(trace, engine, *[([3], saying(*[b"x"] * 20)) for _ in range(4)])
    assert (len(trace.records), trace.num_dropped) == (5, 75)
    assert not trace._digests
    with pytest.raises(UsageError):
        RequestTrace(engine, max_records=0)


def test_recording_changes_no_result_and_leaves_the_engine_as_it_was() -> None:
    params = SamplingParams(max_tokens=9, seed=4, n=2, temperature=0.7)
    """Also where something else watches the scheduler already."""
    results = []
    for records in (False, True):
        engine = text_engine()
        request = engine.add_request([3, 4], params)
        if records:
            watched = engine.scheduler.commit = engine.scheduler.commit  # type: ignore[method-assign]
            with RequestTrace(engine).recording() as trace:
                while engine.has_work:
                    engine.step()
            assert trace.records and vars(engine.scheduler)["commit"] is watched
            assert "schedule" not in vars(engine.scheduler)
        else:
            while engine.has_work:
                engine.step()
        results.append([own.output_token_ids for own in (request, *request.choices)])
    assert results[0] == results[1]


def test_the_same_request_has_the_same_digest_whatever_it_is_called() -> None:
    def digest(prompt: list[int], **options: object) -> str:
        engine = text_engine()
        trace = RequestTrace(engine)
        traced(trace, engine, (prompt, SamplingParams(**({"max_tokens": 1, "seed": 1} | options))))
        return trace.records[0].request_digest

    assert digest([3, 4]) == digest([3, 4])
    others = [digest([3, 5]), digest([3, 4], seed=2), digest([3, 4], stop="x"), digest([3, 4], top_k=2)]
    assert len({digest([3, 4]), *others}) == 5
