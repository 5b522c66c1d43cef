"""Conversations to token ids: by the checkpoint's chat template, or by the model family's own format.

Whatever a message spells is encoded as text; only the format writes control tokens.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from deepinfer.errors import RequestError, TokenizerError
from deepinfer.runtime import deepseek_chat
from deepinfer.runtime.chat_messages import Message, parse_messages
from deepinfer.runtime.chat_template import ChatTemplate
from deepinfer.runtime.tokenizer import Tokenizer

CONFIG_PATH = "tokenizer/tokenizer_config.json"
TEMPLATE_PATH = "tokenizer/chat_template.jinja"
_NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
_OWN_FORMAT = "deepseek_v41"
_CHARACTERS_PER_TOKEN = 4  # more text than that per token of the context is no prompt
MAX_TOOLS = 128


class ChatFormat(Protocol):
    """How one model takes conversations."""

    def encode(
        self,
        messages: object,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        reasoning_effort: str | int | None = None,
    ) -> list[int]:
        """Token ids of a conversation.

        messages: dicts with `role` and `content`, or `Message` objects. add_generation_prompt: an answer is
        to follow. continue_final_message: the answer is begun by the last message. reasoning_effort: for
        formats that know it. Raises RequestError.
        """

    def answer_message(self, text: str) -> dict[str, str]:
        """An answer as the assistant's message of a conversation that goes on."""


def chat_format(
    files: Mapping[str, bytes], tokenizer: Tokenizer | None, model_type: str, max_model_len: int
) -> ChatFormat | None:
    """The format of an artifact, from its files in tokenizer/; None if it has none. Raises TokenizerError."""
    if tokenizer is None:
        return None
    config = _config(files.get(CONFIG_PATH, b"{}"))
    source = _template_source(files, config)
    if source is not None:
        named = {name: text for name in _NAMED_TOKENS if (text := _token_text(config.get(name))) is not None}
        return TemplateFormat(source, named, tokenizer, max_model_len)
    if model_type == _OWN_FORMAT and all(
        tokenizer.token_id(token) is not None for token in deepseek_chat.CONTROL_TOKENS
    ):
        return DeepSeekFormat(tokenizer, max_model_len)
    return None


class DeepSeekFormat:
    """The format of DeepSeek-V4.1."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: int) -> None:
        self._tokenizer, self._max_model_len = tokenizer, max_model_len

    def encode(
        self,
        messages: object,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        reasoning_effort: str | int | None = None,
    ) -> list[int]:
        """See `ChatFormat`. reasoning_effort: 1 to 100, low, high (the default), max, or none."""
        if tools:
            raise RequestError("tools are not supported for this model", where="tools")
        parts = deepseek_chat.encode_conversation(
            _parsed(messages, "\n\n", add_generation_prompt, continue_final_message),
            reasoning_effort="high" if reasoning_effort is None else reasoning_effort,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        ids: list[int] = []
        for part in parts:
            if isinstance(part, deepseek_chat.Control):
                token_id = self._tokenizer.token_id(part)
                assert token_id is not None, part
                ids.append(token_id)
            else:
                ids += self._tokenizer.encode_plain(part, self._max_model_len, deepseek_chat.CONTROL_TOKENS)
        return ids

    def answer_message(self, text: str) -> dict[str, str]:
        """See `ChatFormat`. What was reasoned is a field of its own."""
        reasoning, end, content = text.partition(deepseek_chat.END_THINK)
        if not end:
            return {"role": "assistant", "content": text}
        return {"role": "assistant", "content": content, "reasoning_content": reasoning}


class TemplateFormat:
    """The format that a chat template writes."""

    def __init__(
        self, source: str, named_tokens: Mapping[str, str], tokenizer: Tokenizer, max_model_len: int
    ) -> None:
        self._template = ChatTemplate(source, named_tokens, tokenizer.special_tokens)
        self._tokenizer, self._max_model_len = tokenizer, max_model_len

    def encode(
        self,
        messages: object,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        reasoning_effort: str | int | None = None,
    ) -> list[int]:
        """See `ChatFormat`. reasoning_effort: given to the template, which may know what to do with it."""
        parsed = _parsed(messages, "\n", add_generation_prompt, continue_final_message)
        if tools is not None and (
            not isinstance(tools, (list, tuple))
            or len(tools) > MAX_TOOLS
            or not all(isinstance(tool, Mapping) for tool in tools)
        ):
            raise RequestError(f"no list of at most {MAX_TOOLS} tools", where="tools")
        values: dict[str, Any] = {
            "messages": [message.as_values() for message in parsed],
            "add_generation_prompt": add_generation_prompt,
        }
        if tools:
            values["tools"] = list(tools)
        if reasoning_effort is not None:
            values["reasoning_effort"] = reasoning_effort
        parts = self._template.render(
            values, self._max_model_len * _CHARACTERS_PER_TOKEN, open_end=continue_final_message
        )
        return [
            token for part in parts for token in self._tokenizer.encode_written(part, self._max_model_len)
        ]

    def answer_message(self, text: str) -> dict[str, str]:
        """See `ChatFormat`. The text as it is: the template knows what to do with it."""
        return {"role": "assistant", "content": text}


def _parsed(
    messages: object, joint: str, add_generation_prompt: bool, continue_final_message: bool
) -> list[Message]:
    parsed = parse_messages(messages, joint)
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "an answer is either begun or continued",
            where="continue_final_message",
            action="set add_generation_prompt to false",
        )
    return parsed


def _config(data: bytes) -> dict[str, Any]:
    try:
        config = json.loads(data)
    except ValueError as error:
        raise TokenizerError(f"is not JSON: {error}", where=CONFIG_PATH) from error
    return config if isinstance(config, dict) else {}


def _template_source(files: Mapping[str, bytes], config: Mapping[str, Any]) -> str | None:
    if TEMPLATE_PATH in files:
        try:
            return files[TEMPLATE_PATH].decode()
        except UnicodeDecodeError as error:
            raise TokenizerError("is not UTF-8", where=TEMPLATE_PATH) from error
    source = config.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = next(
            (
                entry.get("template")
                for entry in source
                if isinstance(entry, dict) and entry.get("name") == "default"
            ),
            None,
        )
    return source if isinstance(source, str) else None


def _token_text(value: object) -> str | None:
    """The text of a token, which older files write as a dict."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None
