"""Stop strings, visible text and reasons to end, where the engine commits tokens."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_engine import EOS, IDS, TOKEN_BYTES, saying, text_engine, text_limits, tokens

from deepinfer.errors import RequestError
from deepinfer.runtime.engine import Engine
from deepinfer.runtime.finish import Trigger
from deepinfer.runtime.output_collector import OutputCollector, merged
from deepinfer.runtime.outputs import RequestOutput
from deepinfer.runtime.request import Request
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.table_runner import TableRunner
from deepinfer.runtime.text_stream import TokenSpan

PROMPT = [7, 8, 9]
STOP_PIECES = (b"hello<", b"ST", b"OP>", b"word ")


def run(engine: Engine, *params: SamplingParams) -> list[RequestOutput]:
    requests = [engine.add_request(PROMPT, own) for own in params]
    collectors = [OutputCollector(request) for request in requests]
    while engine.has_work:
        engine.step()
        engine.scheduler.check_integrity()
    assert engine.scheduler.blocks.num_used == 0
    return [collector.whole() for collector in collectors]


def test_a_stop_string_ends_a_request_before_the_next_call() -> None:
    """STP-03, STP-10, STP-11, STP-12, STP-19: three rows of scores for three tokens, text without it."""
    engine = text_engine()
    (output,) = run(engine, saying(*STOP_PIECES, stop="<STOP>", logprobs=0))
    (answer,) = output.outputs
    assert (answer.text, answer.token_ids) == ("hello", tokens(STOP_PIECES[:3]))
    assert (answer.finish_reason, answer.stop_reason) == ("stop", "<STOP>")
    assert answer.spans == (TokenSpan(0, 5, 6), TokenSpan(6, 6, 8), TokenSpan(8, 8, 11))
    assert answer.logprobs is not None and len(answer.logprobs) == 3
    assert engine.counts["tokens"] == 3 and engine.counts["decode_rows"] == 2


@pytest.mark.parametrize(
    ("pieces", "options", "text", "reason", "kinds"),
    [
        # a stop string completed by the last token that max_tokens allows
        (STOP_PIECES[:3], {"stop": "<STOP>"}, "hello", "<STOP>", ["stop_string", "max_tokens"]),
        # and by a stop token
        (
            STOP_PIECES,
            {"stop": "<STOP>", "stop_token_ids": [IDS[b"OP>"]]},
            "hello",
            "<STOP>",
            ["stop_string", "stop_token"],
        ),
        # what is held back is released by an end token, which is no part of the text
        ((b"hello<", b"<end>"), {"stop": "<STOP>"}, "hello<", None, ["eos", "max_tokens"]),
        (
            (b"hello<", b"ST"),
            {"stop_token_ids": [IDS[b"ST"]]},
            "hello<",
            IDS[b"ST"],
            ["stop_token", "max_tokens"],
        ),
        (
            (b"hello<", b"ST", b"x"),
            {"stop_token_ids": [IDS[b"ST"]], "include_stop_str_in_output": True},
            "hello<ST",
            IDS[b"ST"],
            ["stop_token"],
        ),
        (
            STOP_PIECES,
            {"stop": "<STOP>", "include_stop_str_in_output": True},
            "hello<STOP>",
            "<STOP>",
            ["stop_string"],
        ),
        ((b"hello<", b"ST"), {"stop": "<STOP>"}, "hello<ST", None, ["max_tokens"]),
        ((b"<end>",), {}, "", None, ["eos", "max_tokens"]),
    ],
)
def test_the_highest_reason_counts_and_all_are_recorded(
    pieces: tuple[bytes, ...], options: dict[str, Any], text: str, reason: object, kinds: list[str]
) -> None:
    """STP-01, STP-17, STP-18, STP-22, STP-23; immediate end: MTX-09."""
    (output,) = run(text_engine(), saying(*pieces, **options))
    (answer,) = output.outputs
    assert (answer.text, answer.stop_reason) == (text, reason)
    assert [trigger.kind for trigger in answer.triggers] == kinds
    assert answer.finish_reason == ("length" if kinds[0] == "max_tokens" else "stop")
    assert answer.spans is not None and len(answer.spans) == len(answer.token_ids)


def test_a_finished_row_selects_no_more() -> None:
    """STP-02: its tokens and log-probabilities end with it, while its neighbour goes on."""
    engine = text_engine()
    short = saying(b"word ", b"<end>", max_tokens=9, logprobs=1)
    long = saying(*[b"word "] * 5, b"<end>", max_tokens=9, logprobs=1)
    first, second = (output.outputs[0] for output in run(engine, short, long))
    assert (len(first.token_ids), len(second.token_ids)) == (2, 6)
    assert first.logprobs is not None and second.logprobs is not None
    assert (len(first.logprobs), len(second.logprobs)) == (2, 6)
    assert engine.counts["tokens"] == 8


class During:
    """A table backend that does something during its n-th step."""

    def __init__(self, number: int, what: Callable[[], object]) -> None:
        self._inner, self._number, self._what = TableRunner(text_limits()), number, what
        self.limits = self._inner.limits

    def run(self, batch: object) -> object:
        self._number -= 1
        if self._number == 0:
            self._what()
        return self._inner.run(batch)  # type: ignore[arg-type]


def test_an_abort_during_a_step_discards_the_step() -> None:
    """STP-20: no token, text or log-probability more than was there; memory is back, once."""
    engine = Engine(During(3, lambda: engine.abort("it")), token_bytes=TOKEN_BYTES)  # type: ignore[arg-type]
    request = engine.add_request(PROMPT, saying(*STOP_PIECES, stop="<STOP>", logprobs=0), request_id="it")
    collector, ends = OutputCollector(request), 0
    while engine.has_work:
        ends += sum(own.finished for own in engine.step())
    (answer,) = collector.whole().outputs
    assert (answer.finish_reason, ends) == ("abort", 1)
    assert (answer.token_ids, answer.text) == (tokens(STOP_PIECES[:2]), "hello")
    assert answer.logprobs is not None and len(answer.logprobs) == 2
    engine.scheduler.check_integrity()
    assert engine.scheduler.blocks.num_used == 0


def test_an_abort_before_the_first_step_does_nothing_else() -> None:
    """STP-20."""
    engine = text_engine()
    request = engine.add_request(PROMPT, saying(b"word "))
    engine.abort(request)
    assert engine.step() == [request] and not engine.has_work
    (answer,) = OutputCollector(request).whole().outputs
    assert (answer.finish_reason, answer.token_ids, answer.text) == ("abort", (), "")
    assert engine.counts["prefill_steps"] == 0


def test_a_timeout_during_a_step_ends_the_request_after_it() -> None:
    """STP-21: the clock jumps during the second step."""
    now = [0.0]

    def jump() -> None:
        now[0] = 99.0

    runner: Any = During(2, jump)
    engine = Engine(runner, clock=lambda: now[0], token_bytes=TOKEN_BYTES)
    request = engine.add_request(PROMPT, saying(*STOP_PIECES), timeout=10.0)
    collector = OutputCollector(request)
    while engine.has_work:
        engine.step()
    (answer,) = collector.whole().outputs
    assert (answer.finish_reason, answer.stop_reason) == ("abort", "timeout")
    assert len(answer.token_ids) <= 2 and answer.text == "hello<ST"[: len(answer.text or "")]


def test_stop_strings_need_a_tokenizer() -> None:
    engine = Engine(TableRunner(text_limits()))
    with pytest.raises(RequestError) as caught:
        engine.add_request(PROMPT, SamplingParams(stop="x"))
    assert caught.value.where == "stop" and not engine.has_work


def test_a_timeout_or_length_that_the_context_would_set_is_refused_before() -> None:
    """STP-24: the length of the context never ends a request, since it is checked at admission."""
    with pytest.raises(RequestError, match="model length"):
        text_engine().add_request([5] * 60, SamplingParams(max_tokens=5))


WORDS = st.lists(
    st.sampled_from([b"hello<", b"ST", b"OP>", b"word ", b"x", b"<", b"<end>"]), min_size=1, max_size=12
)
STOPS = st.lists(st.sampled_from(["<STOP>", "o<S", "x", "word w", "hello"]), max_size=3)


@given(st.lists(st.tuples(WORDS, STOPS, st.booleans()), min_size=1, max_size=6), st.integers(9, 20))
@settings(max_examples=60, deadline=None)
def test_neighbours_preemption_and_streaming_change_no_text(
    asked: list[tuple[list[bytes], list[str], bool]], num_blocks: int
) -> None:
    """LAT-07: stop strings change nothing up to where they end a request; chunks in sum are the whole."""
    params = [
        saying(*pieces, stop=stops, include_stop_str_in_output=include, logprobs=0)
        for pieces, stops, include in asked
    ]
    alone = [run(text_engine(), own)[0].outputs[0] for own in params]
    without = [run(text_engine(), saying(*pieces, logprobs=0))[0].outputs[0] for pieces, _, _ in asked]
    engine = text_engine(num_blocks=num_blocks)
    collectors = [OutputCollector(engine.add_request(PROMPT, own)) for own in params]
    chunks: list[list[RequestOutput]] = [[] for _ in collectors]
    while engine.has_work:
        engine.step()
        for collector, own_chunks in zip(collectors, chunks, strict=True):
            own_chunks += [output for output in [collector.take()] if output is not None]
    for collector, own_chunks, expected, free in zip(collectors, chunks, alone, without, strict=True):
        whole, joined = collector.whole(), merged(own_chunks)
        assert joined == whole and [chunk.finished for chunk in own_chunks].count(True) == 1
        answer = whole.outputs[0]
        for name in ("text", "token_ids", "spans", "logprobs", "finish_reason", "stop_reason", "triggers"):
            assert getattr(answer, name) == getattr(expected, name)
        count = len(answer.token_ids)
        assert answer.token_ids == free.token_ids[:count] and answer.logprobs == free.logprobs[:count]
        for chunk in own_chunks:
            part = chunk.outputs[0]
            assert len(part.token_ids) == len(part.logprobs or ()) == len(part.spans or ())


def test_each_of_several_continuations_has_its_own_text() -> None:
    engine = text_engine()
    request = engine.add_request(PROMPT, SamplingParams(n=3, max_tokens=12, seed=5, stop=["a", "e", "\x00"]))
    collector = OutputCollector(request)
    chunks = []
    while engine.has_work:
        engine.step()
        chunks += [output for output in [collector.take()] if output is not None]
    whole = collector.whole()
    assert merged(chunks) == whole and [output.index for output in whole.outputs] == [0, 1, 2]
    assert len({output.token_ids for output in whole.outputs}) == 3
    for output, own in zip(whole.outputs, (request, *request.choices), strict=True):
        single = SamplingParams(max_tokens=12, seed=own.seed, stop=["a", "e", "\x00"])
        (alone,) = run(text_engine(), single)[0].outputs
        assert (alone.text, alone.token_ids) == (output.text, output.token_ids)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == sum(len(output.token_ids) for output in whole.outputs)


def test_a_fork_continues_its_parent_s_text() -> None:
    engine = text_engine()
    request = engine.add_request(PROMPT, saying(*STOP_PIECES, stop="<STOP>"))
    while len(request.output_token_ids) < 2:
        engine.step()
    child = engine.fork(request, seed=3)
    while engine.has_work:
        engine.step()
    for own in (request, child):
        (answer,) = OutputCollector(own).whole().outputs
        assert (answer.text, answer.stop_reason) == ("hello", "<STOP>")


class Clock:
    """Time that stands still until it is told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def timed(clock: Clock, engine: Engine, request: Request, seconds: list[float]) -> RequestOutput:
    """Runs a request; the n-th step ends at the n-th time."""
    steps = iter(seconds)
    inner = engine.runner.run

    def run(batch: object) -> object:
        result = inner(batch)  # type: ignore[arg-type]
        clock.now = next(steps)
        return result

    engine.runner.run = run  # type: ignore[method-assign,assignment]
    collector = OutputCollector(request)
    while engine.has_work:
        engine.step()
    return collector.whole()


