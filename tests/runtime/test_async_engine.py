"""Many callers on one event loop: what each gets, and what happens when one leaves, waits or fails."""

import asyncio
import gc
import random
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from text_engine import IDS, saying, text_engine, text_limits
from text_pieces import byte_level

from deepinfer.errors import EngineError, QueueFullError, RequestError, UsageError
from deepinfer.runtime.async_engine import MAX_UNREAD, AsyncEngine
from deepinfer.runtime.engine import Engine
from deepinfer.runtime.input_processor import InputProcessor
from deepinfer.runtime.output_collector import OutputCollector, merged
from deepinfer.runtime.outputs import RequestOutput
from deepinfer.runtime.request import Request
from deepinfer.runtime.sampling_params import SamplingParams

PROMPT = [7, 8, 9]
LONG = {"max_model_len": 2048, "max_blocks_per_request": 512, "num_blocks": 2049}
LONGEST_SECONDS = 500  # so that a test that hangs fails


def serve(test: Callable[[AsyncEngine], Awaitable[Any]], engine: Engine | None = None, **options: Any) -> Any:
    """Runs `test` with a started engine, and checks that nothing is left behind."""
    engine = engine or text_engine()

    async def main() -> Any:
        async with AsyncEngine(engine, InputProcessor(None, None, 64), **options) as served:
            result = await asyncio.wait_for(test(served), LONGEST_SECONDS)
        assert served.num_unfinished == 0
        return result

    result = asyncio.run(main())
    assert not engine.has_work and engine.scheduler.blocks.num_used == 0
    engine.scheduler.check_integrity()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("deepinfer")]
    return result


async def read(served: AsyncEngine, params: SamplingParams, **options: Any) -> list[RequestOutput]:
    return [output async for output in served.generate(PROMPT, params, **options)]


def alone(params: SamplingParams) -> RequestOutput:
    engine = text_engine()
    collector = OutputCollector(engine.add_request(PROMPT, params))
    while engine.has_work:
        engine.step()
    return collector.whole()


def answers(output: RequestOutput) -> list[tuple]:
    return [
        (own.text, own.token_ids, own.finish_reason, own.stop_reason, own.spans, own.logprobs)
        for own in output.outputs
    ]


def test_what_a_reader_gets_in_sum_is_what_the_request_gives_alone() -> None:
    params = [
        saying(b"hello<", b"ST", b"OP>", b"x", stop="<STOP>", logprobs=1),
        saying(b"hello<", b"ST", logprobs=0),
        SamplingParams(n=3, seed=4, max_tokens=20, logprobs=2),
        SamplingParams(seed=9, max_tokens=1),
    ]

    async def test(served: AsyncEngine) -> list[list[RequestOutput]]:
        return await asyncio.gather(*[read(served, own) for own in params])

    for outputs, own in zip(serve(test), params, strict=True):
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert answers(merged(outputs)) == answers(alone(own))


def test_closing_the_iterator_ends_the_request() -> None:
    async def test(served: AsyncEngine) -> None:
        outputs = served.generate(PROMPT, SamplingParams(max_tokens=60, ignore_eos=True, seed=1))
        async for _ in outputs:
            break
        assert served.num_unfinished == 1
        await outputs.aclose()
        assert served.num_unfinished == 0
        while served.engine.scheduler.blocks.num_used:
            await asyncio.sleep(0.001)

    engine = text_engine()
    serve(test, engine)
    assert engine.counts["tokens"] < 60


@pytest.mark.parametrize("after", [0, 1, 2, 3, 5, 9])
def test_cancelling_a_reader_at_any_moment_ends_its_request(after: int) -> None:
    async def test(served: AsyncEngine) -> None:
        reader = asyncio.ensure_future(read(served, SamplingParams(max_tokens=60, ignore_eos=True, seed=1)))
        for _ in range(after):
            await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert answers(merged(await read(served, saying(b"x")))) == answers(alone(saying(b"x")))

    serve(test)


