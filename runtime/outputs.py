"""What `generate` returns, in the shape users of vLLM know. Plain data."""

from dataclasses import dataclass, field
from typing import Any

from deepinfer.runtime.finish import Trigger
from deepinfer.runtime.text_stream import TokenSpan
from deepinfer.runtime.timing import RequestTiming


@dataclass(frozen=True, slots=True, init=False)
class Logprob:
    """Log-probability of a token at one place; always a finite number."""

    logprob: float
    rank: int  # 1 is the largest logit; among equal ones the lower id comes first

    def __init__(self, logprob: float, rank: int) -> None:
        # What a frozen dataclass makes of itself takes twice as long, and a step makes hundreds of these.
        _set_logprob(self, logprob)
        _set_rank(self, rank)


_set_logprob = Logprob.__dict__["logprob"].__set__
_set_rank = Logprob.__dict__["rank"].__set__

Logprobs = dict[int, Logprob]  # token id -> of one generated token: the token itself, then the best


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One generated continuation."""

    index: int  # place among the `n` of one prompt
    text: str | None  # without what stopped it, unless that was asked for; None without a tokenizer
    token_ids: tuple[int, ...]  # every generated token, the one that stopped it included
    finish_reason: str | None  # "stop", "length", "error", "abort"; None while it runs
    stop_reason: int | str | None = None  # the stop string or stop token, the kind of error, or "timeout"
    triggers: tuple[Trigger, ...] = ()  # all reasons to end that came true, the one that counts first
    spans: tuple[TokenSpan, ...] | None = None  # which part of the text each token wrote; None without text
    logprobs: tuple[Logprobs, ...] | None = None  # one per token id; None unless asked for
    logprobs_mode: str | None = None  # "processed" or "raw"; None without logprobs
    cumulative_logprob: float | None = None  # sum over the generated tokens; None without logprobs
    seed: int = 0  # the one in use: with it as a parameter a request of one continuation gives this one
    num_positions_processed: int = 0  # rows the model computed for it, those computed again included
    num_preemptions: int = 0  # how often it gave its memory up and was computed again
    num_peak_blocks: int = 0  # the most cache blocks it held at once, those it shared included


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost, its continuations together."""

    prompt_tokens: int
    completion_tokens: int
    positions_processed: int  # rows the model computed: a prompt shared by continuations counts once


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a result depends on, and what made it. What is not known is None."""

    artifact_id: str | None
    model: dict[str, Any]  # as the artifact names it
    sampler: str
    sampling_params: dict[str, Any]  # with the seed in use
    settings: dict[str, Any]  # which change no result
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The result of one prompt; from a stream, what is new of it.

    In a stream, `text`, `token_ids`, `logprobs` and `spans` of a continuation hold what became visible since
    the output before; `usage`, `timing` and `provenance` come with the last one.
    """

    request_id: str
    prompt: str | None  # None if the prompt came as token ids
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]  # `n` of them, by index
    finished: bool
    seed: int  # the one in use: with it as a parameter the request gives the same tokens again
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None  # one per prompt token, the first None
    timing_seconds: dict[str, float] = field(default_factory=dict)  # queue, first_token, decode, total
    timing: RequestTiming | None = None  # of the first continuation
    usage: Usage | None = None
    provenance: Provenance | None = None
