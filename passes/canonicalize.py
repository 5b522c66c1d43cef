"""One spelling for one meaning: no assertions about metadata, no idle calls, one name per memory.

Why       fusion patterns then meet a single form, and lowering has fewer nodes to look at.
Numerics  unchanged: only calls go whose result is, bit for bit and with the same strides, their argument.
Leaves    x + 0 and x * 1 (they change -0.0 and NaN payloads), casts there and back, and every copy of memory
          that is written later on or returned.
"""

from collections.abc import Callable

import torch
from torch import fx

from deepinfer.passes.effects import base_of, mutated_bases, viewed_node, written_nodes

_aten = torch.ops.aten

# Calls that return their argument itself, or a view of it, when dtype, shape and strides come out the same.
# `as_strided` and `view.dtype` to another dtype are not here: they may look elsewhere in the same memory.
_VIEWS = frozenset(
    (
        _aten.to.dtype,
        _aten.to.dtype_layout,
        _aten.to.device,
        _aten.to.other,
        _aten.type_as.default,
        _aten.contiguous.default,
        _aten.detach.default,
        _aten.detach_.default,
        _aten.alias.default,
        _aten.lift_fresh.default,
        _aten.view.default,
        _aten.view.dtype,
        _aten.reshape.default,
        _aten._unsafe_view.default,
        _aten.flatten.using_ints,
        _aten.expand.default,
        _aten.expand_as.default,
        _aten.broadcast_to.default,
        _aten.permute.default,
        _aten.transpose.int,
        _aten.squeeze.default,
        _aten.squeeze.dim,
        _aten.slice.Tensor,
        _aten.narrow.default,
    )
)

_COPIES = (_aten.clone.default, _aten._to_copy.default)
_ADDITIONS = (_aten.add.Tensor, _aten.sub.Tensor, _aten.add_.Tensor, _aten.sub_.Tensor)


def _layout(node: fx.Node) -> tuple[object, ...]:
    value = node.meta["val"]
    return value.dtype, value.device, tuple(value.shape), tuple(value.stride())


def _is_output(node: fx.Node) -> bool:
    return any(user.op == "output" for user in node.users)


def _copies_argument_always(node: fx.Node) -> bool:
    """True if a `to` was asked for a copy even where nothing changes."""
    schema = node.target._schema  # type: ignore[union-attr]
    for position, argument in enumerate(schema.arguments):
        if argument.name == "copy":
            given = node.args[position] if position < len(node.args) else node.kwargs.get("copy", False)
            return bool(given)
    return False


def _same_memory(node: fx.Node) -> bool:
    """True for a call that gives back its argument, memory included."""
    source = node.args[0]
    return (
        node.target in _VIEWS
        and isinstance(source, fx.Node)
        and _layout(node) == _layout(source)
        and not _copies_argument_always(node)
    )


def _needless_copy(node: fx.Node, mutated: set[fx.Node]) -> bool:
    """True for a copy that nothing can tell from the original: neither is ever written nor handed out."""
    source = node.args[0]
    if node.target not in _COPIES or not isinstance(source, fx.Node) or _layout(node) != _layout(source):
        return False
    if _aliases_reach_output(node):
        return False
    return base_of(source) not in mutated and node not in mutated


def _aliases_reach_output(node: fx.Node) -> bool:
    """True if the node, or a view of it, is a graph output."""
    pending, seen = [node], set()
    while pending:
        current = pending.pop()
        if _is_output(current):
            return True
        seen.add(current)
        pending += [user for user in current.users if user not in seen and base_of(user) is base_of(current)]
    return False


def _replace(node: fx.Node, value: fx.Node) -> None:
    node.replace_all_uses_with(value)
    node.graph.erase_node(node)


def _drop_assertions(graph: fx.Graph) -> int:
    asserts = graph.find_nodes(op="call_function", target=_aten._assert_tensor_metadata.default)
    for node in asserts:
        graph.erase_node(node)
    return len(asserts)


def _drop_identities(graph: fx.Graph) -> int:
    mutated = mutated_bases(graph)
    rewrites = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.args or "val" not in node.meta:
            continue
        if _same_memory(node) or _needless_copy(node, mutated):
            _replace(node, node.args[0])
            rewrites += 1
    return rewrites


def _drop_unit_alpha(graph: fx.Graph) -> int:
    rewrites = 0
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _ADDITIONS and node.kwargs.get("alpha") == 1:
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != "alpha"}
            rewrites += 1
    return rewrites


def _name_written_memory_once(graph: fx.Graph) -> int:
    """After `y = x.add_(1)`, let `y` be called `x`: the memory is the same, and calls stay in order."""
    rewrites = 0
    for node in graph.nodes:
        written = written_nodes(node)
        in_place = len(written) == 1 and viewed_node(node) is written[0]
        if in_place and node.users and _layout(node) == _layout(written[0]):
            node.replace_all_uses_with(written[0])
            rewrites += 1
    return rewrites


_STEPS: tuple[Callable[[fx.Graph], int], ...] = (
    _drop_assertions,
    _drop_identities,
    _drop_unit_alpha,
    _name_written_memory_once,
)


def canonicalize(graph_module: fx.GraphModule) -> int:
    """Rewrite in place and return the number of rewrites."""
    return sum(step(graph_module.graph) for step in _STEPS)