def test_an_abort_is_the_last_output_and_a_timeout_too() -> None:
    async def test(served: AsyncEngine) -> None:
        seen = []
        async for output in served.generate(
            PROMPT, SamplingParams(max_tokens=60, ignore_eos=True, seed=1), request_id="a"
        ):
            seen.append(output)
            served.abort("a")
        assert seen[-1].outputs[0].finish_reason == "abort"
        assert len(merged(seen).outputs[0].token_ids) < 60
        served.abort("a")  # ended: without effect
        served.abort("unknown")
        late = merged(
            await read(served, SamplingParams(max_tokens=60, ignore_eos=True, seed=1), timeout=1e-6)
        )
        assert (late.outputs[0].finish_reason, late.outputs[0].stop_reason) == ("abort", "timeout")

    serve(test)


def test_what_cannot_be_served_is_refused_and_leaves_nothing() -> None:
    async def test(served: AsyncEngine) -> None:
        params = saying(b"x", b"y", b"z")
        for prompt, options in (
            ([], {}),
            ([[7], [8]], {}),
            ("text", {}),
            ([999], {}),
            (PROMPT, {"timeout": -1}),
        ):
            with pytest.raises(RequestError):
                async for _ in served.generate(prompt, params, **options):
                    pass
        outputs = served.generate(PROMPT, params, request_id="same")
        await anext(outputs)
        with pytest.raises(RequestError, match="same"):
            await read(served, params, request_id="same")
        with pytest.raises(QueueFullError):
            await read(served, params)
        await outputs.aclose()
        assert answers(merged(await read(served, params, request_id="same"))) == answers(alone(params))

    serve(test, max_unfinished=1)


def test_a_slow_reader_holds_nobody_up_and_loses_nothing() -> None:
    """Its outputs are joined; what it reads last is all that came meanwhile."""
    params = SamplingParams(max_tokens=1500, ignore_eos=True, seed=2)

    async def test(served: AsyncEngine) -> tuple[RequestOutput, int]:
        slow = served.generate(PROMPT, params)
        seen = [await anext(slow)]
        await read(served, params)  # as long, and begun later
        async for output in slow:
            seen.append(output)
        return merged(seen), len(seen)

    output, count = serve(test, text_engine(**LONG))
    assert count <= 3 and MAX_UNREAD < 1500
    assert len(output.outputs[0].token_ids) == 1500
    assert output.outputs[0].text is not None and output.outputs[0].spans is not None
    assert output.outputs[0].spans[-1].visible_end == len(output.outputs[0].text)


def test_a_step_that_fails_ends_those_it_concerns_and_nobody_later() -> None:
    engine = text_engine(**LONG)
    inner, broken = engine.runner.run, [False]

    def run(batch: Any) -> Any:
        if broken[0]:
            broken[0] = False
            raise RuntimeError("out of order")
        return inner(batch)

    engine.runner.run = run  # type: ignore[method-assign]

    async def test(served: AsyncEngine) -> None:
        readers = [asyncio.ensure_future(read(served, saying(*[b"x"] * 1500))) for _ in range(3)]
        while len(served._serving) < 3 or engine.counts["tokens"] < 9:
            await asyncio.sleep(0)
        broken[0] = True
        for outcome in await asyncio.gather(*readers, return_exceptions=True):
            assert isinstance(outcome, EngineError) and "out of order" in str(outcome)
        assert answers(merged(await read(served, saying(b"x")))) == answers(alone(saying(b"x")))

    serve(test, engine)


def test_a_result_that_cannot_be_made_ends_its_readers_and_nobody_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine's thread goes on: nobody waits for ever."""
    take, broken = OutputCollector.take, [True]

    def failing(collector: OutputCollector) -> RequestOutput | None:
        if broken[0]:
            broken[0] = False
            raise ValueError("no result")
        return take(collector)

    monkeypatch.setattr(OutputCollector, "take", failing)

    async def test(served: AsyncEngine) -> None:
        with pytest.raises(EngineError, match="no result"):
            await read(served, saying(b"x", b"y"))
        assert answers(merged(await read(served, saying(b"x")))) == answers(alone(saying(b"x")))

    serve(test)