def test_output_that_is_held_back_is_not_out_yet() -> None:
    """LAT-01: chosen at 8 and held, visible at 10."""
    clock = Clock()
    engine = text_engine(clock)
    request = engine.add_request(PROMPT, saying(b"<", b"x", stop="<STOP>"))
    output = timed(clock, engine, request, [8.0, 10.0])
    assert output.timing is not None
    assert (output.timing.queue_ns, output.timing.first_output_ns) == (0, 10_000_000_000)


def test_parts_of_the_time_are_those_of_the_whole() -> None:
    """LAT-02, LAT-03, LAT-05: outputs at 10, 13 and 17, the end at 18; waiting is a part of its own."""
    clock = Clock()
    engine = text_engine(clock)
    request = engine.add_request(PROMPT, saying(b"a", b"b", b"c", b"<end>"))
    clock.now = 4.0  # nothing ran so far
    output = timed(clock, engine, request, [10.0, 13.0, 17.0, 18.0])
    timing = output.timing
    assert timing is not None
    billion = 10**9
    assert timing.queue_ns == 4 * billion and timing.first_output_ns == 6 * billion
    assert timing.inter_output_ns == (3 * billion, 4 * billion) and timing.flush_ns == billion
    assert timing.total_ns == 18 * billion
    assert (
        timing.queue_ns + timing.first_output_ns + sum(timing.inter_output_ns) + timing.flush_ns
        == timing.total_ns
    )
    assert output.timing_seconds == {"queue": 4.0, "first_token": 10.0, "decode": 8.0, "total": 18.0}
    assert (
        engine.counts["decode_steps"] == 3
    )  # the first token came with the prompt's step, the last needs none


def test_positions_are_counted_whether_their_tokens_are_new_or_not() -> None:
    """Rows of the prompt and of every token but the last, which nothing follows."""
    (output,) = run(text_engine(), saying(*[b"x"] * 9))
    assert output.usage is not None
    assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (3, 9)
    assert output.usage.positions_processed == 3 + 9 - 1


def test_trigger_of_the_end_token_is_not_hidden_by_ignore_eos() -> None:
    (output,) = run(text_engine(), saying(b"x", b"<end>", b"x", ignore_eos=True))
    assert output.outputs[0].triggers == (Trigger("max_tokens"),)
    assert output.outputs[0].text == "x<end>x" and output.outputs[0].token_ids[1] == EOS
