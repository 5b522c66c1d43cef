"""The forms in which `generate` takes prompts and parameters, brought to one. Plain Python.

A prompt is text, a list of token ids, or a dict with either "prompt" or "prompt_token_ids"; a list of prompts
may mix these. A list of integers is one prompt, not many.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from deepinfer.errors import RequestError
from deepinfer.runtime.sampling_params import SamplingParams

PromptLike = str | Sequence[int] | Mapping[str, Any]


class Prompt(NamedTuple):
    """One prompt: exactly one of the two is set."""

    text: str | None
    token_ids: tuple[int, ...] | None


def parse_prompts(prompts: PromptLike | Sequence[PromptLike]) -> list[Prompt]:
    """All prompts in order. Raises RequestError, naming the place, for anything of another form."""
    if isinstance(prompts, (str, Mapping)) or _is_token_list(prompts):
        return [_parse(prompts, "prompts")]
    if not _is_sequence(prompts):
        raise RequestError(f"{type(prompts).__name__} is not a prompt", where="prompts")
    return [_parse(prompt, f"prompts[{index}]") for index, prompt in enumerate(prompts)]


def parse_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """Parameters for each of `count` prompts; one object serves all. Raises RequestError."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if not _is_sequence(params) or not all(isinstance(entry, SamplingParams) for entry in params):
        raise RequestError("neither SamplingParams nor a list of them", where="sampling_params")
    if len(params) != count:
        raise RequestError(f"{len(params)} entries for {count} prompts", where="sampling_params")
    return list(params)


def _is_sequence(value: object) -> bool:
    """Whether value is a list in all but name: arrays count, text and mappings do not."""
    return (
        hasattr(value, "__len__")
        and hasattr(value, "__getitem__")
        and isinstance(value, Iterable)
        and not isinstance(value, (str, bytes, bytearray, Mapping))
    )


def _is_token_list(value: object) -> bool:
    return _is_sequence(value) and len(value) > 0 and hasattr(value[0], "__index__")  # type: ignore[arg-type,index]


def _parse(prompt: object, where: str) -> Prompt:
    if isinstance(prompt, str):
        return Prompt(prompt, None)
    if isinstance(prompt, Mapping):
        if set(prompt) == {"prompt"} and isinstance(prompt["prompt"], str):
            return Prompt(prompt["prompt"], None)
        if set(prompt) == {"prompt_token_ids"}:
            return Prompt(None, _token_ids(prompt["prompt_token_ids"], where))
        keys = ", ".join(sorted(str(key) for key in prompt))
        raise RequestError(
            f"a prompt dict has the keys {keys or 'none'}, or a value of the wrong kind",
            where=where,
            action='give exactly one of "prompt" (text) and "prompt_token_ids"',
        )
    return Prompt(None, _token_ids(prompt, where))


def _token_ids(values: object, where: str) -> tuple[int, ...]:
    if not _is_sequence(values):
        raise RequestError(f"{type(values).__name__} is not a list of token ids", where=where)
    ids = []
    for value in values:  # type: ignore[attr-defined]
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise RequestError(f"{value!r} is not a token id", where=where)
        try:
            ids.append(operator.index(value))
        except TypeError as error:  # an array, say, has the method but is no integer
            raise RequestError(f"{value!r} is not a token id", where=where) from error
    return tuple(ids)
