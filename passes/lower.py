"""Lowering: one captured program becomes one shared object, by AOTInductor and the C++ compiler.

Inductor only generates C++ (`inductor.py`); compiling and linking are ours (`toolchain.py`), so that the
bytes depend on the graph, the instruction set and the toolchain alone. Weights enter as fake tensors: no
weight value can reach the code. Knows nothing about models, nor how shared objects are stored or loaded.
"""

import re
import shutil
import tempfile
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from deepinfer.errors import LoweringError
from deepinfer.passes.cuda_graph import on_card
from deepinfer.passes.effects import mutated_bases
from deepinfer.passes.generated_code import (
    check_no_threads,
    constant_names,
    refuse_unaligned,
    split_generated,
    whole_region_buffers,
)
from deepinfer.passes.inductor import Generated, generate
from deepinfer.passes.text import dtype_name
from deepinfer.passes.toolchain import Isa, build_shared_object, isa_level
from deepinfer.passes.verify import output_values


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of a lowered graph. `mutated` inputs are written in place."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    mutated: bool = False


@dataclass(frozen=True)
class ConstantSpec:
    """One weight of a lowered graph: its name in the shared object, and which weight belongs there."""

    name: str
    weight: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class LoweredGraph:
    """The files of a lowered graph and its signature.

    `constants` are the weights that the graph uses, by the name of the buffer or parameter each stands for.
    `extern_json` describes calls of registered operations and belongs beside the shared object under the same
    stem; None without such calls.
    """

    shared_object: Path
    extern_json: Path | None
    constants: tuple[ConstantSpec, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def lower_graph(
    program: ExportedProgram,
    *,
    name: str,
    work_dir: Path,
    isa: str = "avx2",
    in_place: bool = True,
    arch: str | None = None,
    unaligned: Collection[int] = (),
) -> LoweredGraph:
    """Lower one program to `work_dir/model.so` (and `model.json`), the same bytes for the same graph.

    `work_dir` is created and holds nothing else afterwards. One lowering at a time per process; run several
    processes to use several cores. `arch` is that of a graphics card to lower for (`isa` is then that of the
    code around the kernels); `unaligned` are the inputs that may start at any address there, others start at
    multiples of 16 bytes. Raises LoweringError if Inductor or the compiler fails, if the generated
    code is not of the expected form, or, with `in_place`, if a written input would be copied whole.
    """
    level = isa_level(isa)
    for spec in program.graph_signature.output_specs:
        if (
            spec.kind != OutputKind.USER_OUTPUT
        ):  # writes to inputs became outputs: all regions would be copied
            raise LoweringError(
                "the program is decomposed and writes no input in place",
                where=name,
                action="lower it as torch.export returns it",
            )
    work_dir.mkdir(parents=True, exist_ok=True)
    # Not below work_dir, whose name may hold a blank: Inductor does not quote paths to the compiler.
    scratch = Path(tempfile.mkdtemp(prefix="deepinfer-lower-"))
    try:
        module, arguments, weights = _unlifted(program, name)
        specs = _input_specs(program)
        card = None
        if arch is not None:
            graph = on_card(module, arguments, name, unaligned)
            module, arguments, card = graph.module, graph.arguments, (arch, graph.kernels)
        generated = generate(module, arguments, name, scratch, level, card)
        generated = replace(generated, source=refuse_unaligned(generated.source, name))
        if in_place:
            _check_in_place(generated, specs, name)
        constants, built = _build(generated, name, scratch, level, cuda=card is not None)
        shared_object = Path(shutil.move(built, work_dir / "model.so"))
        extern_json = None
        if generated.extern_json is not None:
            extern_json = Path(shutil.move(generated.extern_json, work_dir / "model.json"))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return LoweredGraph(
        shared_object=shared_object,
        extern_json=extern_json,
        constants=_constant_specs(program, constants, weights),
        inputs=specs,
        outputs=_output_specs(program),
    )


def _attribute_name(weight: str) -> str:
    return re.sub(r"\W", "_", weight)


def _unlifted(program: ExportedProgram, name: str) -> tuple[fx.GraphModule, list[Any], dict[str, str]]:
    """The graph with weights as attributes: module, example inputs, attribute -> weight name; all fake."""
    kinds = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    root, graph = nn.Module(), fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    arguments: list[Any] = []
    weights: dict[str, str] = {}
    for node in program.graph_module.graph.nodes:
        if node.op != "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
            # Traces of the source would put its paths into comments and names of the generated code.
            copies[node].meta = {key: node.meta[key] for key in ("val",) if key in node.meta}
            continue
        spec = kinds[node.name]
        if spec.kind == InputKind.USER_INPUT:
            copies[node] = graph.placeholder(node.name)
            arguments.append(node.meta["val"])
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            attribute = _attribute_name(spec.target)
            if attribute in weights:
                raise LoweringError(
                    f"weights {spec.target} and {weights[attribute]} share a name", where=name
                )
            weights[attribute] = spec.target
            root.register_buffer(attribute, node.meta["val"])
            copies[node] = graph.get_attr(attribute)
        else:
            raise LoweringError(f"input {node.name} is neither a tensor nor a weight", where=name)
        copies[node].meta = {"val": node.meta["val"]}
    return fx.GraphModule(root, graph), arguments, weights


def _spec(name: str, value: torch.Tensor, mutated: bool = False) -> TensorSpec:
    return TensorSpec(name, dtype_name(value.dtype), tuple(value.shape), tuple(value.stride()), mutated)


def _input_specs(program: ExportedProgram) -> tuple[TensorSpec, ...]:
    graph = program.graph_module.graph
    mutated = mutated_bases(graph)
    users = set(program.graph_signature.user_inputs)
    return tuple(
        _spec(node.name, node.meta["val"], node in mutated)
        for node in graph.find_nodes(op="placeholder")
        if node.name in users
    )


def _constant_specs(
    program: ExportedProgram, constants: tuple[tuple[str, str], ...], weights: dict[str, str]
) -> tuple[ConstantSpec, ...]:
    placeholders = {node.name: node for node in program.graph_module.graph.find_nodes(op="placeholder")}
    values = {
        spec.target: placeholders[spec.arg.name].meta["val"]
        for spec in program.graph_signature.input_specs
        if spec.target is not None
    }
    found = []
    for constant, attribute in constants:
        value = _spec(constant, values[weights[attribute]])
        found.append(ConstantSpec(constant, weights[attribute], value.dtype, value.shape, value.stride))
    return tuple(found)


def _output_specs(program: ExportedProgram) -> tuple[TensorSpec, ...]:
    values = output_values(program.graph_module.graph)
    return tuple(_spec(f"output_{index}", node.meta["val"]) for index, node in enumerate(values))


def _check_in_place(generated: Generated, specs: tuple[TensorSpec, ...], name: str) -> None:
    """Raise LoweringError if a written input is copied, or built anew, in every call."""
    wrapper, _ = split_generated(generated.source, name)
    regions = [(i, spec.dtype, spec.shape) for i, spec in enumerate(specs) if spec.mutated]
    for position in (*generated.copied_back, *whole_region_buffers(wrapper, regions, name)):
        raise _copied_region(specs[position], name)


def _build(
    generated: Generated, name: str, scratch: Path, isa: Isa, *, cuda: bool
) -> tuple[tuple[tuple[str, str], ...], Path]:
    """Check the generated code, then compile and link it: constants' names and the shared object."""
    wrapper, kernels = split_generated(generated.source, name)
    check_no_threads(wrapper + kernels, name)
    constants = constant_names(wrapper, name)
    (scratch / "wrapper.cpp").write_text(wrapper, encoding="utf-8")
    sources = [("wrapper.cpp", "-O1")]  # calls and checks only: higher levels cost minutes and gain nothing
    if kernels:
        (scratch / "kernels.cpp").write_text(kernels, encoding="utf-8")
        sources.append(("kernels.cpp", "-O3"))
    if cuda:
        sources.append((_write_machine_code(generated.machine_code, scratch), "-O0"))
    built = build_shared_object(sources, [generated.constants_object], isa, scratch, "model.so", cuda=cuda)
    return constants, built


def _write_machine_code(codes: dict[str, bytes], scratch: Path) -> str:
    """Write an assembly file that holds the code of every kernel under the name that the wrapper reads."""
    lines = [".section .rodata"]
    for number, (name, code) in enumerate(sorted(codes.items())):
        (scratch / f"kernel{number}.cubin").write_bytes(code)
        symbol = f"__{name}_start"
        lines += [".balign 16", f".global {symbol}", f".hidden {symbol}", f"{symbol}:"]
        lines.append(f'.incbin "kernel{number}.cubin"')
    lines.append('.section .note.GNU-stack,"",@progbits')
    (scratch / "machine_code.S").write_text("\n".join(lines) + "\n")
    return "machine_code.S"


def _copied_region(spec: TensorSpec, name: str) -> LoweringError:
    return LoweringError(
        f"the written input {spec.name}, {spec.dtype}{list(spec.shape)}, is copied whole in every call",
        where=name,
        action="write a region once, by a whole-record index_put_ or an operation that mutates it",
    )
