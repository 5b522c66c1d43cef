"""Which ids are in use, and aborts by id, which may come from any thread, too early or too late.

An id is in use until its request and all further choices of it have ended. An abort that comes before its
request waits for it; one that comes after the end of its request is dropped, and does not harm the next
request of that id. Decides nothing else; knows nothing of memory or steps.
"""

import itertools
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Final

from deepinfer.errors import RequestError
from deepinfer.runtime.request import Request

REMEMBERED_SECONDS: Final = 60.0  # how long an abort waits for its request, and how long an end is known


def choice_id(request_id: str, choice: int) -> str:
    """The id of a further choice of a request."""
    return f"{request_id}/{choice}"


class RequestIds:
    """All ids of one engine. Only `abort` may be called from another thread."""

    def __init__(self) -> None:
        self._unfinished: dict[str, Request] = {}  # a first choice until all of its choices have ended
        self._asked: deque[str] = deque()  # aborts that were not looked at yet
        # In order of time, with a first entry that is found at once, which a dict does not promise.
        self._early: OrderedDict[str, float] = OrderedDict()  # aborts without a request, and since when
        self._ended: OrderedDict[str, float] = OrderedDict()  # ids that were in use, and until when
        self._made_up = itertools.count()

    @property
    def is_asked(self) -> bool:
        """Whether there are aborts that were not looked at yet."""
        return bool(self._asked)

    def choose(self, request_id: str | None, num_choices: int = 1) -> str:
        """The id of a new request: the one given, or one made up. Raises RequestError if it is in use."""
        if request_id is None:
            return next(name for name in map(str, self._made_up) if not self._used(name, num_choices))
        if used := self._used(request_id, num_choices):
            raise RequestError("a request of this id is being served", where=f"request_id {used!r}")
        return request_id

    def enter(self, request: Request, now: float) -> bool:
        """Takes a request and its choices in; returns whether an abort of it has come before."""
        self._forget(now)
        for own in (request, *request.choices):
            self._unfinished[own.request_id] = own
            self._ended.pop(own.request_id, None)
        return self._early.pop(request.request_id, None) is not None

    def leave(self, ended: Iterable[Request], now: float) -> None:
        """These have ended; frees the ids of those whose choices have all ended."""
        for request in ended:
            first = request.parent if request.index else request
            for own in (request, first):
                if own is not None and self._unfinished.get(own.request_id) is own and _has_ended(own):
                    self._free(own.request_id, now)

    def abort(self, request_id: str) -> None:
        """Asks for the end of the request of that id."""
        self._asked.append(request_id)

    def to_abort(self, now: float) -> Sequence[Request]:
        """The requests whose end was asked for since the last call."""
        self._forget(now)
        found = []
        while self._asked:
            name = self._asked.popleft()
            if name in self._unfinished:
                found.append(self._unfinished[name])
            elif name not in self._ended:
                self._early.pop(name, None)
                self._early[name] = now
        return found

    def end_all(self, now: float) -> None:
        """Every request has ended; aborts of those that are not here yet still wait."""
        self.to_abort(now)
        for name in list(self._unfinished):
            self._free(name, now)

    def _used(self, request_id: str, num_choices: int) -> str | None:
        names = (request_id, *(choice_id(request_id, choice) for choice in range(1, num_choices)))
        return next((name for name in names if self._in_use(name)), None)

    def _in_use(self, name: str) -> bool:
        return name in self._unfinished and not _has_ended(self._unfinished[name])

    def _free(self, name: str, now: float) -> None:
        del self._unfinished[name]
        self._ended[name] = now

    def _forget(self, now: float) -> None:
        for known in (self._early, self._ended):
            while known and known[oldest := next(iter(known))] <= now - REMEMBERED_SECONDS:
                del known[oldest]


def _has_ended(request: Request) -> bool:
    """Whether a request and all further choices of it have ended."""
    return all(each.finished for each in (request, *request.choices))
