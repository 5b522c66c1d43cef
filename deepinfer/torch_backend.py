"""`torch.compile(function, backend="deepinfer")`: a function of the user through the passes and the lowering.

PyTorch finds the backend by its entry point; importing it builds the op library, or finds it. What Dynamo
traced is traced again, down to the calls that make up every op of `deepinfer.kernels`, goes through the same
passes as a model's graph, and becomes native code. Each call of an op must be found again by its pass; a
spelled-out copy of an op in one of these forms is found too.

Inference on a CPU only: static shapes, no gradients. `reports()` says what the passes did.
"""

import operator
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._guards import tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from deepinfer.errors import PassError, UsageError
from deepinfer.kernels import captured_ops, op_of
from deepinfer.kernels.native import host_isa, load_host_library
from deepinfer.kernels.signature import CallSignature, TensorLayout
from deepinfer.passes.fuse import PREFIX
from deepinfer.passes.lower import lower_graph
from deepinfer.passes.manager import Pass, PassManager, PassReport
from deepinfer.passes.pipeline import exact_passes
from deepinfer.passes.text import graph_text
from deepinfer.runtime.graph_loader import CompiledGraph

WHERE = 'torch.compile(backend="deepinfer")'

# A user's function may do what it likes; a model's graph may not.
_NOT_REQUIRED = ("check_invariance",)


@dataclass(frozen=True)
class CompiledFunction:
    """What became of one graph: the report of the passes, and the graph's text after them."""

    passes: PassReport
    text: str

    def rewrites(self, name: str) -> int:
        """How often the pass `name` fired."""
        (result,) = [result for result in self.passes.results if result.name == name]
        return result.rewrites or 0


load_host_library()  # Dynamo looks ops up before the backend is called

_reports: list[CompiledFunction] = []


def reports() -> tuple[CompiledFunction, ...]:
    """What was compiled in this process, oldest first: one entry per graph that Dynamo handed over."""
    return tuple(_reports)


def deepinfer_backend(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], **options: object
) -> Callable[..., Any]:
    """The backend. Raises UsageError for what it does not compile, and BuildError if compiling fails."""
    _check(graph_module, example_inputs, options)
    _drop_unused_calls(graph_module.graph)
    with tracing(None), torch.no_grad():
        program, calls = _captured(graph_module, example_inputs)
        passes = exact_passes(calls)
        report = PassManager(passes, disabled=_NOT_REQUIRED).run(program, name="function")
        _check_found(program.graph_module, calls, passes, report)
        with tempfile.TemporaryDirectory(prefix="deepinfer-compile-") as folder:
            lowered = lower_graph(
                program, name="function", work_dir=Path(folder) / "graph", isa=host_isa(), in_place=False
            )
            extern = lowered.extern_json.read_bytes() if lowered.extern_json is not None else None
            compiled = CompiledGraph.open(lowered.shared_object.read_bytes(), extern, name="function")
    compiled.bind({spec.name: _constant(program, graph_module, spec.weight) for spec in lowered.constants})
    _reports.append(CompiledFunction(report, graph_text(program.graph_module)))
    used = [index for index, value in enumerate(example_inputs) if isinstance(value, Tensor)]
    written = [position for position, spec in enumerate(lowered.inputs) if spec.mutated]

    def call(*arguments: Any) -> Sequence[Tensor]:
        tensors = [arguments[index] for index in used]
        if written:
            _check_apart(tensors, written)
        return tuple(compiled.run(tensors))

    return call


def _check(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, object]
) -> None:
    if options:
        raise UsageError(f"takes no {', '.join(sorted(options))}", where=WHERE, action="leave it out")
    symbols = any(isinstance(value, (torch.SymInt, torch.SymFloat)) for value in example_inputs)
    numbers = any(
        isinstance(node.meta.get("example_value"), (torch.SymInt, torch.SymFloat))
        for node in graph_module.graph.nodes
    )
    if symbols or numbers:
        raise UsageError(
            "sizes and numbers must be static", where=WHERE, action="pass dynamic=False to torch.compile"
        )
    tensors = [value for value in example_inputs if isinstance(value, Tensor)]
    if any(value.requires_grad for value in tensors) and torch.is_grad_enabled():
        raise UsageError("gradients are not supported", where=WHERE, action="call it under torch.no_grad()")
    devices = {value.device.type for value in tensors} - {"cpu"}
    if devices:
        raise UsageError(f"tensors must be on the CPU, got {', '.join(sorted(devices))}", where=WHERE)


