"""Signatures of calls: equal for equal forms, and recorded without computing."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from deepinfer.kernels import rms_norm, rope
from deepinfer.kernels.signature import CallSignature, TensorLayout, recorded_calls


def test_equal_forms_have_equal_signatures_whatever_the_values() -> None:
    args, others = (rms_norm.make_inputs(3, torch.float32, seed) for seed in (0, 1))
    assert CallSignature.of(rms_norm, args) == CallSignature.of(rms_norm, others)
    assert len({CallSignature.of(rms_norm, args), CallSignature.of(rms_norm, others)}) == 1


def test_another_op_layout_dtype_or_type_of_number_is_another_form() -> None:
    x, weight, table = torch.ones(2, 4), torch.ones(4), torch.ones(4, 2)
    forms = [
        CallSignature.of(rms_norm, (x, weight, 1.0)),
        CallSignature.of(rms_norm, (x, weight, 1)),
        CallSignature.of(rms_norm, (x, weight, True)),
        CallSignature.of(rms_norm, (x.bfloat16(), weight, 1.0)),
        CallSignature.of(rms_norm, (torch.ones(4, 2).t(), weight, 1.0)),
        CallSignature.of(rope, (x, weight, 1.0)),
        CallSignature.of(rms_norm, (x, table, 1.0)),
    ]
    assert len(set(forms)) == len(forms)
    assert all(one != other for i, one in enumerate(forms) for other in forms[:i])


def test_example_arguments_have_the_form() -> None:
    strided = torch.empty_strided((3, 2, 4), (16, 4, 1), dtype=torch.uint8)
    signature = CallSignature.of(rope, (strided, 5, "name"))
    example, number, text = signature.example_args()
    assert TensorLayout.of(example) == TensorLayout.of(strided) == signature.args[0]
    assert (number, text) == (5, "name")


def test_recording_computes_nothing_and_keeps_the_order() -> None:
    with FakeTensorMode(), recorded_calls() as calls:
        x = torch.empty(3, 1 << 40)
        result = rms_norm(x, torch.empty(1 << 40), 1e-6)
        rms_norm(result, torch.empty(1 << 40), 1e-5)
    assert [call.args[2] for call in calls] == [1e-6, 1e-5]
    assert result.shape == x.shape
    assert torch.equal(rms_norm(torch.ones(1, 8), torch.ones(8), 0.0), torch.ones(1, 8))  # as before
