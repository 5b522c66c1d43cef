"""The text of a graph: one line per node, the same for the same graph on every machine.

Values are numbered in order; there are no object ids, no source paths and no traced names except those of
inputs. Used for the artifact's record of a graph, for dumps, and for comparing two graphs.
"""

import operator
from collections.abc import Callable

import torch
from torch import fx
from torch._ops import OpOverload

from deepinfer.passes.effects import mutated_bases


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def tensor_text(value: object) -> str:
    """`bfloat16[4, 64]`, with strides where the tensor is not contiguous; lists give a tuple of these."""
    if isinstance(value, torch.Tensor):
        text = f"{dtype_name(value.dtype)}{list(value.shape)}"
        return text if value.is_contiguous() else f"{text} strides {list(value.stride())}"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(tensor_text(item) for item in value) + ")"
    return type(value).__name__


def target_text(target: object) -> str:
    """`aten.add.Tensor`; `getitem` for tuple access."""
    if target is operator.getitem:
        return "getitem"
    if isinstance(target, OpOverload):
        return str(target)
    return getattr(target, "__name__", str(target))


def argument_text(value: object, name_of: Callable[[fx.Node], str]) -> str:
    """A call's argument; nodes by the name that `name_of` gives them, floats exactly."""
    if isinstance(value, fx.Node):
        return name_of(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(argument_text(item, name_of) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}={argument_text(item, name_of)}" for key, item in value.items()) + "}"
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, slice):
        return f"slice({value.start}, {value.stop}, {value.step})"
    return repr(value)


def call_text(node: fx.Node, name_of: Callable[[fx.Node], str]) -> str:
    """`aten.add.Tensor(%3, %4)`."""
    arguments = [argument_text(value, name_of) for value in node.args]
    arguments += [f"{key}={argument_text(value, name_of)}" for key, value in sorted(node.kwargs.items())]
    return f"{target_text(node.target)}({', '.join(arguments)})"


def graph_text(graph_module: fx.GraphModule) -> str:
    """The whole graph, ending in a newline: inputs (`!` marks those it writes), calls, outputs."""
    graph = graph_module.graph
    mutated = mutated_bases(graph)
    numbers = {node: f"%{index}" for index, node in enumerate(graph.nodes)}
    lines = []
    for node, number in numbers.items():
        value = tensor_text(node.meta["val"]) if node.meta.get("val") is not None else ""
        if node.op in ("placeholder", "get_attr"):
            mark = "!" if node in mutated else ""
            lines.append(f"{number} = input {node.target}{mark} : {value}")
        elif node.op == "output":
            lines.append(f"return {argument_text(node.args[0], numbers.__getitem__)}")
        else:
            text = f"{number} = {call_text(node, numbers.__getitem__)}"
            lines.append(f"{text} : {value}" if value else text)
    return "\n".join(lines) + "\n"
