"""Fields of config.json, one by one: types, ranges, and how a fault is reported.

Knows nothing of which fields a model has.
"""

import dataclasses
from typing import Any, NoReturn

from deepinfer.errors import ConfigError, UnsupportedModelError
from deepinfer.graphs.config_schema import RopeScaling
from deepinfer.graphs.strict_json import printable

RESTORE = "use the config.json released with the weights"


def where_of(key: str) -> str:
    """How a message names a key."""
    return f"config.json {printable(key)}"


def show(value: Any) -> str:
    """A value in a message, cut if it is long."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def same(value: Any, wanted: Any) -> bool:
    """Equality without True == 1."""
    return value == wanted and isinstance(value, bool) == isinstance(wanted, bool)


def unsupported(key: str, value: Any, allowed: Any) -> NoReturn:
    """Raise UnsupportedModelError for a value that asks for other arithmetic than the allowed ones."""
    raise UnsupportedModelError(
        f"{show(value)} is not implemented; supported: {show(allowed)}",
        where=where_of(key),
        action="use a model that this version supports",
    )


def unknown_key(key: str) -> NoReturn:
    """Raise UnsupportedModelError for a key that nothing here understands."""
    raise UnsupportedModelError(
        "this key is not known and may change the model's arithmetic",
        where=where_of(key),
        action="remove it only if you know that it does not",
    )


def integer(key: str, value: Any, minimum: int, maximum: int) -> int:
    """The value as an integer of a range; ConfigError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{show(value)} must be an integer", where=where_of(key), action=RESTORE)
    if not minimum <= value <= maximum:
        raise ConfigError(
            f"{show(value)} must be between {minimum} and {maximum}", where=where_of(key), action=RESTORE
        )
    return value


def number(key: str, value: Any, maximum: float) -> float:
    """The value as a positive number of at most `maximum`; ConfigError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{show(value)} must be a number", where=where_of(key), action=RESTORE)
    if not 0 < value <= maximum:  # false for NaN and infinity too
        raise ConfigError(
            f"{show(value)} must be above 0 and at most {maximum:g}", where=where_of(key), action=RESTORE
        )
    return float(value)


def integers(key: str, value: Any, minimum: int, maximum: int) -> tuple[int, ...]:
    """The value as a list of integers of a range; ConfigError otherwise."""
    if not isinstance(value, list):
        raise ConfigError(f"{show(value)} must be a list of integers", where=where_of(key), action=RESTORE)
    return tuple(integer(f"{key}[{i}]", item, minimum, maximum) for i, item in enumerate(value))


def _parse_field(key: str, value: Any, meta: Any) -> Any:
    match meta["kind"]:
        case "int":
            return integer(key, value, meta["min"], meta["max"])
        case "optional_int":
            return None if value is None else integer(key, value, meta["min"], meta["max"])
        case "float":
            return number(key, value, meta["max"])
        case "ints":
            return integers(key, value, meta["min"], meta["max"])
        case "bool":
            if not isinstance(value, bool):
                raise ConfigError(f"{show(value)} must be true or false", where=where_of(key), action=RESTORE)
            return value
        case "choice":
            if value not in meta["choices"]:
                unsupported(key, value, list(meta["choices"]))
            return value
        case "rope":
            return _parse_rope(key, value)
    raise AssertionError(meta)


def object_of(key: str, value: Any) -> dict[str, Any]:
    """A copy of the value, which must be an object; ConfigError otherwise."""
    if not isinstance(value, dict):
        raise ConfigError(f"{show(value)} must be an object", where=where_of(key), action=RESTORE)
    return dict(value)


def parse_group(cls: type, prefix: str, values: dict[str, Any]) -> dict[str, Any]:
    """Take the fields of dataclass `cls` out of `values`; what is left there was not understood."""
    parsed = {}
    for field in dataclasses.fields(cls):
        if field.metadata["kind"] == "given":
            continue
        if field.name in values:
            parsed[field.name] = _parse_field(prefix + field.name, values.pop(field.name), field.metadata)
        elif field.default is dataclasses.MISSING:
            raise ConfigError("the field is missing", where=where_of(prefix + field.name), action=RESTORE)
    return parsed


def _parse_rope(key: str, value: Any) -> RopeScaling:
    values = object_of(key, value)
    if "type" in values:  # older spelling of rope_type
        legacy = values.pop("type")
        if values.setdefault("rope_type", legacy) != legacy:
            raise ConfigError("rope_type and type differ", where=where_of(key), action=RESTORE)
    scaling = RopeScaling(**parse_group(RopeScaling, f"{key}.", values))
    for unknown in values:
        unknown_key(f"{key}.{unknown}")
    return scaling
