"""The messages of a conversation, as users of chat interfaces write them, checked once. Plain Python."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from deepinfer.errors import RequestError

MAX_MESSAGES: Final = 1024
_KEYS = {"role", "content", "reasoning_content", "name", "tool_calls", "tool_call_id"}


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `content` is one text, whatever parts it came in."""

    role: str
    content: str
    reasoning_content: str = ""
    name: str | None = None
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    tool_call_id: str | None = None

    def as_values(self) -> dict[str, Any]:
        """What a template gets: the fields that are set."""
        values: dict[str, Any] = {"role": self.role, "content": self.content}
        for name in ("reasoning_content", "name", "tool_calls", "tool_call_id"):
            if value := getattr(self, name):
                values[name] = list(value) if name == "tool_calls" else value
        return values


def parse_messages(messages: object, joint: str = "\n") -> list[Message]:
    """`messages` as a list of `Message`; `joint` stands between the text parts of one.

    Raises RequestError, naming the place.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise RequestError('no list of messages: [{"role": ..., "content": ...}]', where="messages")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(f"{len(messages)} messages, more than {MAX_MESSAGES}", where="messages")
    return [_parse(message, f"messages[{number}]", joint) for number, message in enumerate(messages)]


def _parse(message: object, where: str, joint: str) -> Message:
    if isinstance(message, Message):
        return message
    if not isinstance(message, Mapping):
        raise RequestError(f"{type(message).__name__} is no message", where=where)
    unknown = sorted(str(key) for key in set(message) - _KEYS)
    if unknown:
        raise RequestError(f"unknown key: {', '.join(unknown)}", where=where)
    texts = {}
    for key in ("role", "reasoning_content", "name", "tool_call_id"):
        value = message.get(key)
        if value is not None and not isinstance(value, str):
            raise RequestError("no text", where=f"{where}.{key}")
        texts[key] = value or ""
    if not texts["role"]:
        raise RequestError("a message needs a role", where=where)
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, (list, tuple)) or not all(isinstance(call, Mapping) for call in calls):
        raise RequestError("no list of calls", where=f"{where}.tool_calls")
    content = _content(message.get("content"), f"{where}.content", joint)
    return Message(
        texts["role"],
        content,
        texts["reasoning_content"],
        texts["name"] or None,
        tuple(calls),
        texts["tool_call_id"] or None,
    )


def _content(value: object, where: str, joint: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, (list, tuple)):
        raise RequestError("neither text nor a list of parts", where=where)
    texts = []
    for number, part in enumerate(value):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                f"a part of the type {kind!r} cannot be used",
                where=f"{where}[{number}]",
                action='text parts can: {"type": "text", "text": ...}',
            )
        texts.append(part["text"])
    return joint.join(texts)
