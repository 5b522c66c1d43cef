"""Fusion: every op is found where its definition stands, and nowhere else.

Graphs before and after are run by definitions, so equality is equality of bytes: a fusion changes which calls
a graph makes, never what it means.
"""

import operator
from math import inf
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_graphs import (
    COMPOSITE,
    WITHOUT_LINT,
    fuse,
    fusions,
    plain_program,
    run_by_definition,
    same_bytes,
    signature_around,
)
from torch import fx

from deepinfer.errors import PassError
from deepinfer.kernels.native import load_host_library
from deepinfer.passes import PassManager, graph_text
from deepinfer.passes.fuse import FUSED_OPS, fusion_passes
from deepinfer.passes.patterns import Miss, find_matches, trace_pattern
from deepinfer.passes.pipeline import exact_passes

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
each_op = pytest.mark.parametrize("name", sorted(COMPOSITE))
each_dtype = pytest.mark.parametrize("dtype", sorted(DTYPES))


def case(name: str, dtype: str = "float32", rows: int = 5) -> tuple[Any, tuple[Any, ...]]:
    load_host_library()
    op = COMPOSITE[name]
    return op, op.make_inputs(rows, DTYPES[dtype], 3)


@each_dtype
@each_op
def test_a_definition_becomes_one_call_with_the_same_bytes(name: str, dtype: str) -> None:
    op, args = case(name, dtype)
    program = plain_program(op, args)
    before = run_by_definition(program, args)
    report = fuse(program, signature_around(op, args))
    assert fusions(report) == {name: 1}
    text = graph_text(program.graph_module)
    assert text.count(f"deepinfer.{name}.default(") == 1
    # what is left around the op: one product before it, one copy per result
    calls = [line.partition(" = ")[2] for line in text.splitlines() if " = aten." in line]
    assert {call.partition("(")[0] for call in calls} <= {"aten.mul.Tensor", "aten.clone.default"}, text
    assert same_bytes(run_by_definition(program, args), before)


@each_op
def test_running_again_finds_nothing(name: str) -> None:
    op, args = case(name)
    program = plain_program(op, args)
    fuse(program, signature_around(op, args))
    text = graph_text(program.graph_module)
    report = fuse(program, signature_around(op, args))
    assert not any(result.rewrites for result in report.results)
    assert graph_text(program.graph_module) == text


@each_op
def test_another_form_is_left_alone(name: str) -> None:
    op, args = case(name, rows=5)
    _, others = case(name, rows=6)
    program = plain_program(op, args)
    assert fusions(fuse(program, signature_around(op, others))) == {}


def _constants(program: torch.export.ExportedProgram) -> list[tuple[fx.Node, int, Any]]:
    """Every number that a call is given."""
    return [
        (node, position, value)
        for node in program.graph.nodes
        if node.op == "call_function" and node.target is not operator.getitem
        for position, value in enumerate(node.args)
        if isinstance(value, (bool, int, float))
    ]


def _another(value: bool | int | float) -> bool | int | float:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return 2.0 if value in (inf, -inf) else value + max(1.0, abs(value))


@each_op
def test_a_change_of_any_number_is_a_near_miss(name: str) -> None:
    """One number is changed in a graph that matches otherwise: the changed call must not be covered.

    A result of its own, of which the others need no part, may be left where it is.
    """
    op, args = case(name)
    pattern = trace_pattern(signature_around(op, args))
    program = plain_program(op, args)
    PassManager(exact_passes(())[:2]).run(program)  # the canonical form, without fusions
    (match,) = find_matches(program.graph, pattern)
    seen = 0
    for node, position, value in _constants(program):
        if node not in match.calls:
            continue
        other = _another(value)
        changed = (*node.args[:position], other, *node.args[position + 1 :])
        node.args, kept = changed, node.args
        miss = Miss()
        found = find_matches(program.graph, pattern, miss)
        assert not any(node in each.calls for each in found), f"{node.name}, argument {position}: {other}"
        assert found or miss.reason, node.name
        node.args = kept
        seen += 1
    assert seen, "the definition has no number"
    assert len(find_matches(program.graph, pattern)) == 1


@each_op
def test_an_inner_value_used_outside_keeps_the_definition(name: str) -> None:
    op, args = case(name)
    pattern = trace_pattern(signature_around(op, args))
    program = plain_program(op, args)
    PassManager(exact_passes(())[:2]).run(program)
    (match,) = find_matches(program.graph, pattern)
    results = {match.nodes[node] for node in pattern.outputs if node in match.nodes}
    inner = [node for node in match.calls if node not in results and node.users]
    last = program.graph.find_nodes(op="output")[0]
    for node in sorted(inner, key=lambda node: node.name)[:4]:
        with program.graph.inserting_before(last):
            outside = program.graph.call_function(torch.ops.aten.clone.default, (node,))
        miss = Miss()
        assert not find_matches(program.graph, pattern, miss)
        assert f"uses the inner value {node.name}" in miss.reason
        program.graph.erase_node(outside)


