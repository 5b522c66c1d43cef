"""Which captured graphs may be compiled at all.

A compiled graph replays the same calls whatever its inputs hold. So nothing in it may depend on a value at
tracing time, ask for a value on the host, have a shape that a value decides, or be random; and memory is
written only in the ways that lowering keeps in place. Each rule is one function that names the first node
that breaks it. Knows nothing about passes.
"""

import operator
from collections.abc import Callable, Iterator

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from deepinfer.errors import CaptureError
from deepinfer.passes.effects import base_of, schema_of, written_nodes
from deepinfer.passes.text import target_text
from deepinfer.passes.verify import output_node

ALLOWED_NAMESPACES = ("aten", "prims", "deepinfer")

_aten = torch.ops.aten
_HOST_READS = frozenset(
    (_aten.item.default, _aten._local_scalar_dense.default, _aten.is_nonzero.default, _aten.equal.default)
)
_REGION_WRITES = frozenset((_aten.index_put_.default,))

Fault = tuple[fx.Node | str, str, str]  # node or name, what is wrong, what to do
Rule = Callable[[ExportedProgram], Iterator[Fault]]


def _calls(program: ExportedProgram) -> Iterator[fx.Node]:
    return (node for node in program.graph_module.graph.nodes if node.op not in ("placeholder", "output"))


def only_known_operations(program: ExportedProgram) -> Iterator[Fault]:
    """Calls go to operators of the allowed namespaces; there are no submodules or control-flow blocks."""
    for node in _calls(program):
        op = schema_of(node)
        if node.target is not operator.getitem and (op is None or op.namespace not in ALLOWED_NAMESPACES):
            yield node, "is not an operation that can be compiled", "use ATen or a deepinfer operation"


def no_host_reads(program: ExportedProgram) -> Iterator[Fault]:
    """No value travels to the host."""
    for node in _calls(program):
        if node.target in _HOST_READS:
            yield node, "reads a value on the host", "keep the value in a tensor"


def _indexes_by_number(node: fx.Node) -> bool:
    """True for an `aten.index` without masks, whose result has the shape of its indices."""
    if node.target is not _aten.index.Tensor:
        return False
    dtypes = [item.meta["val"].dtype for item in node.args[1] if isinstance(item, fx.Node)]  # type: ignore
    return not {torch.bool, torch.uint8} & set(dtypes)


def static_shapes(program: ExportedProgram) -> Iterator[Fault]:
    """No shape, and no number in the graph, depends on what a tensor holds."""
    for node in _calls(program):
        op = schema_of(node)
        if op is not None and torch.Tag.dynamic_output_shape in op.tags and not _indexes_by_number(node):
            yield node, "has a shape that values decide", "use a fixed shape and a mask"
    for node in program.graph_module.graph.nodes:
        values = [*pytree.tree_leaves(node.meta.get("val")), *pytree.tree_leaves((node.args, node.kwargs))]
        sizes = [size for value in values if isinstance(value, torch.Tensor) for size in value.shape]
        if any(isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) for value in values + sizes):
            yield node, "holds a symbolic number", "capture with static shapes"


def no_randomness(program: ExportedProgram) -> Iterator[Fault]:
    """No operation draws random numbers."""
    for node in _calls(program):
        op = schema_of(node)
        if op is not None and torch.Tag.nondeterministic_seeded in op.tags:
            yield node, "draws random numbers", "sampling happens outside the graph"


def tensors_only(program: ExportedProgram) -> Iterator[Fault]:
    """Inputs and outputs are tensors, and every node says what it computes."""
    for node in program.graph_module.graph.find_nodes(op="placeholder"):
        if not isinstance(node.meta.get("val"), torch.Tensor):
            yield node, "is an input that is no tensor", "pass it as a tensor or fix it in the configuration"
    for value in pytree.tree_leaves(output_node(program.graph_module.graph).args[0]):
        if not isinstance(value, fx.Node):
            yield f"output {value!r}", "is not a tensor", "return tensors only"
    for node in _calls(program):
        if "val" not in node.meta:
            yield node, "has no metadata", "capture with torch.export"


def no_literals(program: ExportedProgram) -> Iterator[Fault]:
    """All constants come from the weight store: none were made while tracing."""
    for spec in program.graph_signature.input_specs:
        if spec.kind not in (InputKind.USER_INPUT, InputKind.PARAMETER, InputKind.BUFFER):
            action = "build it from torch.full or torch.arange, or register it as a buffer"
            yield spec.arg.name, "is a literal tensor made while tracing", action


def writes_stay_in_place(program: ExportedProgram) -> Iterator[Fault]:
    """Inputs are written by whole-record `index_put_` or by deepinfer operations; weights never."""
    kinds = {spec.arg.name: spec.kind for spec in program.graph_signature.input_specs}
    for node in _calls(program):
        for written in written_nodes(node):
            owner = base_of(written)
            if owner.op != "placeholder":
                continue  # a temporary of the graph
            op = schema_of(node)
            if kinds.get(owner.name) != InputKind.USER_INPUT:
                yield node, f"writes the weight {owner.name}", "write to a cache region"
            elif op is None or (op not in _REGION_WRITES and op.namespace != "deepinfer"):
                yield node, f"writes the input {owner.name}", "write whole records with index_put_"
            elif written is not owner:
                yield node, f"writes a part of the records of {owner.name}", "write whole records"
            elif op in _REGION_WRITES and (node.args[3:4] == (True,) or node.kwargs.get("accumulate")):
                yield node, f"accumulates into {owner.name}", "write whole records"
    for spec in program.graph_signature.output_specs:
        if spec.kind != OutputKind.USER_OUTPUT:
            action = "use the program as torch.export returns it, without run_decompositions"
            yield spec.arg.name, "hands a written input back as an output", action


def outputs_own_memory(program: ExportedProgram) -> Iterator[Fault]:
    """No output is an input or a view of one."""
    for value in pytree.tree_leaves(output_node(program.graph_module.graph).args[0]):
        if isinstance(value, fx.Node) and base_of(value).op == "placeholder":
            yield value, "is an output in the memory of an input", "return a copy"


def one_device(program: ExportedProgram) -> Iterator[Fault]:
    """All tensors live on one device."""
    devices: dict[str, fx.Node] = {}
    for node in program.graph_module.graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.Tensor):
                devices.setdefault(value.device.type, node)
    for device in sorted(devices)[1:]:
        yield devices[device], f"is on {device}, other tensors are elsewhere", "capture on one device"


RULES: tuple[Rule, ...] = (
    no_host_reads,
    no_randomness,
    static_shapes,
    only_known_operations,
    tensors_only,
    no_literals,
    writes_stay_in_place,
    outputs_own_memory,
    one_device,
)


def check_captured(program: ExportedProgram, name: str = "graph") -> None:
    """Raise CaptureError, naming rule and node, if the captured graph breaks a rule."""
    for rule in RULES:
        for subject, fault, action in rule(program):
            where = f"{name}, rule {rule.__name__}"
            if isinstance(subject, fx.Node):
                subject = f"node {subject.name} ({target_text(subject.target)})"
            raise CaptureError(f"{subject} {fault}", where=where, action=action)
