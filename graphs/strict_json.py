"""Reading JSON that may be hostile: size cap, no duplicate keys, no NaN or infinity, one object at the top.

Owns the strict parse of every JSON file of a model directory. Knows nothing about what the fields mean.
"""

import json
from pathlib import Path
from typing import Any, NoReturn

from deepinfer.errors import DeepInferError


def printable(text: str, limit: int = 200) -> str:
    """`text` of a file made fit for a message: shortened, and nothing but visible ASCII."""
    return ascii(text[:limit])[1:-1]


class _StrictJsonFault(ValueError):
    """What the parser's hooks raise; turned into the caller's error class with the file name."""


def _refuse_constant(name: str) -> NoReturn:
    raise _StrictJsonFault(f"the number {name} is not JSON")


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise _StrictJsonFault(f"the key {key[:100]!r} appears twice in one object")
        result[key] = value
    return result


def parse_json_object(data: bytes, where: str, error: type[DeepInferError]) -> dict[str, Any]:
    """Parse UTF-8 `data` as one JSON object.

    Raises `error` naming `where` for bad UTF-8, bad JSON, duplicate keys, NaN or infinity, nesting beyond the
    interpreter's limit, and anything but an object at the top.
    """
    try:
        value = json.loads(
            data.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_unique_pairs
        )
    except (ValueError, RecursionError) as fault:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        reason = "it is nested too deeply" if isinstance(fault, RecursionError) else str(fault)
        raise error(f"not valid JSON: {reason}", where=where, action="restore the file") from fault
    if not isinstance(value, dict):
        raise error(
            f"a JSON object was expected, found {type(value).__name__}",
            where=where,
            action="restore the file",
        )
    return value


def read_json_object(path: Path, max_bytes: int, error: type[DeepInferError]) -> dict[str, Any]:
    """Read the file `path` of at most `max_bytes` bytes as one JSON object; raises `error`."""
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as fault:
        raise error(
            f"cannot be read: {fault.strerror or fault}", where=str(path), action="check the model directory"
        ) from fault
    if len(data) > max_bytes:
        raise error(f"larger than the {max_bytes} bytes allowed", where=str(path), action="restore the file")
    return parse_json_object(data, str(path), error)
