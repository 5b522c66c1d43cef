"""What users give, brought to what an engine takes: prompts and conversations to token ids, words to ids.

Owns the limits on text. Used by any thread; changes nothing.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from deepinfer.errors import RequestError
from deepinfer.runtime.chat import ChatFormat
from deepinfer.runtime.prompts import Prompt
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.tokenizer import Tokenizer


class InputProcessor:
    """The text side of one model, inwards."""

    def __init__(self, tokenizer: Tokenizer | None, chat: ChatFormat | None, max_model_len: int) -> None:
        self.tokenizer, self.chat, self._max_model_len = tokenizer, chat, max_model_len

    def encode(self, prompt: Prompt) -> Sequence[int]:
        """Token ids of a prompt. Raises RequestError."""
        if prompt.token_ids is not None:
            return prompt.token_ids
        assert prompt.text is not None
        if self.tokenizer is None:
            raise RequestError(
                "the artifact has no tokenizer, so text cannot be used",
                where="prompt",
                action='give token ids: {"prompt_token_ids": [...]}',
            )
        return self.tokenizer.encode(prompt.text, self._max_model_len)

    def encode_chat(
        self,
        messages: object,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        reasoning_effort: str | int | None = None,
    ) -> list[int]:
        """Token ids of a conversation, see `ChatFormat.encode`. Raises RequestError."""
        if self.chat is None:
            raise RequestError(
                "the artifact knows no form of conversations: its checkpoint has no chat template",
                where="messages",
                action="write the prompt yourself, or build from a checkpoint with a chat_template.jinja",
            )
        return self.chat.encode(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            reasoning_effort=reasoning_effort,
        )

    def with_words_as_ids(self, params: SamplingParams) -> SamplingParams:
        """Parameters whose `bad_words` are token ids; without a tokenizer the engine refuses text."""
        tokenizer = self.tokenizer
        if tokenizer is None or not any(isinstance(word, str) for word in params.bad_words):
            return params
        words = [
            ids
            for word in params.bad_words
            for ids in (tokenizer.encode_word(word) if isinstance(word, str) else [word])
        ]
        return dataclasses.replace(params, bad_words=tuple(words))