@pytest.mark.parametrize("kind", ["write", "read"])
def test_memory_touched_in_between_keeps_the_definition(kind: str) -> None:
    """ring_write reads old records first and writes last: nothing else may come between."""
    op, args = case("ring_write")
    pattern = trace_pattern(signature_around(op, args))
    program = plain_program(op, args)
    PassManager(exact_passes(())[:2]).run(program)
    (match,) = find_matches(program.graph, pattern)
    ring = match.nodes[pattern.inputs[0]]
    last = max(match.calls, key=list(program.graph.nodes).index)
    with program.graph.inserting_before(last):
        if kind == "write":
            program.graph.call_function(torch.ops.aten.zero_.default, (ring,))
        else:
            program.graph.call_function(torch.ops.aten.clone.default, (ring,))
    miss = Miss()
    assert not find_matches(program.graph, pattern, miss)
    assert ("writes" if kind == "write" else "reads") in miss.reason


def test_a_result_that_nobody_uses_may_be_missing() -> None:
    """The router's logits are for looking at; a graph without them is a router still."""
    op, args = case("moe_gate")
    program = plain_program(op, args)
    output = program.graph.find_nodes(op="output")[0]
    logits, ids, weights = output.args[0]
    before = run_by_definition(program, args)
    output.args = ((ids, weights),)
    program.graph.erase_node(logits)
    program.graph_module.recompile()
    spec = program.graph_signature.output_specs
    del spec[0]
    assert fusions(fuse(program, signature_around(op, args))) == {"moe_gate": 1}
    assert same_bytes(run_by_definition(program, args)[:2], before[1:3])


def test_a_missing_fusion_fails_with_the_nearest_miss() -> None:
    op, args = case("moe_gate")
    program = plain_program(op, args)
    (sort,) = program.graph.find_nodes(op="call_function", target=torch.ops.aten.sort.stable)
    sort.kwargs = {**sort.kwargs, "descending": False}
    manager = PassManager(exact_passes([signature_around(op, args)]), WITHOUT_LINT)
    with pytest.raises(PassError) as caught:
        manager.run(program, {"moe_gate": 1}, name="decode-4")
    message = str(caught.value)
    assert "fuse_moe_gate fired 0 times where the model asks for 1" in message
    assert "aten.sort.stable(*, descending=False, dim=1, stable=True)" in message
    assert "aten.sort.stable(*, descending=True, dim=1, stable=True) was expected" in message


def test_a_fusion_that_nobody_asked_for_fails() -> None:
    op, args = case("rope")
    manager = PassManager(exact_passes([signature_around(op, args)]), WITHOUT_LINT)
    with pytest.raises(PassError, match="fuse_rope fired 1 times where the model asks for 0"):
        manager.run(plain_program(op, args), {"moe_gate": 0})


def test_every_op_made_of_others_has_a_pass() -> None:
    from deepinfer.kernels import OPS

    assert {op.name for op in FUSED_OPS} == {op.name for op in OPS if op.composite}
    assert [step.name for step in fusion_passes(())] == [f"fuse_{op.name}" for op in FUSED_OPS]


ELEMENTWISE = ("mhc_expand", "mhc_collapse", "rope", "window_record", "moe_gate", "engram_gate")


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from(ELEMENTWISE), min_size=1, max_size=4),
    st.integers(1, 9),
    st.sampled_from(sorted(DTYPES)),
    st.integers(0, 1000),
    st.booleans(),
)
def test_random_graphs_of_several_ops(
    names: list[str], rows: int, dtype: str, seed: int, shared: bool
) -> None:
    """Several definitions in one graph, on inputs of their own or on shared ones: all found, no bit moves."""
    cases = [(COMPOSITE[name], COMPOSITE[name].make_inputs(rows, DTYPES[dtype], seed)) for name in names]
    if not shared:
        cases = [
            (op, op.make_inputs(rows, DTYPES[dtype], seed + index)) for index, (op, _) in enumerate(cases)
        ]
    program, tensors = several(cases)
    before = run_by_definition(program, tensors)
    report = fuse(program, *(signature_around(op, args) for op, args in cases))
    assert fusions(report) == {name: names.count(name) for name in dict.fromkeys(names)} or all(
        fusions(report)[name] == names.count(name) for name in names
    )
    assert same_bytes(run_by_definition(program, tensors), before)


def several(cases: list[tuple[Any, tuple[Any, ...]]]) -> tuple[torch.export.ExportedProgram, tuple[Any, ...]]:
    """One graph with the definition of every case, chained by sums so that no part is dead."""
    from plain_graphs import tensors_of

    from deepinfer.kernels import captured_ops

    class Chain(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            given, outputs = iter(tensors), []
            for op, args in cases:
                own = [next(given) if isinstance(arg, torch.Tensor) else arg for arg in args]
                results = op(*own)
                results = results if isinstance(results, tuple) else (results,)
                outputs += [result * 2 for result in results]
            return tuple(outputs)

    tensors = tuple(tensor for _, args in cases for tensor in tensors_of(args))
    with captured_ops(fused=False), torch.no_grad():
        return torch.export.export(Chain(), tensors, strict=False), tensors
