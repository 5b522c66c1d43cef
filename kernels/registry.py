"""What an operation is, and how a call to it is routed.

An `Op` ties one name to its definition in plain PyTorch (the reference), its dispatcher schema, its shape
rule for tracing, sample inputs and tolerances. Called as it is, an op runs its reference: that is the eager
model. Inside `captured_ops()` the same call goes to `torch.ops.deepinfer.<name>`, which the C++ library
registers, so that `torch.export` records one opaque node.

Knows nothing about single operations, nor about how the library is built (`native.py`).
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from deepinfer.errors import CaptureError, UsageError

NAMESPACE = "deepinfer"

# how a call of an op is routed: None runs the reference
Route = Callable[["Op"], Callable[..., Any]]
_route: contextvars.ContextVar[Route | None] = contextvars.ContextVar("deepinfer_op_route", default=None)
_fakes_registered: set[str] = set()
_overloads: dict[str, torch._ops.OpOverload] = {}  # as found: a step in a cold cache pays for every look-up


@dataclass(frozen=True)
class Op:
    """One operation of the project.

    `schema` is the dispatcher schema without the namespace; the C++ library defines the same text.
    `reference(*args)` is the definition; `fake(*args)` gives empty outputs of the right shape and dtype and
    makes the same checks. `make_inputs(rows, dtype, seed)` gives arguments of a small realistic case.
    `tolerance[dtype]` is (rtol, atol) of the native kernel against the reference on such inputs.
    A `composite` op's reference is made of other ops; a trace may look through it.
    """

    name: str
    schema: str
    reference: Callable[..., Any]
    fake: Callable[..., Any]
    make_inputs: Callable[[int, torch.dtype, int], tuple[Any, ...]]
    tolerance: dict[torch.dtype, tuple[float, float]]
    composite: bool = False

    def __call__(self, *args: Any) -> Any:
        """Run the reference; inside `captured_ops()`, call the registered operation instead.

        So does Dynamo: a function given to torch.compile has one call per op.
        """
        if torch.compiler.is_dynamo_compiling():
            return self.native(*args)
        route = _route.get()
        return (self.reference if route is None else route(self))(*args)

    def native(self, *args: Any) -> Any:
        """Call the registered operation. Raises CaptureError if the op library is not loaded."""
        return self.overload()(*args)

    def triton(self, *args: Any) -> Any:
        """Run the Triton kernels: CUDA tensors, or CPU tensors under TRITON_INTERPRET=1.

        Raises UsageError where triton is not installed or the operation has no kernel.
        """
        module = f"{__package__}.triton.{self.name}"
        if importlib.util.find_spec("triton") is None:
            raise UsageError(
                "Triton is not installed", where=f"{self.name}: triton", action="pip install 'deepinfer[gpu]'"
            )
        if importlib.util.find_spec(module) is None:
            raise UsageError("the operation has no Triton kernel", where=f"{self.name}: triton")
        # by name, so that triton is loaded by those alone who call it
        return getattr(importlib.import_module(module), self.name)(*args)

    def overload(self) -> torch._ops.OpOverload:
        """`torch.ops.deepinfer.<name>.default`. Raises CaptureError if the op library is not loaded."""
        if (found := _overloads.get(self.name)) is not None:
            return found
        packet = getattr(getattr(torch.ops, NAMESPACE), self.name, None)
        if packet is None:
            raise CaptureError(
                f"the operation {self.name} is not registered",
                where="op library",
                action="load it first: deepinfer.kernels.native.load_op_library(build_op_library(isa))",
            )
        overload: torch._ops.OpOverload = packet.default
        _overloads[self.name] = overload
        return overload


def register_fake(op: Op) -> None:
    """Register the shape rule of `op`, once per process. Raises CaptureError without the op library."""
    if op.name not in _fakes_registered:
        op.overload()
        torch.library.register_fake(f"{NAMESPACE}::{op.name}", op.fake)
        _fakes_registered.add(op.name)


@contextlib.contextmanager
def captured_ops(*, fused: bool = True) -> Iterator[None]:
    """Within the block every Op call goes to the dispatcher, so that a trace records one node per call.

    Without `fused`, a composite op runs its reference, whose own calls go to the dispatcher.

    A call raises CaptureError if the op library is not loaded. Restores the former routing on exit, also
    after an exception; other threads and tasks are not affected.
    """
    with routed_ops(_captured if fused else _captured_parts):
        yield


def _captured(op: Op) -> Callable[..., Any]:
    register_fake(op)
    return op.native


def _captured_parts(op: Op) -> Callable[..., Any]:
    return op.reference if op.composite else _captured(op)


@contextlib.contextmanager
def routed_ops(route: Route) -> Iterator[None]:
    """Within the block a call of `op` runs `route(op)`; the former routing comes back on exit.

    Other threads and tasks are not affected.
    """
    token = _route.set(route)
    try:
        yield
    finally:
        _route.reset(token)
