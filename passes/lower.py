"""Lowering: one captured program becomes one shared object, by AOTInductor and the C++ compiler.

Inductor only generates C++ here; compiling and linking are ours (`toolchain.py`), so that the bytes depend
on the graph, the instruction set and the toolchain alone. Weights enter as fake tensors: no weight value can
reach the code. Knows nothing about models, nor how shared objects are stored or loaded.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from deepinfer.errors import LoweringError
from deepinfer.passes.effects import mutated_bases
from deepinfer.passes.generated_code import (
    check_no_region_copies,
    check_no_threads,
    constant_names,
    split_generated,
)
from deepinfer.passes.text import dtype_name
from deepinfer.passes.toolchain import Isa, build_shared_object, isa_level
from deepinfer.passes.verify import output_values

_OPTIONS: dict[str, Any] = {
    "aot_inductor.package": True,
    "aot_inductor.package_cpp_only": True,  # generate only: flags, linking and paths are ours
    "aot_inductor.package_constants_in_so": False,
    "aot_inductor.precompile_headers": False,
    "emulate_precision_casts": True,  # else bf16 roundings between fused operations are dropped
    "pattern_matcher": False,  # else mm + add becomes addmm, which rounds once where the model rounds twice
    "always_keep_tensor_constants": True,  # else weights of up to 8 elements become literals in the code
    "joint_graph_constant_folding": False,
    "reorder_for_locality": False,  # else reads move behind cache writes, and the cache is copied
    "cpp.threads": 1,  # sums must not depend on the number of threads; heavy operations have their own
    "max_autotune": False,
    "freezing": False,
}


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


def lower_graph(program: ExportedProgram, *, name: str, work_dir: Path, isa: str = "avx2") -> LoweredGraph:
    """Lower one program to `work_dir/model.so` (and `model.json`), the same bytes for the same graph.

    `work_dir` is created and holds nothing else afterwards. One lowering at a time per process; run several
    processes to use several cores. Raises LoweringError if Inductor or the compiler fails, if a written
    input would be copied whole, or if the generated code is not of the expected form.
    """
    level = isa_level(isa)
    work_dir.mkdir(parents=True, exist_ok=True)
    scratch = work_dir.resolve() / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        module, arguments, weights = _unlifted(program, name)
        specs = _input_specs(program)
        generated = _generate(module, arguments, name, scratch, level)
        constants, built = _build(generated, specs, name, scratch, level)
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
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
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


@dataclass(frozen=True)
class _Generated:
    """What Inductor leaves: the source, the object with its (empty) constant section, the extern calls."""

    source: str
    constants_object: Path
    extern_json: Path | None


@contextlib.contextmanager
def _pinned_inductor(isa: Isa, scratch: Path) -> Iterator[None]:
    """Make Inductor generate for `isa` on any processor, from fake weights, with caches below `scratch`."""
    from torch._inductor import cpu_vec_isa
    from torch._inductor import graph as inductor_graph

    base = {256: cpu_vec_isa.VecAVX2, 512: cpu_vec_isa.VecAVX512}[isa.vector_bits]

    class Pinned(base):  # type: ignore[valid-type, misc]
        """The level as given: neither probed by a trial compilation nor widened by what the builder has."""

        __hash__ = cpu_vec_isa.VecISA.__hash__

        def __bool__(self) -> bool:
            return True

    level = Pinned()
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(scratch / "cache"), "TMPDIR": str(scratch)}
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(cpu_vec_isa, "valid_vec_isa_list", lambda: [level]),
        # The original compares storages to merge equal constants; fake weights have none.
        mock.patch.object(inductor_graph, "is_same_tensor", lambda first, second: first is second),
    ):
        yield


def _generate(module: fx.GraphModule, arguments: list[Any], name: str, scratch: Path, isa: Isa) -> _Generated:
    from torch import _inductor

    stem = re.sub(r"\W", "_", name)
    options = {
        **_OPTIONS,
        "cpp.simdlen": isa.vector_bits,
        "cpp.march": isa.march,
        "aot_inductor.model_name_for_generated_files": stem,
        "aot_inductor.output_path": str(scratch / "generated"),
    }
    try:
        with _pinned_inductor(isa, scratch), torch.no_grad():
            files = _inductor.aot_compile(module, tuple(arguments), options=options)
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise LoweringError(f"Inductor failed: {lines[0]}", where=name) from error
    paths = [Path(file) for file in files if isinstance(file, str)]
    by_end = {end: [path for path in paths if path.name.endswith(end)] for end in (".cpp", ".weights.o")}
    extern = [path for path in paths if path.name == f"{stem}.wrapper.json"]
    if any(len(found) != 1 for found in by_end.values()):
        raise LoweringError("Inductor left other files than expected", where=name, action="use torch 2.13")
    return _Generated(
        source=by_end[".cpp"][0].read_text(encoding="utf-8"),
        constants_object=by_end[".weights.o"][0],
        extern_json=extern[0] if extern else None,
    )


def _build(
    generated: _Generated, specs: tuple[TensorSpec, ...], name: str, scratch: Path, isa: Isa
) -> tuple[tuple[tuple[str, str], ...], Path]:
    """Check the generated code, then compile and link it: constants' names and the shared object."""
    wrapper, kernels = split_generated(generated.source, name)
    regions = [(i, spec.dtype, spec.shape) for i, spec in enumerate(specs) if spec.mutated]
    check_no_region_copies(wrapper, regions, name)
    check_no_threads(wrapper + kernels, name)
    constants = constant_names(wrapper, name)
    (scratch / "wrapper.cpp").write_text(wrapper, encoding="utf-8")
    sources = [("wrapper.cpp", "-O1")]  # calls and checks only: higher levels cost minutes and gain nothing
    if kernels:
        (scratch / "kernels.cpp").write_text(kernels, encoding="utf-8")
        sources.append(("kernels.cpp", "-O3"))
    built = build_shared_object(sources, [generated.constants_object], isa, scratch, "model.so")
    return constants, built