@pytest.mark.parametrize("drain", [False, True])
def test_shutdown_ends_or_awaits_what_is_unfinished(drain: bool) -> None:
    params = SamplingParams(max_tokens=50, ignore_eos=True, seed=3)

    async def test(served: AsyncEngine) -> None:
        step = served.engine.step
        served.engine.step = lambda: time.sleep(0.005) or step()  # slow enough to be found unfinished
        reader = asyncio.ensure_future(read(served, params))
        while not served.engine.counts["tokens"]:
            await asyncio.sleep(0)
        await served.shutdown(drain=drain)
        output = merged(await reader)
        assert output.finished
        assert output.outputs[0].finish_reason == ("length" if drain else "abort")
        with pytest.raises(UsageError):
            await read(served, params)

    serve(test)


LOAD = 2000


@pytest.mark.slow
def test_two_thousand_requests_of_which_a_fifth_leaves() -> None:
    """Nothing is lost, memory is back, and the rest is to the byte what it is alone."""
    dice = random.Random(5)
    limits = {"num_slots": 9, "num_blocks": 60, "decode_buckets": (1, 4, 8), "max_model_len": 96}
    limits["max_blocks_per_request"] = 24
    cases = []
    for number in range(LOAD):
        prompt = [dice.randrange(2, 256) for _ in range(dice.choice([1, 3, 8, 20, 50]))]
        options: dict[str, Any] = {"max_tokens": dice.randrange(1, 40), "seed": number}
        options |= dice.choice([{}, {"stop": ["a", "zq"]}, {"logprobs": 1}, {"temperature": 0}, {"n": 2}])
        leaves = dice.randrange(1, 12) if dice.random() < 0.2 else None
        cases.append((prompt, SamplingParams(**options), leaves, dice.random() < 0.5))

    async def one(served: AsyncEngine, case: tuple) -> RequestOutput | None:
        prompt, params, leaves, politely = case
        outputs, seen = served.generate(prompt, params), []
        async for output in outputs:
            seen.append(output)
            if leaves is not None and len(seen) == leaves and not output.finished:
                if politely:
                    served.abort(output.request_id)
                else:
                    await outputs.aclose()
                    return None
        assert seen[-1].finished and not any(output.finished for output in seen[:-1])
        return merged(seen)

    alive = []

    async def test(served: AsyncEngine) -> list[RequestOutput | None]:
        results: list[RequestOutput | None] = []
        for start in range(0, LOAD, 500):
            results += await asyncio.gather(*[one(served, case) for case in cases[start : start + 500]])
            gc.collect()
            alive.append(sum(type(thing) is Request for thing in gc.get_objects()))
        return results

    engine = text_engine(**limits)
    results = serve(test, engine)
    assert len(results) == LOAD
    assert len(alive) == 4 and max(alive) <= 8, "requests outlive their readers"
    assert engine.scheduler.num_preemptions > 0
    ended = [(case, output) for case, output in zip(cases, results, strict=True) if output is not None]
    aborted = [output for _, output in ended if output.outputs[0].finish_reason == "abort"]
    gone = LOAD - len(ended)
    assert gone > 50 and len(aborted) > 50
    whole = [pair for pair in ended if all(own.finish_reason != "abort" for own in pair[1].outputs)]
    for (prompt, params, *_), output in dice.sample(whole, 150):
        reference = text_engine(**limits)
        collector = OutputCollector(reference.add_request(prompt, params))
        while reference.has_work:
            reference.step()
        assert answers(output) == answers(collector.whole())


def test_byte_pieces_of_the_scripted_answers_are_in_the_vocabulary() -> None:
    """The comparisons above would prove little with tokens that add no text."""
    token_bytes, ids = byte_level(IDS)
    assert ids == IDS and max(ids.values()) < text_limits().vocab_size
    assert all(token_bytes.piece(token, False) is not None for token in ids.values())
