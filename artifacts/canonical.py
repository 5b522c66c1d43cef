"""JSON as the artifact format allows it: one way to write a value, one strict way to read it.

Writing: UTF-8, keys sorted by code point, no white space, no trailing newline, no NaN or infinity, integers
exact and within 64 bits, floats in their shortest form that reads back equal. Equal values give equal bytes.
Reading: size and nesting are capped before the parser runs; duplicate keys, NaN, numbers that overflow,
invalid UTF-8 and lone surrogates are refused. Every refusal is a `DeepInferError`.

This file knows nothing of what the values mean.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from deepinfer.errors import ArtifactCorruptError, ArtifactFormatError

MAX_JSON_BYTES = 16 * 1024 * 1024
MAX_NESTING = 64
MAX_INTEGER = 2**63 - 1
MIN_INTEGER = -(2**63)

_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_STRING = re.compile(rb'"[^"]*"')
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_BRACES_TO_BRACKETS = bytes.maketrans(b"{}", b"[]")
_REBUILD = "the file was changed or cut off: copy the artifact again or rebuild it"

T = TypeVar("T")


def canonical_bytes(value: object) -> bytes:
    """The one byte string that stands for `value` (a schema struct, or dicts, lists and scalars).

    Raises ArtifactFormatError for anything JSON cannot hold exactly.
    """
    try:
        plain = msgspec.to_builtins(value)
    except (TypeError, RecursionError) as error:
        raise ArtifactFormatError(f"a value cannot be written as JSON: {error}") from error
    _check_value(plain, depth=0)
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ArtifactFormatError("a text holds a lone surrogate, which UTF-8 cannot carry") from error


def artifact_id_of(manifest_bytes: bytes) -> str:
    """The identity of an artifact: the SHA-256 of its canonical manifest, as 64 hex digits."""
    return hashlib.sha256(manifest_bytes).hexdigest()


def parse_json(data: bytes, *, where: str) -> Any:
    """Parse `data` strictly; `where` names the file in errors.

    Raises ArtifactCorruptError when the bytes are not JSON that this format allows.
    """
    if len(data) > MAX_JSON_BYTES:
        raise ArtifactCorruptError(
            f"{len(data)} bytes of JSON, more than the limit of {MAX_JSON_BYTES}",
            where=where,
            action=_REBUILD,
        )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArtifactCorruptError(
            f"not UTF-8 at byte {error.start}", where=where, action=_REBUILD
        ) from error
    _check_nesting(data, where)
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_int=_bounded_int,
            parse_float=_finite_float,
            parse_constant=_refuse_constant,
        )
        if b"\\u" in data:  # only an escape can smuggle in half a surrogate pair
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeEncodeError are ValueErrors
        raise ArtifactCorruptError(f"not valid JSON: {error}", where=where, action=_REBUILD) from error
    return value


def decode_struct(data: bytes, struct_type: type[T], *, where: str) -> T:
    """Parse `data` strictly into a closed struct of the schema.

    Raises ArtifactCorruptError for bytes that are not JSON, ArtifactFormatError for JSON of another shape.
    """
    value = parse_json(data, where=where)
    return convert_struct(value, struct_type, where=where)


def convert_struct(value: object, struct_type: type[T], *, where: str) -> T:
    """Turn parsed JSON into a closed struct; a field that does not fit is an ArtifactFormatError."""
    try:
        return msgspec.convert(value, struct_type, strict=True)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ArtifactFormatError(
            str(error), where=where, action="rebuild it with this version of deepinfer"
        ) from error


def _check_value(value: object, depth: int) -> None:
    if depth > MAX_NESTING:
        raise ArtifactFormatError(f"a value is nested deeper than {MAX_NESTING} levels")
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise ArtifactFormatError(f"a key must be a text, got {key!r}")
        _check_all(value.values(), depth)
    elif isinstance(value, list | tuple):
        _check_all(value, depth)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ArtifactFormatError(f"a number must be finite, got {value}")
    elif isinstance(value, int) and not MIN_INTEGER <= value <= MAX_INTEGER:
        raise ArtifactFormatError(f"an integer must fit 64 bits, got one of {value.bit_length()} bits")


def _check_all(values: Iterable[object], depth: int) -> None:
    for value in values:
        _check_value(value, depth + 1)


def _check_nesting(data: bytes, where: str) -> None:
    """Refuse deep nesting before the parser recurses: strip innermost brackets once per allowed level."""
    brackets = _STRING.sub(b"", _ESCAPE.sub(b"", data)).translate(_BRACES_TO_BRACKETS, _NOT_BRACKETS)
    for _ in range(MAX_NESTING):
        if not brackets:
            return
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        raise ArtifactCorruptError(
            f"brackets do not match, or nest deeper than {MAX_NESTING} levels", where=where, action=_REBUILD
        )


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:100]!r} occurs twice")
    return result


def _bounded_int(digits: str) -> int:
    if len(digits) > 20:  # before int(), whose cost grows with the square of the length
        raise ValueError("an integer does not fit 64 bits")
    value = int(digits)
    if not MIN_INTEGER <= value <= MAX_INTEGER:
        raise ValueError("an integer does not fit 64 bits")
    return value


def _finite_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError("a number overflows")
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not allowed")
