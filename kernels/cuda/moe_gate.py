"""The router in CUDA C++: `kernels/moe_gate.py` has the definition, `moe_gate.cu` the code."""

import ctypes
from pathlib import Path

import torch

from deepinfer.errors import UsageError
from deepinfer.kernels.cuda.choice import language_of
from deepinfer.kernels.cuda.driver import launch
from deepinfer.kernels.moe_gate import Routing, moe_gate_fake
from deepinfer.kernels.moe_gate import moe_gate as moe_gate_op
from deepinfer.kernels.signature import CallSignature

SOURCE = Path(__file__).parent / "moe_gate.cu"
_ROWS = 8  # kRows
_WARPS = 4  # of a block of logits: one expert each
_LANES = 32


def moe_gate(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    positions: torch.Tensor,
    top_k: int,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
) -> Routing:
    """x [T, D], weight [E, D] bf16, bias [E], positions [T] -> logits [T, E], ids and weights [T, top_k].

    Raises UsageError for a call that the rule gives to Triton.
    """
    arguments = (x, weight, bias, positions, top_k, norm_topk_prob, routed_scaling_factor)
    outputs = moe_gate_fake(*arguments)
    if language_of(CallSignature.of(moe_gate_op, arguments), "sm_90") != "cuda":
        raise UsageError(
            "no CUDA C++ kernel for this form", where="moe_gate: cuda", action="run the Triton form"
        )
    logits, expert_ids, expert_weights = outputs
    rows, inputs = x.shape
    experts = weight.shape[0]
    launch(
        SOURCE,
        "moe_gate_logits",
        (-(-rows // _ROWS), -(-experts // _WARPS)),
        _WARPS * _LANES,
        *(x, weight, positions, logits),
        *(ctypes.c_int64(rows), ctypes.c_int(inputs), ctypes.c_int(experts)),
    )
    launch(
        SOURCE,
        "moe_gate_route",
        (rows, 1),
        _LANES,
        *(logits, bias, positions, expert_ids, expert_weights),
        *(ctypes.c_float(routed_scaling_factor), ctypes.c_int(experts), ctypes.c_int(top_k)),
        ctypes.c_int(norm_topk_prob and top_k > 1),
    )
    return outputs
