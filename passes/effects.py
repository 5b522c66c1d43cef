"""What a node does to memory: what it writes, and which tensor its result is a view of.

All answers come from operator schemas. Knows nothing about values or about single operators.
"""

import operator
from collections.abc import Iterator

import torch
from torch import fx
from torch._ops import OpOverload

_CASTS = frozenset(("aten::to", "aten::type_as"))


def schema_of(node: fx.Node) -> OpOverload | None:
    """The operator a node calls, or None for placeholders, outputs and `operator.getitem`."""
    return node.target if node.op == "call_function" and isinstance(node.target, OpOverload) else None


def _arguments(node: fx.Node, op: OpOverload) -> Iterator[tuple[object, object]]:
    """Pairs of (schema argument, value given to it) of a call, by position and by keyword."""
    for position, argument in enumerate(op._schema.arguments):
        if position < len(node.args) and not argument.kwarg_only:
            yield argument, node.args[position]
        elif argument.name in node.kwargs:
            yield argument, node.kwargs[argument.name]


def _nodes_in(value: object) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _nodes_in(item)


def written_nodes(node: fx.Node) -> list[fx.Node]:
    """The argument nodes whose memory a call writes; empty for a pure call."""
    op = schema_of(node)
    if op is None:
        return []
    written = []
    for argument, value in _arguments(node, op):
        if argument.alias_info is not None and argument.alias_info.is_write:  # type: ignore[attr-defined]
            written += list(_nodes_in(value))
    return written


def viewed_node(node: fx.Node) -> fx.Node | None:
    """The argument whose memory a call's result may share, or None if the result is new memory."""
    if node.op == "call_function" and node.target is operator.getitem:
        parent = node.args[0]
        return viewed_node(parent) if isinstance(parent, fx.Node) else None
    op = schema_of(node)
    if op is None:
        return None
    shared = set()
    for result in op._schema.returns:
        if result.alias_info is not None:
            shared |= result.alias_info.before_set
    if not shared:
        return None
    for argument, value in _arguments(node, op):
        info = argument.alias_info  # type: ignore[attr-defined]
        if info is not None and info.before_set & shared:
            source = next(_nodes_in(value), None)
            return None if source is not None and _converts(node, op, source) else source
    return None


def _converts(node: fx.Node, op: OpOverload, source: fx.Node) -> bool:
    """True for a cast to another dtype, which `aten.to` shares memory without, whatever its schema says."""
    if op._schema.name not in _CASTS:
        return False
    result, given = node.meta.get("val"), source.meta.get("val")
    if not isinstance(result, torch.Tensor) or not isinstance(given, torch.Tensor):
        return False
    return result.dtype != given.dtype


def base_of(node: fx.Node) -> fx.Node:
    """The node that owns the memory of `node`: itself, or what it is, step by step, a view of."""
    while (source := viewed_node(node)) is not None:
        node = source
    return node


def mutated_bases(graph: fx.Graph) -> set[fx.Node]:
    """Owners of all memory that the graph writes."""
    return {base_of(written) for node in graph.nodes for written in written_nodes(node)}
