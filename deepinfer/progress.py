"""How a long operation reports that it goes on: one bar per stage and single lines, never on stdout.

The base class is silent, so library calls print nothing unless asked to.
"""

import sys
from types import TracebackType
from typing import Self

from tqdm import tqdm


class Progress:
    """Silent progress; what `compile_model` and `diff_artifact` get when the caller passes none.

    A stage is opened with `start`, moved with `advance` and closed by the next `start` or by `finish`.
    """

    def start(self, stage: str, total: int) -> None:
        """Begin a stage of `total` units of work."""

    def advance(self, note: str = "", units: int = 1) -> None:
        """`units` of the open stage are done; `note` says which."""

    def say(self, text: str) -> None:
        """A single line of information."""

    def finish(self) -> None:
        """Close the open stage, if any."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()


class TerminalProgress(Progress):
    """Bars on stderr when it is a terminal; elsewhere only the single lines."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None
        self._live = sys.stderr.isatty()

    def start(self, stage: str, total: int) -> None:
        self.finish()
        if self._live:
            self._bar = tqdm(total=total, desc=stage, file=sys.stderr, leave=False, dynamic_ncols=True)

    def advance(self, note: str = "", units: int = 1) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(units)

    def say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.clear()
        print(text, file=sys.stderr, flush=True)

    def finish(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
