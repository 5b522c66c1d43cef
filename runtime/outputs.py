"""What `generate` returns, in the shape users of vLLM know. Plain data."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One generated continuation."""

    index: int  # always 0: one continuation per request
    text: str | None  # decoded output without the token that stopped it; None without a tokenizer
    token_ids: tuple[int, ...]  # every generated token, the one that stopped it included
    finish_reason: str | None  # "stop", "length", "error", "abort"; None while it runs
    stop_reason: int | str | None = None  # the id from stop_token_ids, or the kind of error


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The result of one prompt."""

    request_id: str
    prompt: str | None  # None if the prompt came as token ids
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    seed: int  # the one in use: with it as a parameter the request gives the same tokens again
    timing_seconds: dict[str, float] = field(default_factory=dict)  # queue, first_token, decode, total
