"""A request's visible text while it grows: what may be shown now, where it ends, which token wrote what.

Three rules. What was shown is never taken back. No character of a stop string that is left out is ever shown.
Nothing is held back but what can still become a stop string or is no whole character yet. Knows nothing of
what else ends a request; its memory besides the results is bounded by the longest stop string.
"""

import copy
from collections.abc import Sequence
from typing import NamedTuple

from deepinfer.runtime.detokenizer import Detokenizer, Utf8Decoder
from deepinfer.runtime.stop_strings import StopStrings
from deepinfer.runtime.token_bytes import TokenBytes


class TokenSpan(NamedTuple):
    """Which part of the text a token wrote: text[start:visible_end]. In characters.

    A character belongs to the token that makes it certain. Up to `end` the token wrote more, which is not in
    the text: a stop string, or what follows one.
    """

    start: int
    visible_end: int
    end: int


class TextDelta(NamedTuple):
    """What has become visible: further text, and the tokens that are now visible or hidden for good."""

    text: str
    num_tokens: int


class TextStream:
    """The text of one request. `push` each token, `take` what is new, `end` it once."""

    def __init__(
        self,
        token_bytes: TokenBytes,
        prompt_token_ids: Sequence[int] = (),
        *,
        stops: StopStrings | None = None,
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        """stops: end the text, which `include_stop` then keeps. A stop string that ends within the first
        `min_tokens` tokens does not count. The text continues that of the prompt.
        """
        self._detokenizer = Detokenizer(
            token_bytes, prompt_token_ids, skip_special_tokens=skip_special_tokens
        )
        self._stops, self._include_stop, self._min_tokens = stops, include_stop, min_tokens
        self._state = 0
        unfinished = self._detokenizer.utf8.pending  # a character begun by the prompt and finished here
        if stops is not None:
            self._state, _ = stops.scan(0, unfinished, stopping=False)
        self._unfinished = unfinished  # as it was before the last token
        self._settled: list[str] = []  # text that will not change
        self._num_settled = 0  # characters of it
        self._known = ""  # what is certain behind that: the last token's, and what is held back
        self._ends = [0]  # characters that are certain after each number of tokens
        self._num_whole = 0  # tokens before the first with a part of an unfinished character
        self._text_end: int | None = None  # where the text ends, once that is known
        self._ended = False
        self._chunks_taken = self._tokens_taken = 0

    @property
    def num_tokens(self) -> int:
        """Tokens pushed so far."""
        return len(self._ends) - 1

    @property
    def num_visible(self) -> int:
        """Characters that are visible so far."""
        return self._num_visible()

    @property
    def text(self) -> str:
        """All text that is visible so far."""
        self._settle()
        return "".join(self._settled)

    def push(self, token_id: int) -> str | None:
        """Adds a token; returns the stop string that it completes, behind which nothing may be pushed."""
        assert self._text_end is None, "the text has ended"
        self._settle()
        utf8 = self._detokenizer.utf8
        self._unfinished = utf8.pending
        data, match = self._detokenizer.push(token_id), None
        if self._stops is not None:
            counts = self.num_tokens >= self._min_tokens
            self._state, match = self._stops.scan(self._state, data, stopping=counts)
        if match is not None:
            self._known += utf8.decode(data[: match.end])
            data = data[match.end :]
            left_out = 0 if self._include_stop else len(match.stop)
            self._text_end = self._num_settled + len(self._known) - left_out
        self._known += utf8.decode(data)
        if not utf8.pending:
            self._num_whole = self.num_tokens + 1
        elif len(utf8.pending) <= len(data):  # it begins in this token
            self._num_whole = self.num_tokens
        self._ends.append(self._num_settled + len(self._known))
        return None if match is None else match.stop

    def take(self) -> TextDelta:
        """What has become visible since the last call."""
        self._settle()
        text = "".join(self._settled[self._chunks_taken :])
        self._chunks_taken = len(self._settled)
        before = self._tokens_taken
        last = self.num_tokens if self._ended else self._num_whole
        while self._tokens_taken < last and (
            self._ended or self._ends[self._tokens_taken + 1] <= self._num_settled
        ):
            self._tokens_taken += 1
        return TextDelta(text, self._tokens_taken - before)

    def end(self, *, drop_last_token: bool = False, release: bool = True) -> None:
        """Ends the text; the next `take` is the last.

        drop_last_token: the last token ended the request and is not part of the text; nothing was taken
        since it was pushed. release: show what was held back; not if the request was cut off, because then
        it might have become a stop string.
        """
        assert not self._ended, "the text ends once"
        self._ended = True
        if self._text_end is not None:
            return
        if not release:
            self._text_end = self._num_visible()
            return
        utf8 = self._detokenizer.utf8
        if drop_last_token:
            assert self._num_settled <= self._ends[-2], "the last token's text is out already"
            self._known = self._known[: self._ends[-2] - self._num_settled]
            utf8 = Utf8Decoder(self._unfinished)
        self._known += utf8.decode(b"", final=True)
        self._text_end = self._num_settled + len(self._known)
        if drop_last_token and self.num_tokens > 1:
            self._ends[-2] = self._text_end
        self._ends[-1] = max(self._ends[-1], self._text_end) if self.num_tokens else 0

    def copy(self) -> "TextStream":
        """A stream that goes on from here by itself."""
        twin = copy.copy(self)
        twin._detokenizer = self._detokenizer.copy()
        twin._settled, twin._ends = self._settled.copy(), self._ends.copy()
        return twin

    def _num_visible(self) -> int:
        if self._text_end is not None:
            return self._text_end
        held = 0 if self._stops is None else self._stops.held_characters(self._state)
        return self._num_settled + len(self._known) - held

    def _settle(self) -> None:
        """Moves what is visible by now to the text that will not change."""
        count = self._num_visible() - self._num_settled
        if count > 0:
            self._settled.append(self._known[:count])
            self._known = self._known[count:]
            self._num_settled += count

    def spans(self, first: int = 0, last: int | None = None) -> tuple[TokenSpan, ...]:
        """The parts that the tokens from `first` up to `last` have in the text."""
        ends = self._ends[first : None if last is None else last + 1]
        limit = self._num_visible()
        return tuple(
            TokenSpan(start, max(start, min(end, limit)), end)
            for start, end in zip(ends, ends[1:], strict=False)
        )
