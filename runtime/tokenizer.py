"""Text to token ids and back, by the tokenizer that the artifact carries.

Wraps one `tokenizers.Tokenizer`; truncation and padding that its file may ask for are switched off, because a
prompt is either served whole or refused. Knows nothing of chat formats or of the model.
"""

import re
from collections.abc import Iterable, Sequence
from functools import cached_property

from tokenizers import Tokenizer as FastTokenizer

from deepinfer.errors import RequestError, TokenizerError
from deepinfer.runtime.token_bytes import TokenBytes

TOKENIZER_PATH = "tokenizer/tokenizer.json"
_SHORTEST_BOUND = 64  # bytes per token that any tokenizer is granted


class Tokenizer:
    """The tokenizer of one artifact."""

    def __init__(self, data: bytes) -> None:
        """data: the bytes of tokenizer.json. Raises TokenizerError if they are no tokenizer."""
        try:
            self._tokenizer = FastTokenizer.from_buffer(data)
        except Exception as error:  # the library raises a bare Exception
            raise TokenizerError(f"cannot be used: {error}", where=TOKENIZER_PATH) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str, max_tokens: int) -> list[int]:
        """Token ids of `text`, with the special tokens that the tokenizer adds.

        Raises RequestError for text that is not valid Unicode, that certainly exceeds `max_tokens` (found
        before any work is done on it), or that the tokenizer cannot represent.
        """
        ids = self._encode(text, max_tokens, add_special_tokens=True)
        if text and not ids:
            raise RequestError("the tokenizer finds no token in the prompt", where="prompt")
        return ids

    def encode_written(self, text: str, max_tokens: int) -> list[int]:
        """Token ids of text that says itself where special tokens stand, as a chat template does.

        Raises RequestError as `encode` does.
        """
        return self._encode(text, max_tokens, add_special_tokens=False)

    def encode_plain(self, text: str, max_tokens: int, also: tuple[str, ...] = ()) -> list[int]:
        """Token ids of text in which nothing is a special token or one of `also`, whatever it spells.

        Raises RequestError as `encode` does, and where the tokenizer has no other way to write the text.
        """
        control = {*self.special_tokens, *also}
        control_ids = {self._tokenizer.token_to_id(token) for token in control}
        ids: list[int] = []
        for piece in _cut_within(text, control):
            made = self._encode(piece, max_tokens, add_special_tokens=False)
            if not control_ids.isdisjoint(made):  # the tokenizer's normalisation spelt one
                made = [
                    token
                    for character in piece
                    for token in self._encode(character, max_tokens, add_special_tokens=False)
                ]
            if not control_ids.isdisjoint(made):
                raise RequestError("the text spells a control token", where="prompt")
            ids += made
        return ids

    def token_id(self, text: str) -> int | None:
        """The id of the token that is written so."""
        return self._tokenizer.token_to_id(text)

    @cached_property
    def special_tokens(self) -> frozenset[str]:
        """The texts of the tokens that the file declares to be special."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special and token.content)

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """What each token adds to a text. Raises TokenizerError for a decoder that cannot stream."""
        return TokenBytes(self._tokenizer)

    def encode_word(self, word: str) -> list[tuple[int, ...]]:
        """Token ids that write `word` at the start of a text and, if that is another token, after a space.

        Without special tokens. Raises RequestError, naming `bad_words`.
        """
        forms = []
        for text in (word.lstrip(), " " + word.lstrip()):
            try:
                forms.append(tuple(self._tokenizer.encode(text, add_special_tokens=False).ids))
            except Exception as error:  # the library raises a bare Exception
                raise RequestError(f"the tokenizer cannot encode it: {error}", where="bad_words") from error
        start, inside = forms
        if not start:
            raise RequestError(f"the tokenizer finds no token in {word!r}", where="bad_words")
        # A space that is a token of its own gives a longer form, which the shorter one covers.
        return [start, inside] if len(inside) == len(start) and inside[0] != start[0] else [start]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens; ids the tokenizer does not know give nothing."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def _encode(self, text: str, max_tokens: int, *, add_special_tokens: bool) -> list[int]:
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError as error:
            raise RequestError("the prompt is not valid Unicode text", where="prompt") from error
        if num_bytes > max_tokens * _SHORTEST_BOUND and num_bytes > max_tokens * self._longest_token_bytes:
            raise RequestError(
                f"a prompt of {num_bytes} bytes has more than {max_tokens} tokens", where="prompt"
            )
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except Exception as error:  # the library raises a bare Exception
            raise RequestError(f"the tokenizer cannot encode the prompt: {error}", where="prompt") from error

    @cached_property
    def _longest_token_bytes(self) -> int:
        return max((len(token.encode()) for token in self._tokenizer.get_vocab()), default=1)


def _cut_within(text: str, control: Iterable[str]) -> list[str]:
    """`text` cut behind the first character of every control token that it spells."""
    pattern = re.compile("|".join(map(re.escape, sorted(control))) or "(?!)")
    places, start = [0], 0
    while found := pattern.search(text, start):
        start = found.start() + 1
        places.append(start)
    return [text[a:b] for a, b in zip(places, [*places[1:], len(text)], strict=True) if a < b]
