"""One request's text, token by token: which bytes a token adds, and which characters they complete.

The text continues the prompt: a space that belongs between the two is kept, and a character that the prompt
leaves unfinished is finished here. What a token costs depends on its own length alone. Knows nothing of stop
strings.
"""

import codecs
from collections.abc import Sequence

from deepinfer.runtime.token_bytes import TokenBytes

_LONGEST_INCOMPLETE = 3  # bytes of a UTF-8 sequence that lacks its last


class Utf8Decoder:
    """Bytes in, characters out as soon as they are certain; what is no UTF-8 becomes U+FFFD.

    The characters are those of `bytes.decode("utf-8", "replace")` on all bytes together. Only bytes that can
    still become a character are waited for, at most three.
    """

    __slots__ = ("pending",)

    def __init__(self, pending: bytes = b"") -> None:
        self.pending = pending

    def decode(self, data: bytes, *, final: bool = False) -> str:
        """The characters that `data` completes; with `final`, what is unfinished counts as no UTF-8."""
        data = self.pending + data
        text, used = codecs.utf_8_decode(data, "replace", final)
        rest = data[used:]
        if rest[:1] == b"\xed" and rest[1:2] >= b"\xa0":  # a surrogate's: waited for by Python, in vain
            text, rest = text + rest.decode("utf-8", "replace"), b""
        self.pending = rest
        return text


class Detokenizer:
    """Where one request's text stands: `push` a token, then `utf8.decode` the bytes it adds."""

    __slots__ = ("_first", "_later", "_skipped", "_strip_left", "_token_bytes", "utf8")

    def __init__(
        self,
        token_bytes: TokenBytes,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        """skip_special_tokens: whether special tokens, in the prompt too, add nothing to the text."""
        self._token_bytes = token_bytes
        self._skipped = token_bytes.special_token_ids if skip_special_tokens else frozenset()
        self._first, self._strip_left = True, token_bytes.leading_strip.times
        self._later = b""
        self.utf8 = Utf8Decoder()
        self._continue_prompt(prompt_token_ids)

    def push(self, token_id: int) -> bytes:
        """The bytes that this token adds to the text; none for an unknown id or a special token skipped."""
        piece = None if token_id in self._skipped else self._token_bytes.piece(token_id, self._first)
        if piece is None:
            return b""
        data = self._later + piece.now
        self._first, self._later = False, piece.later
        strip = self._token_bytes.leading_strip.byte
        while self._strip_left and data:
            self._strip_left = self._strip_left - 1 if data[:1] == strip else 0
            data = data[1:] if data[:1] == strip else data
        return data

    def copy(self) -> "Detokenizer":
        """One that goes on from here by itself."""
        twin = object.__new__(Detokenizer)
        for name in Detokenizer.__slots__:
            setattr(twin, name, getattr(self, name))
        twin.utf8 = Utf8Decoder(self.utf8.pending)
        return twin

    def _continue_prompt(self, prompt_token_ids: Sequence[int]) -> None:
        """Brings the state to the end of the prompt, from its first tokens and its last bytes."""
        settled, head = 0, b""
        while settled < len(prompt_token_ids) and (self._first or self._strip_left):
            head += self.push(prompt_token_ids[settled])
            settled += 1
        tail: list[bytes] = []
        for token_id in reversed(prompt_token_ids[settled:]):
            piece = None if token_id in self._skipped else self._token_bytes.piece(token_id, False)
            if piece is None:
                continue
            if not tail:
                head, self._later = head + self._later, piece.later
            tail.append(piece.now + piece.later if tail else piece.now)
            if sum(map(len, tail)) >= _LONGEST_INCOMPLETE:
                break
        self.utf8.decode((head + b"".join(reversed(tail)))[-_LONGEST_INCOMPLETE:])
