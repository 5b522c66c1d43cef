"""Text to token ids and back, by the tokenizer that the artifact carries.

Wraps one `tokenizers.Tokenizer`; truncation and padding that its file may ask for are switched off, because a
prompt is either served whole or refused. Knows nothing of chat formats or of the model.
"""

from collections.abc import Sequence
from functools import cached_property

from tokenizers import Tokenizer as FastTokenizer

from deepinfer.errors import RequestError, TokenizerError

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
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError as error:
            raise RequestError("the prompt is not valid Unicode text", where="prompt") from error
        if num_bytes > max_tokens * _SHORTEST_BOUND and num_bytes > max_tokens * self._longest_token_bytes:
            raise RequestError(
                f"a prompt of {num_bytes} bytes has more than {max_tokens} tokens", where="prompt"
            )
        try:
            ids = self._tokenizer.encode(text).ids
        except Exception as error:  # the library raises a bare Exception
            raise RequestError(f"the tokenizer cannot encode the prompt: {error}", where="prompt") from error
        if text and not ids:
            raise RequestError("the tokenizer finds no token in the prompt", where="prompt")
        return ids

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

    @cached_property
    def _longest_token_bytes(self) -> int:
        return max((len(token.encode()) for token in self._tokenizer.get_vocab()), default=1)
