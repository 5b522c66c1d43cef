"""What is legal in a graph between passes, and the check of it.

A `Contract` is taken from the captured program once; after every pass the graph must still honour it.
`check_structure` looks at nodes only; `check_metadata` runs the whole graph again on fake tensors and
compares every result with what the node claims; `check_changed` does so for what a pass touched. Knows
nothing about single passes.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from deepinfer.errors import PassError
from deepinfer.passes.effects import base_of, mutated_bases
from deepinfer.passes.text import target_text, tensor_text

_Layout = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Contract:
    """What the passes may not change: inputs by name, outputs by position, and which inputs are written."""

    inputs: tuple[tuple[str, _Layout], ...]
    outputs: tuple[tuple[torch.dtype, tuple[int, ...]], ...]
    mutated: frozenset[str]


def layout_of(value: torch.Tensor) -> _Layout:
    """dtype, shape and strides of a tensor."""
    return value.dtype, tuple(value.shape), tuple(value.stride())


def output_node(graph: fx.Graph) -> fx.Node:
    """The one node that returns."""
    return graph.find_nodes(op="output")[0]


def output_values(graph: fx.Graph) -> list[fx.Node]:
    """The nodes a graph returns, in order."""
    return [node for node in pytree.tree_leaves(output_node(graph).args[0]) if isinstance(node, fx.Node)]


def contract_of(graph_module: fx.GraphModule) -> Contract:
    """Take the contract from a graph as captured. Needs `meta["val"]` on inputs and outputs."""
    graph = graph_module.graph
    inputs = graph.find_nodes(op="placeholder")
    results = [node.meta["val"] for node in output_values(graph)]
    return Contract(
        inputs=tuple((node.name, layout_of(node.meta["val"])) for node in inputs),
        outputs=tuple((value.dtype, tuple(value.shape)) for value in results),
        mutated=frozenset(node.name for node in mutated_bases(graph) if node.op == "placeholder"),
    )


def check_structure(graph_module: fx.GraphModule, contract: Contract, where: str) -> None:
    """Raise PassError if the graph is malformed or its inputs, outputs or effects are not the contract's."""
    graph = graph_module.graph
    try:
        graph.lint()
    except (RuntimeError, AttributeError) as error:
        raise PassError(f"the graph is malformed: {str(error).splitlines()[0]}", where=where) from error
    for node in graph.nodes:
        if node.op != "output" and "val" not in node.meta:
            raise PassError(f"node {node.name} ({target_text(node.target)}) has no metadata", where=where)
    found = contract_of(graph_module)
    for field in ("inputs", "outputs", "mutated"):
        before, after = getattr(contract, field), getattr(found, field)
        if before != after:
            changed = [str(item) for item in {*before} ^ {*after}] or ["their order"]
            raise PassError(
                f"the {field} of the graph changed: {', '.join(sorted(changed)[:4])}", where=where
            )


def _fake_mode(graph: fx.Graph) -> FakeTensorMode:
    for node in graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, FakeTensor):
                return value.fake_mode
    return FakeTensorMode()


def _fresh(value: Any, mode: FakeTensorMode) -> Any:
    """An input of the same layout in storage of its own."""
    if not isinstance(value, torch.Tensor):
        return value
    with mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _compare(node: fx.Node, value: Any, where: str) -> None:
    claimed = pytree.tree_leaves(node.meta["val"])
    computed = pytree.tree_leaves(value)
    same = len(claimed) == len(computed) and all(
        isinstance(a, torch.Tensor)
        and isinstance(b, torch.Tensor)
        and (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device)
        for a, b in zip(claimed, computed, strict=True)
        if a is not None or b is not None
    )
    if not same:
        raise PassError(
            f"node {node.name} ({target_text(node.target)}) claims {tensor_text(node.meta['val'])} "
            f"but computes {tensor_text(value)}",
            where=where,
        )


Calls = dict[fx.Node, tuple[Any, ...]]


def calls_of(graph: fx.Graph) -> Calls:
    """Every call with its target and arguments, for `check_changed`."""
    return {node: _call(node) for node in graph.nodes if node.op == "call_function"}


def _call(node: fx.Node) -> tuple[Any, ...]:
    return node.target, node.args, node.kwargs, node.meta.get("val")


def check_changed(graph_module: fx.GraphModule, before: Calls, where: str) -> None:
    """Run the calls that are not as they were; raise PassError where one claims what it does not compute.

    If the graph was sound before, it is then: every call fits the claims of the calls it depends on.
    """
    graph = graph_module.graph
    mode = _fake_mode(graph)
    with mode, torch.no_grad():
        for node in graph.nodes:
            if node.op == "call_function" and not _unchanged(node, before.get(node)):
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda other: _claimed(other, mode))
                _compare(node, _run(node, args, kwargs, where), where)
    for node in output_values(graph):
        if (owner := base_of(node)).op == "placeholder":
            raise _shared_output(node, owner.name, where)


def _unchanged(node: fx.Node, before: tuple[Any, ...] | None) -> bool:
    if before is None:
        return False
    target, args, kwargs, value = before
    return node.target is target and node.meta["val"] is value and node.args == args and node.kwargs == kwargs


def _claimed(node: fx.Node, mode: FakeTensorMode) -> Any:
    """A result of the layout that a node claims."""
    return pytree.tree_map(lambda value: _fresh(value, mode), node.meta["val"])


def _run(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], where: str) -> Any:
    assert callable(node.target), node
    try:
        return node.target(*args, **kwargs)
    except Exception as error:
        message = (str(error).splitlines() or [type(error).__name__])[0]
        raise PassError(
            f"node {node.name} ({target_text(node.target)}) cannot run: {message}", where=where
        ) from error


def check_metadata(graph_module: fx.GraphModule, where: str) -> None:
    """Run the graph on fake tensors; raise PassError on wrong metadata or outputs that share input memory.

    Values are fake: nothing is computed and no weight is read.
    """
    graph = graph_module.graph
    mode = _fake_mode(graph)
    values: dict[fx.Node, Any] = {}
    with mode, torch.no_grad():
        for node in graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                values[node] = _fresh(node.meta["val"], mode)
            elif node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = _run(node, args, kwargs, where)
                _compare(node, values[node], where)
    _check_outputs_own_memory(graph, values, where)


def _check_outputs_own_memory(graph: fx.Graph, values: dict[fx.Node, Any], where: str) -> None:
    owners = {
        values[node].untyped_storage()._cdata: node.name
        for node in graph.find_nodes(op="placeholder")
        if isinstance(values[node], torch.Tensor)
    }
    for node in output_values(graph):
        name = owners.get(values[node].untyped_storage()._cdata)
        owner = base_of(node)
        if name is not None or owner.op == "placeholder":
            raise _shared_output(node, name or owner.name, where)


def _shared_output(node: fx.Node, name: str, where: str) -> PassError:
    return PassError(
        f"output {node.name} shares the memory of input {name}",
        where=where,
        action="return a copy instead: .clone()",
    )
