"""A step that fails at any stage: nothing of it counts; once all is given up, a retry gives the same."""

import dataclasses
from typing import Any

import pytest
from spy_runner import PROMPT, Fault, alone, at, fail, params, run_all, spied

from deepinfer.runtime.scheduler import Scheduler

CALLS = [
    (PROMPT, params(9)),
    ([8, 8, 2], params(12, temperature=0)),
    ([5] * 20, params(6, prompt_logprobs=1, n=2)),
]


@pytest.mark.parametrize("stage", ["launch", "half", "head", "sampler", "sampled", "scores", "commit"])
@pytest.mark.parametrize("time", [1, 3])
def test_fault_in_a_step_leaves_whole_tokens_and_a_retry_gives_the_uninterrupted_ones(
    stage: str, time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TXN-01 to TXN-04, TXN-06: nothing of the step counts, its memory is used only after `abort_all`."""
    whole = [alone(prompt, own) for prompt, own in CALLS]
    engine, _ = spied(at(stage, min(time, 2) if stage == "scores" else time, fail))
    requests = [engine.add_request(prompt, own) for prompt, own in CALLS]
    if stage == "commit":
        finish = Scheduler.finish
        interrupt = at("commit", time, fail)

        def finish_or_fail(*arguments: Any) -> None:
            interrupt("commit")
            finish(*arguments)

        monkeypatch.setattr(Scheduler, "finish", finish_or_fail)
    with pytest.raises(Fault):
        for _ in range(100):
            before = [list(own.output_token_ids) for own in requests]
            engine.step()
    for request, tokens, other in zip(requests, before, whole, strict=True):
        made = request.output_token_ids
        assert made == other.output_token_ids[: len(made)]
        assert made == tokens or stage == "commit", "all of the step or nothing"
        assert request.logprobs[: len(made)] == other.logprobs[: len(made)]
    with pytest.raises(AssertionError, match="abort_all"):
        engine.step()
    engine.abort_all()
    engine.scheduler.check_integrity()
    assert engine.scheduler.blocks.num_used == engine.scheduler.slots.num_used == 0
    assert not engine.has_work and {own.finish_reason for own in requests} <= {"abort", "length"}
    again = [engine.add_request(prompt, own) for prompt, own in CALLS]
    led = [
        engine.add_request(prompt, dataclasses.replace(own, n=1, golden_token_ids=request.output_token_ids))
        for (prompt, own), request in zip(CALLS, requests, strict=True)
    ]
    run_all(engine)
    for retry, resumed, other in zip(again, led, whole, strict=True):
        assert (retry.output_token_ids, retry.logprobs) == (other.output_token_ids, other.logprobs)
        assert retry.prompt_logprobs == other.prompt_logprobs
        assert resumed.output_token_ids == other.output_token_ids
