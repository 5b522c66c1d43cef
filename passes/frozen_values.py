"""Detects values that tracing froze into a graph.

A number read from a tensor, a clock or a counter while tracing becomes a constant of the graph, and every
replay uses it again. Two traces with different inputs then differ: in an argument, in the calls made, or in
a literal tensor. Knows nothing about how a trace is made.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from deepinfer.errors import CaptureError
from deepinfer.passes.text import call_text, tensor_text


def _line(node: fx.Node | None) -> str:
    """What a node does, with arguments by name and without what may differ between traces."""
    if node is None:
        return "nothing"
    if node.op in ("placeholder", "get_attr"):
        return f"input {node.target} : {tensor_text(node.meta.get('val'))}"
    if node.op == "output":
        return f"return {node.args[0]}"
    return f"{call_text(node, lambda other: other.name)} : {tensor_text(node.meta.get('val'))}"


def _same_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Equality by bytes, so that NaN equals itself and -0.0 is not 0.0."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    return torch.equal(
        first.detach().contiguous().reshape(-1).view(torch.uint8),
        second.detach().contiguous().reshape(-1).view(torch.uint8),
    )


def check_same_trace(first: ExportedProgram, second: ExportedProgram, name: str = "graph") -> None:
    """Raise CaptureError, naming the node, unless two traces are the same graph with the same literals."""
    pairs = itertools.zip_longest(first.graph_module.graph.nodes, second.graph_module.graph.nodes)
    for left, right in pairs:
        if _line(left) != _line(right):
            node = left if left is not None else right
            raise CaptureError(
                f"node {node.name} depends on values at tracing time: {_line(left)} in one trace, "
                f"{_line(right)} in another",
                where=name,
                action="compute it from the inputs inside the graph",
            )
    literals, others = _literals(first), _literals(second)
    for key in sorted(literals):
        if key not in others or not _same_bytes(literals[key], others[key]):
            raise CaptureError(
                f"the literal {key} depends on values at tracing time",
                where=name,
                action="compute it from the inputs inside the graph",
            )


def _literals(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """Tensors made while tracing; weights are not among them."""
    weights = set(program.state_dict)
    return {
        key: value
        for key, value in program.constants.items()
        if isinstance(value, torch.Tensor) and key not in weights
    }


def capture_twice(
    trace: Callable[[tuple[Any, ...]], ExportedProgram],
    first_inputs: tuple[Any, ...],
    second_inputs: tuple[Any, ...],
    name: str = "graph",
) -> ExportedProgram:
    """Trace with two sets of input values, compare, and return the first program.

    Raises CaptureError as `check_same_trace` does. Inputs must agree in everything but their values.
    """
    program = trace(first_inputs)
    check_same_trace(program, trace(second_inputs), name)
    return program
