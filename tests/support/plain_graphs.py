"""Graphs that hold the definition of an op in plain calls, and the running of graphs by definitions alone."""

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from deepinfer.kernels import OPS, captured_ops
from deepinfer.kernels.native import load_host_library
from deepinfer.kernels.registry import Op
from deepinfer.kernels.signature import CallSignature, TensorLayout
from deepinfer.passes import PassManager, PassReport
from deepinfer.passes.fuse import FUSED_OPS
from deepinfer.passes.pipeline import exact_passes

COMPOSITE = {op.name: op for op in FUSED_OPS}
# the lint is about whole models; these graphs have arithmetic of their own around the op
WITHOUT_LINT = ("check_invariance",)


class AroundOp(nn.Module):
    """Something before the op, the op, something after it: a definition does not stand alone in a graph."""

    def __init__(self, op: Op, args: tuple[Any, ...]) -> None:
        super().__init__()
        self._op, self._args = op, args

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = iter(tensors)
        args = [next(given) if isinstance(arg, Tensor) else arg for arg in self._args]
        if isinstance(args[0], Tensor) and args[0].dtype.is_floating_point and not _writes_first(self._op):
            args[0] = args[0] * 0.5
        results = self._op(*args)
        results = results if isinstance(results, tuple) else (results,)
        values = [result for result in results if result is not None]
        return tuple(value.clone() for value in values) or (next(iter(tensors)).clone(),)


def _writes_first(op: Op) -> bool:
    return op.schema.partition("(")[2].startswith("Tensor(a!)")


def tensors_of(args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """The tensors among the arguments of an op."""
    return tuple(arg for arg in args if isinstance(arg, Tensor))


def signature_around(op: Op, args: tuple[Any, ...]) -> CallSignature:
    """The form in which `AroundOp` calls its op."""
    return CallSignature.of(op, args)


def plain_program(op: Op, args: tuple[Any, ...]) -> ExportedProgram:
    """The op's definition traced through, with something around it."""
    load_host_library()
    with captured_ops(fused=False), torch.no_grad():
        return torch.export.export(AroundOp(op, args), tensors_of(args), strict=False)


def fuse(program: ExportedProgram, *forms: CallSignature) -> PassReport:
    """Run the pipeline with these forms, in place."""
    return PassManager(exact_passes(forms), WITHOUT_LINT).run(program)


def fusions(report: PassReport) -> dict[str, int]:
    """Names of the ops that were put in, with their numbers."""
    counts = {result.name.removeprefix("fuse_"): result.rewrites or 0 for result in report.results}
    return {name: counts[name] for name in COMPOSITE if counts[name]}


class ByDefinition(fx.Interpreter):
    """Runs a graph; every op of the project by its reference. Weights and inputs are given in order."""

    _references = {f"deepinfer::{op.name}": op.reference for op in OPS}

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        schema = getattr(target, "_schema", None)
        reference = self._references.get(schema.name) if schema is not None else None
        return super().call_function(reference or target, args, kwargs)


def run_by_definition(program: ExportedProgram, args: tuple[Any, ...]) -> list[Tensor]:
    """Results of a program, and its inputs afterwards, for copies of the tensors in `args`."""
    inputs = [_copy(tensor) for tensor in tensors_of(args)]
    with torch.no_grad():
        outputs = ByDefinition(program.graph_module).run(*inputs)
    return [*outputs, *inputs]


def _copy(tensor: Tensor) -> Tensor:
    copy = TensorLayout.of(tensor).empty()
    return copy.copy_(tensor)


def same_bytes(first: list[Tensor], second: list[Tensor]) -> bool:
    """Equal by bytes, so that NaN equals itself."""
    return len(first) == len(second) and all(
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(
            a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
        )
        for a, b in zip(first, second, strict=True)
    )
