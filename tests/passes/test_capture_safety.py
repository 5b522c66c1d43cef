"""Capture safety: one illegal graph per rule, and legal neighbours of each."""

from pathlib import Path

import pytest
import torch
from torch import nn
from toy_graph import Function, capture, capture_toy

from deepinfer.errors import CaptureError
from deepinfer.passes import check_captured
from deepinfer.passes.capture_safety import RULES

X, INDEX, REGION = torch.ones(4, 8), torch.arange(4), torch.zeros(9, 8)


def refuses(rule, function, *inputs, match=""):
    """The rule of that name must be the one that refuses."""
    with pytest.raises(CaptureError, match=f"decode-4, rule {rule}: .*{match}"):
        check_captured(capture(Function(function), *inputs), "decode-4")


def test_the_toy_step_is_legal():
    check_captured(capture_toy())


def test_reading_a_value_on_the_host_is_refused():
    def step(x):
        count = x.sum().to(torch.int64).item()
        torch._check(count >= 0)
        torch._check(count < 10)
        return (x * count,)

    refuses("no_host_reads", step, X, match="aten.item.*reads a value")


def test_shapes_that_values_decide_are_refused():
    refuses(
        "static_shapes", lambda x: (x.nonzero(),), X, match="aten.nonzero.*has a shape that values decide"
    )
    refuses("static_shapes", lambda x: (x[x > 0],), X, match="aten.index.Tensor")


def test_numeric_indexing_is_allowed():
    check_captured(capture(Function(lambda x, index: (x[index] * 2,)), X, INDEX))


def test_symbolic_sizes_are_refused():
    rows = torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(
        Function(lambda x: (x * 2,)), (X,), dynamic_shapes={"inputs": ({0: rows},)}, strict=False
    )
    with pytest.raises(CaptureError, match="rule static_shapes: .*symbolic number"):
        check_captured(program)


def test_random_numbers_are_refused():
    refuses("no_randomness", lambda x: (x + torch.rand(4, 8),), X, match="aten.rand")
    refuses("no_randomness", lambda x: (torch.bernoulli(x.clamp(0, 1)),), X)


def test_foreign_namespaces_are_refused():
    torch.library.define("elsewhere::double", "(Tensor x) -> Tensor")
    torch.library.impl("elsewhere::double", "CompositeExplicitAutograd")(lambda x: x * 2)
    torch.library.register_fake("elsewhere::double")(lambda x: torch.empty_like(x))
    refuses("only_known_operations", lambda x: (torch.ops.elsewhere.double(x),), X, match="elsewhere.double")


def test_control_flow_blocks_are_refused():
    def step(x):
        return (torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,)),)

    refuses("only_known_operations", step, X)


def test_numbers_as_inputs_and_outputs_are_refused():
    with pytest.raises(CaptureError, match="rule tensors_only: node .*input that is no tensor"):
        check_captured(torch.export.export(Function(lambda x, n: (x * n,)), (X, 3), strict=False))
    with pytest.raises(CaptureError, match="rule tensors_only: output 3 is not a tensor"):
        check_captured(capture(Function(lambda x: (x * 2, 3)), X))


def test_nodes_without_metadata_are_refused():
    program = capture(Function(lambda x: (x * 2,)), X)
    next(
        iter(program.graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor))
    ).meta.clear()
    with pytest.raises(CaptureError, match="rule tensors_only: .*no metadata"):
        check_captured(program)


def test_literal_tensors_are_refused():
    refuses("no_literals", lambda x: (x + torch.tensor([1.0] * 8),), X, match="literal tensor")


class WritesWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.zeros(9, 8))

    def forward(self, x, index):
        self.weight.index_put_((index,), x)
        return (x * 2,)


def test_written_weights_are_refused():
    with pytest.raises(CaptureError, match="rule writes_stay_in_place: .*writes the weight"):
        check_captured(capture(WritesWeight(), X, INDEX))


def written(write):
    def step(x, index, region):
        write(region, index, x)
        return (x * 2,)

    return step


@pytest.mark.parametrize(
    ("write", "fault"),
    [
        (lambda region, index, x: region.copy_(region * 2), "writes the input"),
        (lambda region, index, x: region[:, :4].index_put_((index,), x[:, :4]), "a part of the records"),
        (lambda region, index, x: region.index_put_((index,), x, accumulate=True), "accumulates"),
        (lambda region, index, x: region.zero_(), "writes the input"),
    ],
)
def test_writes_that_would_not_stay_in_place_are_refused(write, fault):
    refuses("writes_stay_in_place", written(write), X, INDEX, REGION, match=fault)


def test_whole_record_writes_and_writes_to_temporaries_are_allowed():
    def step(x, index, region):
        buffer = x.exp()
        buffer[:, :4].mul_(2)
        region.index_put_((index,), buffer)
        return (buffer + 1,)

    check_captured(capture(Function(step), X, INDEX, REGION))


def test_decomposed_programs_are_refused():
    program = capture(Function(written(lambda r, i, x: r.index_put_((i,), x))), X, INDEX, REGION)
    with pytest.raises(CaptureError, match="rule writes_stay_in_place: .*without run_decompositions"):
        check_captured(program.run_decompositions({}))


def test_outputs_in_the_memory_of_inputs_are_refused():
    refuses("outputs_own_memory", lambda x: (x.view(8, 4),), X)
    refuses("outputs_own_memory", lambda x: (x * 2, x.view(32)[:8]), X)


def test_two_devices_are_refused():
    program = capture(Function(lambda x: (x * 2,)), X)
    node = next(node for node in program.graph_module.graph.nodes if node.op == "call_function")
    node.meta["val"] = torch.empty(4, 8, device="meta")
    with pytest.raises(CaptureError, match="rule one_device"):
        check_captured(program)


def test_submodules_are_refused():
    program = capture(Function(lambda x: (x * 2,)), X)
    graph = program.graph_module.graph
    program.graph_module.add_submodule("inner", nn.Identity())
    mul = next(node for node in graph.nodes if node.op == "call_function")
    with graph.inserting_after(mul):
        inner = graph.call_module("inner", (mul,))
    inner.meta = dict(mul.meta)
    with pytest.raises(CaptureError, match="rule only_known_operations"):
        check_captured(program)


def test_every_rule_has_a_docstring_and_a_test():
    source = Path(__file__).read_text(encoding="utf-8")
    for rule in RULES:
        assert rule.__doc__ and rule.__name__ in source
