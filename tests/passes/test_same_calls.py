"""Fused graphs are compared with traces that recorded ops as calls, up to arguments that nothing reads."""

import pytest
import torch
from plain_graphs import COMPOSITE, AroundOp, fuse, plain_program, signature_around, tensors_of

from deepinfer.errors import CaptureError
from deepinfer.kernels import captured_ops
from deepinfer.passes.same_calls import check_same_calls


def both(name: str, dtype: torch.dtype = torch.float32):
    op, args = COMPOSITE[name], COMPOSITE[name].make_inputs(5, dtype, 0)
    fused = plain_program(op, args)
    fuse(fused, signature_around(op, args))
    with captured_ops(), torch.no_grad():
        recorded = torch.export.export(AroundOp(op, args), tensors_of(args), strict=False)
    fuse(recorded, signature_around(op, args))
    return fused, recorded


@pytest.mark.parametrize("name", sorted(COMPOSITE))
def test_both_ways_give_the_same_calls(name: str) -> None:
    fused, recorded = both(name)
    check_same_calls(fused.graph, recorded.graph)


@pytest.mark.parametrize("position", [4, 6])
def test_another_number_is_found(position: int) -> None:
    fused, recorded = both("moe_gate")
    (call,) = [node for node in recorded.graph.nodes if "moe_gate" in str(node.target)]
    call.args = (*call.args[:position], call.args[position] + 1, *call.args[position + 1 :])
    with pytest.raises(CaptureError, match="two traces of the model differ: deepinfer.moe_gate"):
        check_same_calls(fused.graph, recorded.graph, "decode-4")


def test_a_call_too_many_is_found() -> None:
    fused, recorded = both("rope")
    (output,) = recorded.graph.find_nodes(op="output")
    with recorded.graph.inserting_before(output):
        recorded.graph.call_function(torch.ops.aten.neg.default, output.args[0][:1]).meta["val"] = (
            output.args[0][0].meta["val"]
        )
    with pytest.raises(CaptureError, match=r"aten\.neg"):
        check_same_calls(fused.graph, recorded.graph)


def test_only_arguments_that_are_not_read_may_differ() -> None:
    op, args = COMPOSITE["compress"], COMPOSITE["compress"].make_inputs(5, torch.float32, 0)
    ratio = op.schema.count(",") and args[14]
    fused, recorded = both("compress")
    (call,) = [node for node in recorded.graph.nodes if "compress" in str(node.target)]
    read = call.args[8]  # positions
    call.args = (*call.args[:9], read, *call.args[10:])  # request_index
    assert ratio > 1
    with pytest.raises(CaptureError, match="two traces of the model differ"):
        check_same_calls(fused.graph, recorded.graph)
