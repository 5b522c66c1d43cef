"""Argument checks shared by the references and the shape rules of the operations.

Every fault is a UsageError that names the operation, the argument, what was expected and what came.
"""

from __future__ import annotations

import torch

from deepinfer.errors import UsageError

FLOAT_DTYPES = (torch.bfloat16, torch.float32)
Shape = tuple["int | None", ...]


def check_tensor(
    op: str, name: str, tensor: torch.Tensor, shape: Shape, dtypes: tuple[torch.dtype, ...]
) -> None:
    """`shape` has None where any size will do. The tensor must be contiguous."""
    check_shape(op, name, tensor, shape)
    check_dtype(op, name, tensor, dtypes)


def check_region(
    op: str, name: str, region: torch.Tensor, shape: Shape, dtypes: tuple[torch.dtype, ...]
) -> None:
    """A cache region `[blocks or slots, entries, record]`: contiguous but for its first axis."""
    check_shape(op, name, region, shape)
    _, entries, size = region.shape
    dense = (size <= 1 or region.stride(2) == 1) and (entries <= 1 or region.stride(1) == size)
    if not dense:
        raise UsageError(
            f"must be contiguous within a block or slot, got strides {region.stride()}", where=f"{op}: {name}"
        )
    check_dtype(op, name, region.new_empty(0), dtypes)  # the dtype alone


def check_shape(op: str, name: str, tensor: torch.Tensor, shape: Shape) -> None:
    """`shape` has None where any size will do."""
    got = tuple(tensor.shape)
    if len(got) != len(shape) or any(
        want is not None and have != want for have, want in zip(got, shape, strict=True)
    ):
        wanted = "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"
        raise UsageError(f"must have shape {wanted}, got {list(got)}", where=f"{op}: {name}")


def check_dtype(op: str, name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """The dtype must be one of `dtypes` and the tensor contiguous."""
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        got = str(tensor.dtype).removeprefix("torch.")
        raise UsageError(f"must be {wanted}, got {got}", where=f"{op}: {name}")
    if not tensor.is_contiguous():
        raise UsageError(
            f"must be contiguous, got strides {tensor.stride()}",
            where=f"{op}: {name}",
            action="call .contiguous()",
        )


def check_multiple(op: str, name: str, size: int, multiple: int) -> None:
    """`size` must be a positive multiple of `multiple`."""
    if size <= 0 or size % multiple:
        raise UsageError(f"must be a positive multiple of {multiple}, got {size}", where=f"{op}: {name}")


def check_activation_group(op: str, name: str, size: int, group: int) -> None:
    """`size` must be a multiple of `group`, which must be one of 32."""
    check_multiple(op, "activation_group", group, 32)
    check_multiple(op, name, size, group)


def check_out_dtype(op: str, dtype: torch.dtype) -> None:
    """Results are bfloat16 or float32."""
    if dtype not in FLOAT_DTYPES:
        raise UsageError(f"must be bfloat16 or float32, got {dtype}", where=f"{op}: out_dtype")


def last_size(op: str, name: str, tensor: torch.Tensor) -> int:
    """Size of the last axis; a tensor without axes is refused."""
    if tensor.dim() == 0:
        raise UsageError("must have at least one axis, got a scalar", where=f"{op}: {name}")
    return tensor.shape[-1]


def check_values(op: str, name: str, fine: torch.Tensor, message: str) -> None:
    """Every element of `fine` must hold; a trace, which has no values, checks nothing."""
    if not torch.compiler.is_compiling() and not torch.compiler.is_exporting() and not bool(fine.all()):
        raise UsageError(message, where=f"{op}: {name}")
