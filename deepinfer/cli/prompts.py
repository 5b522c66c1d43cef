"""Prompts as a user gives them: on the command line, or as JSON lines in a file.

Owns the syntax and its limits; whether an id or a length suits the model is for the engine to say.
"""

import codecs
import json
from pathlib import Path

import msgspec

from deepinfer.errors import RequestError, UsageError

MAX_FILE_BYTES = 64 * 1024 * 1024
MAX_LINE_BYTES = 8 * 1024 * 1024
MAX_PROMPTS = 65_536
MAX_TOKEN_ID = 2**31 - 1

Prompt = str | list[int]


class _PromptLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a prompts file: exactly one of the two fields."""

    prompt: str | None = None
    prompt_token_ids: list[int] | None = None


def check_prompt(prompt: Prompt, where: str) -> Prompt:
    """The prompt itself; raises RequestError when it is empty, not valid text, or holds an impossible id."""
    if not prompt:
        raise RequestError("the prompt is empty", where=where)
    if isinstance(prompt, str):
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError("the prompt is not valid Unicode text", where=where) from error
        return prompt
    for token in prompt:
        if not 0 <= token <= MAX_TOKEN_ID:
            raise RequestError(f"token id {token} is out of range", where=where)
    return prompt


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a JSON lines file, in order: text, or lists of token ids.

    Raises UsageError when the file cannot be read or is too large, RequestError with the line number when a
    line is not an object with exactly one of `prompt` and `prompt_token_ids`.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", where=str(path)) from error
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(f"is larger than {MAX_FILE_BYTES} bytes", where=str(path))
    lines = data.removeprefix(codecs.BOM_UTF8).removesuffix(b"\n").split(b"\n")
    if not data.strip():
        raise UsageError("holds no prompts", where=str(path))
    if len(lines) > MAX_PROMPTS:
        raise UsageError(f"holds more than {MAX_PROMPTS} prompts", where=str(path))
    return [_read_line(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]


def _read_line(line: bytes, where: str) -> Prompt:
    if len(line) > MAX_LINE_BYTES:
        raise RequestError(f"is longer than {MAX_LINE_BYTES} bytes", where=where)
    if not line.strip():
        raise RequestError("is blank: every line is a prompt", where=where)
    try:
        value = json.loads(line.decode("utf-8"), object_pairs_hook=_unique)
        parsed = msgspec.convert(value, _PromptLine, strict=True)
    except msgspec.ValidationError as error:
        raise RequestError(str(error).replace("`", ""), where=where) from error
    except RecursionError as error:
        raise RequestError("is nested too deeply", where=where) from error
    except ValueError as error:  # not UTF-8, not JSON, a duplicate key, a number beyond all limits
        raise RequestError(f"is not a JSON object: {error}", where=where) from error
    given = [field for field in (parsed.prompt, parsed.prompt_token_ids) if field is not None]
    if len(given) != 1:
        raise RequestError("needs exactly one of prompt and prompt_token_ids", where=where)
    return check_prompt(given[0], where)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key appears twice")
    return fields