def _drop_unused_calls(graph: fx.Graph) -> None:
    """Erase calls of ops for results that nobody uses: no pass would find them again."""
    for node in reversed(list(graph.nodes)):
        ours = op_of(node.target) is not None and not node.target._schema.is_mutable
        if node.op == "call_function" and not node.users and (ours or node.target is operator.getitem):
            graph.erase_node(node)


def _check_found(
    graph_module: fx.GraphModule, calls: list[CallSignature], passes: Sequence[Pass], report: PassReport
) -> None:
    """Every call of a composite op must be a call again; spelled-out copies may be among the found."""
    counts = Counter(PREFIX + call.op.name for call in calls if call.op.composite)
    for step, result in zip(passes, report.results, strict=True):
        if (result.rewrites or 0) < counts[step.name]:
            miss = step.nearest_miss(graph_module) if step.nearest_miss is not None else None
            raise PassError(
                f"pass {step.name} fired {result.rewrites} times for {counts[step.name]} calls; "
                f"nearest miss: {miss or 'none'}",
                where=WHERE,
            )


class _Expanded(nn.Module):
    """A Dynamo graph in which calls of composite ops are replaced by their definitions."""

    def __init__(self, graph_module: fx.GraphModule, calls: list[CallSignature]) -> None:
        super().__init__()
        self.graph_module = graph_module
        self._calls = calls

    def forward(self, *inputs: Any) -> Any:
        self._calls.clear()  # tracing may run this more than once
        return _Expander(self.graph_module, self._calls).run(*inputs)


class _Expander(fx.Interpreter):
    def __init__(self, graph_module: fx.GraphModule, calls: list[CallSignature]) -> None:
        super().__init__(graph_module)
        self._calls = calls

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        op = op_of(target)
        if op is None or kwargs:
            return super().call_function(target, args, kwargs)
        self._calls.append(CallSignature.of(op, args))
        return op(*args)


def _captured(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any]
) -> tuple[torch.export.ExportedProgram, list[CallSignature]]:
    calls: list[CallSignature] = []
    with FakeTensorMode(allow_non_fake_inputs=True), captured_ops(fused=False):
        inputs = tuple(
            TensorLayout.of(value).empty() if isinstance(value, Tensor) else value for value in example_inputs
        )
        program = torch.export.export(_Expanded(graph_module, calls), inputs, strict=False)
    return program, calls


def _check_apart(tensors: Sequence[Tensor], written: Sequence[int]) -> None:
    """Raise UsageError if an input that the graph writes shares memory with another: it was traced apart."""
    spans = [_span(tensor) for tensor in tensors]
    for mine in written:
        for other, (start, end) in enumerate(spans):
            if other != mine and start < spans[mine][1] and spans[mine][0] < end:
                raise UsageError(
                    f"input {mine} is written and shares memory with input {other}",
                    where=WHERE,
                    action="pass a copy of one of them: .clone()",
                )


def _span(tensor: Tensor) -> tuple[int, int]:
    """First address of a tensor's memory, and the one behind its last."""
    if not tensor.numel():
        return 0, 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def _constant(program: torch.export.ExportedProgram, graph_module: fx.GraphModule, name: str) -> Tensor:
    """A tensor that the function holds: a literal that it makes, or an attribute."""
    literal = program.constants.get(name)
    if isinstance(literal, Tensor) and not isinstance(literal, FakeTensor):
        return literal
    value: Any = graph_module
    for part in name.removeprefix("graph_module.").split("."):
        value = getattr(value, part)
    assert isinstance(value, Tensor), name
    return value.detach()
