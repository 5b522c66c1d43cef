"""Finds stop strings in text that arrives in pieces, and tells how much of the text may still become one.

An automaton (Aho and Corasick, 1975) over the UTF-8 bytes of the stop strings: one step per byte, whatever
came before. The stop string that ends first counts, of several that end together the longest; how the text
was cut into tokens changes nothing. Knows nothing of tokens.
"""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple


class StopMatch(NamedTuple):
    """A stop string found: which, and behind how many bytes of the piece it ends."""

    stop: str
    end: int


class StopStrings:
    """The automaton of one set of stop strings. Holds no text: a state is a number, 0 before any text."""

    def __init__(self, stops: Sequence[str]) -> None:
        """stops: none of them empty. One that contains another before its own end is never reached."""
        assert all(stops), stops
        self._next: list[dict[int, int]] = [{}]  # state -> byte -> state
        self._fail = [0]  # state of the longest proper suffix that begins a stop string too
        self._held = [0]  # characters of the text that are complete and may begin a stop string
        self._found: list[str | None] = [None]  # the stop string that ends in this state
        # Without those, no stop string ends within another: a state's own is the longest that ends there.
        for stop in stops:
            if not any(other in stop[:-1] for other in stops):
                self._add(stop)
        self._link()
        self._first_bytes = frozenset(self._next[0])

    def scan(self, state: int, data: bytes, *, stopping: bool = True) -> tuple[int, StopMatch | None]:
        """Reads on from `state`; returns the state reached and the first match, behind which nothing is read.

        Without `stopping`, stop strings that end within `data` are passed over.
        """
        if state == 0 and self._first_bytes.isdisjoint(data):
            return 0, None
        for index, byte in enumerate(data):
            while byte not in self._next[state] and state:
                state = self._fail[state]
            state = self._next[state].get(byte, 0)
            found = self._found[state]
            if found is not None and stopping:
                return state, StopMatch(found, index + 1)
        return state, None

    def held_characters(self, state: int) -> int:
        """How many characters at the end of the text can still be the beginning of a stop string.

        Only whole characters are counted; the bytes of an unfinished one are not text yet.
        """
        return self._held[state]

    def _add(self, stop: str) -> None:
        state = 0
        for number, character in enumerate(stop):
            data = character.encode()
            for place, byte in enumerate(data):
                after = self._next[state].get(byte)
                if after is None:
                    after = len(self._next)
                    self._next[state][byte] = after
                    self._next.append({})
                    self._fail.append(0)
                    self._held.append(number + (place == len(data) - 1))
                    self._found.append(None)
                state = after
        self._found[state] = stop

    def _link(self) -> None:
        """Sets what a state takes over from the state of its longest suffix, shortest states first."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for byte, after in self._next[state].items():
                fallback = self._fail[state]
                while byte not in self._next[fallback] and fallback:
                    fallback = self._fail[fallback]
                self._fail[after] = self._next[fallback].get(byte, 0)
                queue.append(after)
            if not self._next[state]:  # nothing longer begins with it
                self._held[state] = self._held[self._fail[state]]


@lru_cache(maxsize=8)  # an automaton of the largest set allowed takes some megabytes
def stop_strings(stops: tuple[str, ...]) -> StopStrings:
    """The automaton of these stop strings; requests with the same ones share it."""
    return StopStrings(stops)
