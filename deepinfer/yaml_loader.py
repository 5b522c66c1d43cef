"""A strict reader of YAML settings files: scalars mean what YAML 1.2 says, anything clever is refused.

Owns the syntax: which scalars are numbers, that keys are unique, that a document is small and shallow. It
does not know any setting. Differences from a plain PyYAML `SafeLoader`:

- `off`, `on`, `yes`, `no`, `y`, `n` are strings; only `true` and `false` are booleans.
- `1e-5` is a number. `1_000`, `0x10`, `010`, `1:30` and dates are strings, so a number field refuses them.
- Duplicate keys, anchors, aliases, merge keys, explicit tags and several documents are errors with a line.
"""

import math
import re
from collections.abc import Hashable
from pathlib import Path

import yaml

from deepinfer.errors import SettingsError

MAX_FILE_BYTES = 64 * 1024
MAX_DEPTH = 16

_SCALARS: tuple[tuple[str, str, list[str | None]], ...] = (
    ("tag:yaml.org,2002:null", r"(?:~|null|)", ["~", "n", ""]),
    ("tag:yaml.org,2002:bool", r"(?:true|false)", ["t", "f"]),
    ("tag:yaml.org,2002:int", r"[-+]?(?:0|[1-9][0-9]*)", list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(?:(?:0|[1-9][0-9]*)\.[0-9]*|\.[0-9]+|(?:0|[1-9][0-9]*)(?=[eE]))(?:[eE][-+]?[0-9]+)?",
        list("-+.0123456789"),
    ),
)


def read_yaml(path: Path) -> dict[str, object]:
    """The mapping that a settings file holds; an empty file is an empty mapping.

    Raises SettingsError, with the file and the line, when it cannot be read or is not strict YAML.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise SettingsError(f"cannot be read: {error.strerror}", where=str(path)) from error
    if len(data) > MAX_FILE_BYTES:
        raise SettingsError(f"is larger than {MAX_FILE_BYTES} bytes", where=str(path))
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SettingsError("is not UTF-8 text", where=str(path)) from error
    return parse_yaml(text, where=str(path))


def parse_yaml(text: str, *, where: str) -> dict[str, object]:
    """Like `read_yaml`, for text already in memory; `where` names it in errors."""
    try:
        value = _StrictLoader(text).get_single_data()
    except yaml.YAMLError as error:
        raise SettingsError(_describe(error), where=_place(where, error)) from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise SettingsError(f"must be a mapping of settings, not a {_kind(value)}", where=where)
    return value


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader with its own scalar rules; it rejects what can surprise or explode."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's API)

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise _refused("anchors and aliases are not allowed", event.start_mark)
        if getattr(event, "tag", None):
            raise _refused(f"tags such as {event.tag!r} are not allowed", event.start_mark)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _refused(f"is nested deeper than {MAX_DEPTH} levels", event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:str":
                raise _refused("keys must be words", key.start_mark)
            if key.value in seen:
                raise _refused(f"the key {key.value!r} appears twice", key.start_mark)
            seen.add(key.value)
        return yaml.constructor.BaseConstructor.construct_mapping(self, node, deep=deep)

    def construct_finite_float(self, node: yaml.ScalarNode) -> float:
        number = float(node.value)
        if not math.isfinite(number):
            raise _refused(f"{node.value} is too large for a number", node.start_mark)
        return number

    def construct_plain_int(self, node: yaml.ScalarNode) -> int:
        if len(node.value) > 20:  # beyond 64 bits; also keeps int() away from its digit limit
            raise _refused("the number has too many digits", node.start_mark)
        return int(node.value)


for _tag, _pattern, _first in _SCALARS:
    _StrictLoader.add_implicit_resolver(_tag, re.compile(rf"^{_pattern}$"), _first)
_StrictLoader.add_constructor("tag:yaml.org,2002:float", _StrictLoader.construct_finite_float)
_StrictLoader.add_constructor("tag:yaml.org,2002:int", _StrictLoader.construct_plain_int)


def _refused(problem: str, mark: yaml.Mark) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def _describe(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem:
        parts = (error.context, error.problem) if error.context_mark is None else (error.problem,)
        return " ".join(" ".join(part for part in parts if part).split())
    return " ".join(str(error).split())[:200]


def _place(where: str, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return f"{where}, line {mark.line + 1}" if mark is not None else where


def _kind(value: object) -> str:
    return "list" if isinstance(value, list) else "string" if isinstance(value, str) else "single value"
