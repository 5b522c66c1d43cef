"""A graph of operations becomes a graph of kernel launches on a card.

Every call of an operation is replaced by what its launcher does: allocations, small tensor arithmetic, and
starts of Triton kernels, each one node that names its kernel. All tensors stay fake and none needs a card.
Knows nothing about Inductor.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from deepinfer.errors import LoweringError, UsageError
from deepinfer.kernels import op_of

ALIGNMENT_BYTES = 16  # what kernels may count on of memory that is not said to be unaligned
DEVICE = torch.device("cuda", 0)


@dataclass(frozen=True)
class CardGraph:
    """A graph on a card, fake example inputs, and the kernels it calls by `id` of their Python functions."""

    module: fx.GraphModule
    arguments: list[torch.Tensor]
    kernels: dict[int, Any]


class _Launched(fx.Interpreter):
    """Runs a graph with every operation as its launcher, on tensors of the card."""

    def __init__(self, module: fx.GraphModule, weights: dict[str, torch.Tensor]) -> None:
        super().__init__(module)
        self._weights = weights

    def fetch_attr(self, target: str) -> Any:
        return self._weights[target]

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        op = op_of(target)
        if op is not None:
            return op.triton(*args, **kwargs)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": DEVICE}
        return super().call_function(target, args, kwargs)


def on_card(
    module: fx.GraphModule, arguments: list[torch.Tensor], name: str, unaligned: Collection[int] = ()
) -> CardGraph:
    """Replace the operations of `module`, whose weights are buffers, by their launches; all tensors fake.

    `unaligned` are positions of arguments that may start anywhere in memory; others, and weights, start at a
    multiple of 16 bytes. Raises LoweringError where an operation has no kernel for the form it is called in.
    """
    from deepinfer.kernels.triton.launch import Launch, launches_given_to

    kernels: dict[int, Any] = {}

    def record(launch: Launch) -> None:
        kernels[id(launch.kernel.fn)] = launch.kernel
        wrapped = torch.library.wrap_triton(launch.kernel)
        settings = {"num_warps": launch.warps, "num_stages": launch.stages}
        wrapped[launch.grid](*launch.arguments, **launch.constants, **settings)

    buffers = dict(module.named_buffers())

    def step(weights: list[torch.Tensor], inputs: list[torch.Tensor]) -> Any:
        return _Launched(module, dict(zip(buffers, weights, strict=True))).run(*inputs)

    try:
        with FakeTensorMode(), launches_given_to(record), torch.no_grad():
            weights = [_moved(buffer, aligned=True) for buffer in buffers.values()]
            inputs = [_moved(each, aligned=i not in unaligned) for i, each in enumerate(arguments)]
            traced = make_fx(step)(weights, inputs)
    except UsageError as error:
        raise LoweringError(
            f"an operation has no kernel: {error.what}",
            where=f"{name}, {error.where}",
            action=error.action,
        ) from error
    return CardGraph(_with_buffers(traced, dict(zip(buffers, weights, strict=True))), inputs, kernels)


def _moved(tensor: torch.Tensor, *, aligned: bool) -> torch.Tensor:
    """A fake tensor of the card with the same shape and strides."""
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    if aligned:
        return torch.empty_strided(shape, stride, dtype=tensor.dtype, device=DEVICE)
    # a view one element into its storage: no multiple of 16 bytes, so nothing is taken for granted
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    storage = torch.empty(last + 2, dtype=tensor.dtype, device=DEVICE)
    return torch.as_strided(storage, shape, stride, 1)


def _with_buffers(traced: fx.GraphModule, weights: dict[str, torch.Tensor]) -> fx.GraphModule:
    """The traced graph, whose first inputs are the weights, with these as buffers again."""
    root, graph = nn.Module(), fx.Graph()
    names = iter(weights)
    copies: dict[fx.Node, fx.Node] = {}
    for node in traced.graph.nodes:
        attribute = next(names, None) if node.op == "placeholder" else None
        if attribute is None:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        else:
            root.register_buffer(attribute, weights[attribute])
            copies[node] = graph.get_attr(attribute)
        copies[node].meta = {key: node.meta[key] for key in ("val",) if key in node.meta}
    return fx.GraphModule(root, graph)
