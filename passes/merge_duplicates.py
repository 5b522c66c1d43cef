"""Compute once what is computed twice from the same values.

Why       layers ask for the same masks, views and constants again and again; one of each is enough.
Numerics  unchanged: only calls with the same target, arguments and layout are merged.
Leaves    results whose memory is written or handed out; calls that write or draw random numbers; calls
          between which an input of theirs is written.
"""

import operator
from typing import Any

import torch
from torch import fx

from deepinfer.passes.effects import base_of, mutated_bases, schema_of, written_nodes
from deepinfer.passes.verify import layout_of, output_values


def merge_duplicates(graph_module: fx.GraphModule) -> int:
    """Rewrite in place and return the number of calls that went."""
    graph = graph_module.graph
    mutated = mutated_bases(graph)
    handed_out = {base_of(node) for node in output_values(graph)}
    versions: dict[fx.Node, int] = {}  # owner of memory -> number of writes so far
    seen: dict[Any, fx.Node] = {}
    rewrites = 0
    for node in list(graph.nodes):
        for written in written_nodes(node):
            owner = base_of(written)
            versions[owner] = versions.get(owner, 0) + 1
        if not _is_plain(node) or base_of(node) in handed_out:
            continue
        if base_of(node) is node and node in mutated:
            continue
        key = _key(node, versions)
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            rewrites += 1
    return rewrites


def _is_plain(node: fx.Node) -> bool:
    """True for a call that gives one tensor, writes nothing, and gives the same for the same arguments."""
    if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    if node.target is operator.getitem:
        return True
    op = schema_of(node)
    if op is None or op._schema.is_mutable:
        return False
    uninitialised = (
        op.overloadpacket._qualified_op_name.rpartition("::")[2]
        .lstrip("_")
        .startswith(("empty", "new_empty"))
    )
    return torch.Tag.nondeterministic_seeded not in op.tags and not uninitialised


def _key(node: fx.Node, versions: dict[fx.Node, int]) -> Any:
    """What a call computes: equal keys, equal results."""

    def frozen(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return "node", value, versions.get(base_of(value), 0)
        if isinstance(value, (list, tuple)):
            return tuple(frozen(item) for item in value)
        if isinstance(value, slice):
            return "slice", frozen((value.start, value.stop, value.step))
        return type(value), repr(value)

    kwargs = tuple((name, frozen(value)) for name, value in sorted(node.kwargs.items()))
    return node.target, frozen(node.args), kwargs, layout_of(node.meta["val"])
