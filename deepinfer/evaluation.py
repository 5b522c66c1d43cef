"""How well an artifact predicts a text: perplexity and bits per byte, through the engine that serves it.

A text longer than the model's length is read in windows that overlap by half, so that each scored token has
half a window before it where the text has that much. All tokens but the first count.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deepinfer.errors import RequestError
from deepinfer.runtime.llm import LLM
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.scoring import score_of


@dataclass(frozen=True)
class Evaluation:
    """Measures of one text."""

    tokens: int  # scored: all but the first
    bytes: int  # of the whole text, in UTF-8
    bits_per_token: float
    bits_per_byte: float
    perplexity: float  # per token


def windows(num_tokens: int, length: int) -> Iterator[tuple[int, int, int]]:
    """Start and end of every window, and the first position whose next token is scored there."""
    start = scored = 0
    while True:
        end = min(start + length, num_tokens)
        yield start, end, scored
        if end == num_tokens:
            return
        scored = end - 1
        start = end - length // 2


def evaluate_tokens(llm: LLM, token_ids: Sequence[int]) -> float:
    """Negative log-likelihood, in nats, of all tokens but the first. Raises RequestError below two."""
    if len(token_ids) < 2:
        raise RequestError("a text of fewer than two tokens has nothing to predict", where="text")
    params = SamplingParams(max_tokens=0, prompt_logprobs=0, logprobs_mode="raw", temperature=0)
    places = list(windows(len(token_ids), llm.limits.max_model_len))
    outputs = llm.generate([list(token_ids[start:end]) for start, end, _ in places], params, use_tqdm=True)
    terms = []
    for (start, end, scored), output in zip(places, outputs, strict=True):
        logprobs = score_of(output, None).logprobs
        for place in range(scored + 1, end):
            logprob = logprobs[place - start]
            if logprob is None:
                raise RequestError("the model gives no numbers for this text", where=f"token {place}")
            terms.append(-logprob)
    return math.fsum(terms)


def evaluate_text(llm: LLM, text: str) -> Evaluation:
    """Measures of a text. Raises RequestError for one that cannot be read, or is too short to predict."""
    token_ids = _encode(llm, text)
    loss = evaluate_tokens(llm, token_ids)
    count, num_bytes = len(token_ids) - 1, len(text.encode())
    bits = loss / math.log(2)
    return Evaluation(count, num_bytes, bits / count, bits / num_bytes, math.exp(loss / count))


def _encode(llm: LLM, text: str) -> list[int]:
    tokenizer = llm._inputs.tokenizer
    if tokenizer is None:
        raise RequestError("the artifact has no tokenizer, so text cannot be used", where="text")
    return tokenizer.encode(text, max_tokens=len(text.encode()) + 8)  # no token is shorter than a byte
