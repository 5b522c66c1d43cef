"""One start of a CUDA C++ kernel, and who gets it: the card's driver, or whoever asks in its place.

Knows nothing about single operations.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class CudaLaunch:
    """A start of `kernel` of the file `source` on `grid` blocks of `threads`.

    Arguments stand in the order of the kernel's parameters, numbers with the C type of theirs.
    """

    source: Path
    kernel: str
    grid: tuple[int, int]
    threads: int
    arguments: tuple[object, ...]

    def argument_values(self) -> list[object]:
        """The arguments as C values; a tensor is its address."""
        return [
            ctypes.c_void_p(each.data_ptr()) if isinstance(each, torch.Tensor) else each
            for each in self.arguments
        ]


Starter = Callable[[CudaLaunch], None]
_starter: contextvars.ContextVar[Starter | None] = contextvars.ContextVar("cuda_starter", default=None)


@contextlib.contextmanager
def cuda_launches_given_to(starter: Starter) -> Iterator[None]:
    """Within the block `starter` gets every launch and the driver none."""
    token = _starter.set(starter)
    try:
        yield
    finally:
        _starter.reset(token)


def current_starter() -> Starter | None:
    """Who gets launches now; None: the driver."""
    return _starter.get()
