"""How a launcher starts its kernels, and how the same calls are recorded instead, to be compiled elsewhere.

Knows nothing about single operations.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton

from deepinfer.errors import UsageError

_MAX_ROWS = 2**31 - 1  # of a grid's first axis


@dataclass(frozen=True)
class Launch:
    """One start of a kernel: arguments in the order of its parameters, tensors possibly without values.

    `constants` are the compile-time parameters by name.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    warps: int
    stages: int

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(self.kernel.__name__).lstrip("_")


# what is done with a launch instead of starting its kernel; None: the kernel starts
Starter = Callable[[Launch], None]
_starter: contextvars.ContextVar[Starter | None] = contextvars.ContextVar("starter", default=None)


@contextlib.contextmanager
def launches_given_to(starter: Starter) -> Iterator[None]:
    """Within the block `starter` gets every launch and no kernel starts; arguments may have no values."""
    token = _starter.set(starter)
    try:
        yield
    finally:
        _starter.reset(token)


@contextlib.contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Within the block kernels are recorded and not started; arguments may be meta tensors."""
    launches: list[Launch] = []
    with launches_given_to(launches.append):
        yield launches


def launch(
    kernel: Any, grid: tuple[int, ...], *arguments: Any, warps: int = 4, stages: int = 1, **constants: Any
) -> None:
    """Start `kernel` on `grid`; an empty grid starts nothing.

    Raises UsageError for tensors that are neither on a CUDA device nor interpreted. Products and sums are
    rounded one by one (no contraction), as the definitions say.
    """
    if 0 in grid:
        return
    assert grid[0] <= _MAX_ROWS, grid
    starter = _starter.get()
    if starter is not None:
        starter(Launch(kernel, grid, arguments, constants, warps, stages))
        return
    device = next(argument.device for argument in arguments if isinstance(argument, torch.Tensor))
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise UsageError(
            f"the tensors are on {device}, where Triton has no compiler",
            where=str(kernel.__name__),
            action="move them to a CUDA device, or set TRITON_INTERPRET=1 before Python starts",
        )
    kernel[grid](*arguments, **constants, num_warps=warps, num_stages=stages, enable_fp_fusion=False)


def blocks(size: int, block: int) -> int:
    """How many blocks of `block` cover `size`."""
    return -(-size // block)


def power_of_two(size: int, least: int = 1) -> int:
    """The smallest power of two that is neither below `size` nor below `least`."""
    return max(least, 1 << max(0, size - 1).bit_length())


def require(op: str, fine: bool, what: str) -> None:
    """Raise UsageError where a call needs `what`, a form of the operation without a Triton kernel."""
    if not fine:
        raise UsageError(f"no Triton kernel for {what}", where=f"{op}: triton", action="run the native form")
