"""Compares a graph whose ops were found by fusion with a trace that recorded every op as one call.

Both come from the same model on two ways. If they agree, fusion put the right calls in the right places, and
no value of the first trace (a clock, a counter, a number read from a tensor) was frozen into what is left.
"""

import itertools
from collections.abc import Iterator
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from deepinfer.errors import CaptureError
from deepinfer.kernels import op_of
from deepinfer.kernels.signature import CallSignature
from deepinfer.passes.patterns import trace_pattern
from deepinfer.passes.text import argument_text, target_text, tensor_text


def check_same_calls(fused: fx.Graph, recorded: fx.Graph, name: str = "graph") -> None:
    """Raise CaptureError, naming the first call that differs, unless both graphs make the same calls.

    Arguments that the definition of an op does not read are not compared, nor what makes them.
    """
    for found, wanted in itertools.zip_longest(_lines(fused), _lines(recorded), fillvalue="nothing"):
        if found != wanted:
            raise CaptureError(
                f"two traces of the model differ: {found} is fused, {wanted} was recorded",
                where=name,
                action="compute what depends on values at tracing time from the inputs, inside the graph",
            )


def _lines(graph: fx.Graph) -> Iterator[str]:
    read = {node: _read_arguments(node) for node in graph.nodes}
    used = {source for args, kwargs in read.values() for source in _nodes_in((args, kwargs))}
    names: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.users and node not in used:
            continue  # made to fill a place
        names[node] = f"%{len(names)}"
        if node.op == "call_function":
            arguments = [argument_text(value, names.__getitem__) for value in read[node]]
            yield f"{target_text(node.target)}{' '.join(arguments)} : {tensor_text(node.meta['val'])}"
        elif node.op == "output":
            yield f"return {argument_text(node.args[0], names.__getitem__)}"
        else:
            yield f"input {node.target} : {tensor_text(node.meta.get('val'))}"


def _nodes_in(value: Any) -> list[fx.Node]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, fx.Node)]


def _read_arguments(node: fx.Node) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of a call, None in the place of tensors at which the definition of an op does not look."""
    ours = op_of(node.target)
    if ours is None or not ours.composite:
        return list(node.args), dict(node.kwargs)
    values = tuple(value.meta["val"] if isinstance(value, fx.Node) else value for value in node.args)
    inputs = iter(trace_pattern(CallSignature.of(ours, values)).inputs)
    return [
        None if isinstance(value, fx.Node) and not next(inputs).users else value for value in node.args
    ], dict(node.kwargs)
