"""What a model makes of a given text: the log-probability of each of its tokens. Plain data."""

from dataclasses import dataclass

from deepinfer.runtime.outputs import RequestOutput
from deepinfer.runtime.text_stream import TextStream
from deepinfer.runtime.token_bytes import TokenBytes


@dataclass(frozen=True, slots=True)
class Score:
    """The log-probabilities of one text."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]  # one per token; None for the first, which nothing comes before
    texts: (
        tuple[str, ...] | None
    )  # of each token, special ones included: together the text; None without text
    total_logprob: float  # the sum


def score_of(output: RequestOutput, token_bytes: TokenBytes | None) -> Score:
    """The score of a prompt whose log-probabilities were computed."""
    assert output.prompt_logprobs is not None
    token_ids = output.prompt_token_ids
    logprobs = tuple(
        None if entry is None else entry[token].logprob
        for token, entry in zip(token_ids, output.prompt_logprobs, strict=True)
    )
    return Score(
        token_ids=token_ids,
        logprobs=logprobs,
        texts=None if token_bytes is None else token_texts(token_ids, token_bytes),
        total_logprob=sum((value for value in logprobs if value is not None), 0.0),
    )


def token_texts(token_ids: tuple[int, ...], token_bytes: TokenBytes) -> tuple[str, ...]:
    """The part that each token has in the text of all of them."""
    stream = TextStream(token_bytes, skip_special_tokens=False)
    for token_id in token_ids:
        stream.push(token_id)
    stream.end()
    return tuple(stream.text[span.start : span.end] for span in stream.spans())
