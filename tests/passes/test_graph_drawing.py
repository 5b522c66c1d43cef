"""Drawings know from a text alone which calls write; the operations' schemas say whether they are right."""

import pytest
import torch

from deepinfer.artifacts import parse_graph
from deepinfer.artifacts.dot import WRITERS_WITH_RESULT
from deepinfer.kernels.native import load_host_library


def writes(schema: torch._C.FunctionSchema) -> bool:
    """Whether an operation writes one of its arguments."""
    return any(
        argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments
    )


def test_every_operation_that_returns_a_result_and_writes_is_known_to_the_drawings() -> None:
    load_host_library()
    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("deepinfer::")]
    assert len(schemas) > 20
    found = {
        f"{schema.name.replace('::', '.')}.{schema.overload_name or 'default'}"
        for schema in schemas
        if writes(schema) and schema.returns
    }
    assert found == WRITERS_WITH_RESULT
    assert all(writes(schema) for schema in schemas if not schema.returns)


@pytest.mark.parametrize("name", ["add.Tensor", "add_.Tensor", "copy_.default", "index_put_.default"])
def test_operations_of_torch_write_if_their_name_says_so(name: str) -> None:
    operation, overload = name.split(".")
    schema = getattr(getattr(torch.ops.aten, operation), overload)._schema
    (_, call) = parse_graph(f"%0 = input x : a\n%1 = aten.{name}(%0) : a\n", where="test")
    assert call.writes == writes(schema)
