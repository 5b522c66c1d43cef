"""What a call of an operation looks like, without values: the operation, layouts of tensors, other arguments.

`recorded_calls()` collects the signatures of all calls made within a block; that is how a build knows which
forms of an operation its model uses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from deepinfer.kernels.registry import Op, routed_ops


@dataclass(frozen=True)
class TensorLayout:
    """Shape, strides and dtype of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorLayout:
        """That of `tensor`."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    def empty(self) -> torch.Tensor:
        """A tensor of this layout, in storage of its own."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)


@dataclass(frozen=True, eq=False)
class CallSignature:
    """One form of calling `op`: `args` as given, tensors replaced by their TensorLayout.

    Equal signatures call the same op with arguments that are equal in type and value.
    """

    op: Op
    args: tuple[object, ...]

    @classmethod
    def of(cls, op: Op, args: tuple[object, ...]) -> CallSignature:
        """That of a call `op(*args)`."""
        return cls(op, tuple(TensorLayout.of(arg) if isinstance(arg, torch.Tensor) else arg for arg in args))

    def example_args(self) -> tuple[Any, ...]:
        """Arguments of this form; their values are arbitrary."""
        return tuple(arg.empty() if isinstance(arg, TensorLayout) else arg for arg in self.args)

    def _key(self) -> tuple[object, ...]:
        # True equals 1 in Python, and so does 1.0: they are different arguments
        return (self.op.name, *((type(arg), arg) for arg in self.args))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CallSignature) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


@contextlib.contextmanager
def recorded_calls() -> Iterator[list[CallSignature]]:
    """Within the block no op computes: a call gives the empty result of its shape rule and is recorded.

    Yields the list of calls in their order. Meant for fake tensors: results hold no values.
    """
    calls: list[CallSignature] = []

    def record(op: Op) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls.append(CallSignature.of(op, args))
            return op.fake(*args)

        return call

    with routed_ops(record):
        yield calls
