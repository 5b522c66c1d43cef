"""Which arguments of an operation have one entry per row, so that tests can take rows out of a call."""

from typing import Any

import torch

from deepinfer.kernels import Op

# arguments with one entry per row, where it is not the first alone
ROW_ARGUMENTS = {
    "compress": (0, 8, 9),
    "compress_biased": (0, 9, 10),
    "engram_gate": (0, 1),
    "engram_gather": (1,),
    "engram_ids": (0, 7, 8),
    "index_topk": (0, 1, 3, 4, 5),
    "linear_fp4": (0, 3),
    "mhc_collapse": (0, 1),
    "mhc_expand": (0, 1, 2, 3),
    "moe_experts": (0, 1, 2),
    "moe_gate": (0, 3),
    "moe_hash_gate": (0, 3, 4),
    "rope": (0, 2),
    "sample": (0, 1, 2, 3, 4, 5, 6, 15),
    "shared_expert": (0, 1),
    "sparse_attention": (0, 1, 4, 8, 9),
    "window_record": (0, 4),
}
# where a NaN in the first argument does not fill its whole row
NAN_STAYS_LOCAL = {
    "compress",
    "compress_biased",
    "engram_gate",
    "index_topk",
    "linear_fp4",
    "mhc_expand",
    "moe_experts",
    "quantize_tail",
    "rope",
    "sample",
    "sparse_attention",
}


def outputs(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def take_rows(op: Op, inputs: tuple[Any, ...], rows: torch.Tensor) -> tuple[Any, ...]:
    chosen = ROW_ARGUMENTS.get(op.name, (0,))
    return tuple(value[rows] if index in chosen else value for index, value in enumerate(inputs))
