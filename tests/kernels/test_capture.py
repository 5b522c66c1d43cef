"""Capturing: one node per op, right shapes, results of direct calls; a lowered graph calls the library."""

from typing import Any

import pytest
import torch

from deepinfer.kernels import OPS, captured_ops
from deepinfer.kernels.registry import Op, register_fake

# torch copies storages for its check and miscounts that of an empty ring; shapes are checked by the contract
NOT_CHECKED_BY_TORCH = {"compress"}
INPUTS = {op.name: op.make_inputs(5, torch.bfloat16, 1) for op in OPS}


def outputs(result: Any) -> tuple[torch.Tensor, ...]:
    if result is None:
        return ()
    return result if isinstance(result, tuple) else (result,)


class AllOps(torch.nn.Module):
    """Calls every op once on its own tensors; other arguments are constants."""

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        remaining = iter(tensors)
        results: list[torch.Tensor] = []
        for op in OPS:
            arguments = [next(remaining) if isinstance(a, torch.Tensor) else a for a in INPUTS[op.name]]
            results += outputs(op(*arguments))
        return tuple(results)


def export_all_ops() -> tuple[torch.export.ExportedProgram, tuple[torch.Tensor, ...]]:
    tensors = tuple(a for inputs in INPUTS.values() for a in inputs if isinstance(a, torch.Tensor))
    with captured_ops(), torch.no_grad():
        return torch.export.export(AllOps(), tensors, strict=False), tensors


def test_export_records_one_node_per_op_with_the_right_shapes():
    program, _ = export_all_ops()
    nodes = [n for n in program.graph.nodes if n.op == "call_function" and "deepinfer" in str(n.target)]
    assert [node.target for node in nodes] == [op.overload() for op in OPS]
    for op, node in zip(OPS, nodes, strict=True):
        fake, real = outputs(node.meta["val"]), outputs(op.native(*INPUTS[op.name]))
        assert [(f.shape, f.dtype, f.stride()) for f in fake] == [
            (r.shape, r.dtype, r.stride()) for r in real
        ]


def test_the_exported_module_equals_direct_calls(same_bytes):
    program, tensors = export_all_ops()
    direct = [part for op in OPS for part in outputs(op.native(*INPUTS[op.name]))]
    for got, want in zip(program.module()(*tensors), direct, strict=True):
        same_bytes(got, want)


@pytest.mark.slow
def test_a_compiled_graph_calls_the_library(same_bytes, tmp_path):
    program, tensors = export_all_ops()
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "all.pt2"))
    compiled = torch._inductor.aoti_load_package(package)
    for got, want in zip(compiled(*tensors), program.module()(*tensors), strict=True):
        same_bytes(got, want)


CHECKED = [op for op in OPS if op.name not in NOT_CHECKED_BY_TORCH]


@pytest.mark.parametrize("op", CHECKED, ids=lambda op: op.name)
def test_torchs_own_check_of_the_registration(op: Op):
    register_fake(op)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(op.overload(), INPUTS[op.name], test_utils=checks)


def test_routing_is_undone_also_after_an_exception(monkeypatch):
    op, calls = OPS[0], []
    monkeypatch.setattr(Op, "native", lambda self, *args: calls.append(self.name))
    op(*INPUTS[op.name])
    assert not calls
    with pytest.raises(KeyError), captured_ops():
        op(*INPUTS[op.name])
        raise KeyError
    assert calls == [op.name]
    op(*INPUTS[op.name])
    assert calls == [op.name]
