"""How DeepSeek-V4.1 writes a conversation as tokens; the checkpoint has no template that says it.

Control tokens are ids, never text: what a message spells stays text. The instruction texts for tools and for
response formats are assets of the release that a checkpoint does not carry, so both are refused.
"""

from collections.abc import Sequence
from typing import Final

from deepinfer.errors import RequestError
from deepinfer.runtime.chat_messages import Message

BOS: Final = "<｜begin▁of▁sentence｜>"
EOS: Final = "<｜end▁of▁sentence｜>"
SYSTEM: Final = "<｜System｜>"
USER: Final = "<｜User｜>"
ASSISTANT: Final = "<｜Assistant｜>"
REMINDER: Final = "<｜latest_reminder｜>"
THINK: Final = "<think>"
END_THINK: Final = "</think>"
CALLS: Final = "｜DSML｜"
CONTROL_TOKENS: Final = (BOS, EOS, SYSTEM, USER, ASSISTANT, REMINDER, THINK, END_THINK, CALLS)
EFFORTS: Final = {"low": 50, "high": 75, "xhigh": 75, "max": 100}
NO_EFFORT: Final = "none"

_EFFORT_LINE = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"


class Control(str):
    """The text of a control token, told apart from text that a message holds."""

    __slots__ = ()


def encode_conversation(
    messages: Sequence[Message],
    *,
    reasoning_effort: str | int = "high",
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> list[str]:
    """The conversation as texts and `Control` tokens in turn.

    reasoning_effort: 1 to 100, a name of `EFFORTS`, or "none" for answers without reasoning.
    add_generation_prompt: end with the head of an answer. continue_final_message: leave the last message, an
    assistant's, open instead. Raises RequestError for messages that the format has no form for.
    """
    effort = _effort(reasoning_effort)
    turns = _merged(messages)
    _check_end(turns, add_generation_prompt, continue_final_message)
    last_user = max((n for n, turn in enumerate(turns) if _asks(n, turn)), default=-1)
    parts: list[str] = [Control(BOS)]
    if effort is not None or turns[0].role == "system":
        parts.append(Control(SYSTEM))
    if effort is not None:
        parts.append(_EFFORT_LINE.format(effort))
    for number, turn in enumerate(turns):
        final = number == len(turns) - 1
        parts += _turn(number, turn, thinks=effort is not None and number > last_user)
        if turn.role == "assistant" and not (final and continue_final_message):
            parts.append(Control(EOS))
        following = None if final else turns[number + 1].role
        heads = add_generation_prompt if final else following in ("assistant", "latest_reminder")
        if heads and _asks(number, turn):
            thinking = effort is not None and number >= last_user
            parts += [Control(ASSISTANT), Control(THINK if thinking else END_THINK)]
    return [part for part in parts if part]


def _effort(value: str | int) -> int | None:
    if value == NO_EFFORT:
        return None
    number = EFFORTS.get(value) if isinstance(value, str) else value
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= 100:
        names = ", ".join([*EFFORTS, NO_EFFORT])
        raise RequestError(
            f"{value!r} is no effort", where="reasoning_effort", action=f"allowed: 1 to 100, {names}"
        )
    return number


def _check_end(turns: Sequence[Message], add_generation_prompt: bool, continue_final_message: bool) -> None:
    if continue_final_message and turns[-1].role != "assistant":
        raise RequestError(
            "the last message is not the assistant's, so it cannot be continued",
            where="continue_final_message",
        )
    if add_generation_prompt and not _asks(len(turns) - 1, turns[-1]):
        raise RequestError(
            f"no answer follows a last message of the role {turns[-1].role!r}",
            where="add_generation_prompt",
            action="end with a user's message, or continue the assistant's with continue_final_message",
        )


def _asks(number: int, turn: Message) -> bool:
    """Whether an answer follows this turn; a system message in the middle asks like a user."""
    return turn.role == "user" or (turn.role == "system" and number > 0)


def _turn(number: int, turn: Message, *, thinks: bool) -> list[str]:
    if turn.role == "system":
        return [*([Control(SYSTEM)] if number else []), turn.content]
    if turn.role == "user":
        return [Control(USER), turn.content]
    if turn.role == "latest_reminder":
        return [Control(REMINDER), turn.content]
    # What was reasoned before the last question is left out.
    reasoning = [turn.reasoning_content, Control(END_THINK)] if thinks else []
    return [*reasoning, turn.content]


def _merged(messages: Sequence[Message]) -> list[Message]:
    """Turns of the format: tool results and consecutive questions are one user's."""
    turns: list[Message] = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if message.tool_calls:
            raise RequestError("calls of tools are not supported for this model", where=where)
        if message.role not in ("system", "developer", "user", "assistant", "tool", "latest_reminder"):
            raise RequestError(f"the role {message.role!r} is unknown to this model", where=where)
        content = message.content
        if message.role == "tool":
            content = f"<tool_result>{content}</tool_result>"
        role = "user" if message.role in ("tool", "developer") else message.role
        if role == "user" and turns and turns[-1].role == "user":
            content = f"{turns.pop().content}\n\n{content}"
        turns.append(Message(role, content, message.reasoning_content))
    return turns
