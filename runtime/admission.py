"""Whether a request can be served at all: checked once, before it leaves any trace. Pure Python."""

from collections.abc import Sequence

from deepinfer.errors import RequestError
from deepinfer.runtime.limits import Limits
from deepinfer.runtime.sampling_params import SamplingParams


def check_request(limits: Limits, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
    """Raises RequestError if even an empty engine of these sizes could not serve the request."""
    _check_prompt(limits, prompt_token_ids)
    _check_lengths(limits, len(prompt_token_ids), params)
    for name, largest in params.largest_token_ids():
        if largest >= limits.vocab_size:
            raise RequestError(f"id {largest} is outside the vocabulary of {limits.vocab_size}", where=name)
    if any(isinstance(word, str) for word in params.bad_words):
        raise RequestError("text without a tokenizer", where="bad_words", action="give lists of token ids")
    if params.n > limits.num_slots - 1:
        raise RequestError(
            f"{params.n} choices exceed the {limits.num_slots - 1} requests that can hold cache at once",
            where="n",
            action="lower n, or build with a larger max_num_seqs",
        )


def _check_prompt(limits: Limits, prompt_token_ids: Sequence[int]) -> None:
    if not len(prompt_token_ids):
        raise RequestError("the prompt has no tokens", where="prompt_token_ids")
    low, high = min(prompt_token_ids), max(prompt_token_ids)
    if low < 0 or high >= limits.vocab_size:
        raise RequestError(
            f"token id {low if low < 0 else high} is outside the vocabulary of {limits.vocab_size}",
            where="prompt_token_ids",
        )
    if limits.image_token_id is not None and limits.image_token_id in prompt_token_ids:
        raise RequestError(
            f"token id {limits.image_token_id} stands for an image, and images are not supported",
            where="prompt_token_ids",
        )


def _check_lengths(limits: Limits, num_prompt_tokens: int, params: SamplingParams) -> None:
    total = num_prompt_tokens + params.max_tokens
    if total > limits.max_model_len:
        raise RequestError(
            f"{num_prompt_tokens} prompt tokens and max_tokens {params.max_tokens} exceed the model "
            f"length of {limits.max_model_len}",
            where="max_tokens",
            action="shorten the prompt or lower max_tokens",
        )
    if limits.blocks_for(total) > limits.num_blocks - 1:
        raise RequestError(
            f"{total} tokens need {limits.blocks_for(total)} cache blocks, the artifact has "
            f"{limits.num_blocks - 1}",
            where="max_tokens",
            action="shorten the prompt, lower max_tokens, or build with more cache blocks",
        )
