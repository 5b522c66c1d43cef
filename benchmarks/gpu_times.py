"""Latency of one call on a device and, where it streams all it is given, its bytes per second."""

from collections.abc import Callable
from typing import Any

import torch
from gpu_backend import Backend, median, tensors
from gpu_calls import MAX_BYTES, call_bytes, filled

from deepinfer.kernels import OPS
from deepinfer.kernels.cuda import moe_gate as cuda_gate
from deepinfer.kernels.cuda.choice import language_of
from deepinfer.kernels.signature import CallSignature, TensorLayout

# read every byte of their arguments once and write their results: others touch parts of tables and caches
STREAMING = {
    "linear", "linear_fp8", "mhc_collapse", "mhc_expand", "mhc_mix", "moe_gate", "rms_norm", "shared_expert",
    "engram_gate",
}  # fmt: skip


def copy_bandwidth(backend: Backend, size: int) -> float:
    """Bytes read and written per second by a copy of `size` bytes within the device."""
    source = torch.zeros(size, dtype=torch.uint8, device=backend.device)
    target = torch.empty_like(source)
    return 2 * size / median(backend.seconds(lambda: target.copy_(source), 10))


def small_calls(names: set[str]) -> list[CallSignature]:
    """One small call of every operation, for a run without a card."""
    return [CallSignature.of(op, op.make_inputs(2, torch.bfloat16, 0)) for op in OPS if op.name in names]


def time_call(backend: Backend, call: CallSignature, copy: float, rounds: int) -> dict[str, Any]:
    """What there is to tell of one call; `copy` is the bandwidth that shares are of."""
    line: dict[str, Any] = {
        "op": call.op.name,
        "form": _form(call),
        "language": "triton",
        "microseconds": None,
        "gigabytes_per_second": None,
        "share": None,
        "skipped": None,
    }
    size = call_bytes(call)
    if size > MAX_BYTES:
        line["skipped"] = f"not run: {size / 1e9:.0f} GB"
        return line
    run: Callable[..., Any] = call.op.triton
    if backend.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(backend.device)
        line["language"] = language_of(call, f"sm_{major}{minor}")
        if line["language"] == "cuda":
            run = cuda_gate.moe_gate
        arguments = filled(call, backend.device)
    else:
        arguments = call.op.make_inputs(2, torch.bfloat16, 0)
    seconds = median(backend.seconds(lambda: run(*arguments), rounds))
    line["microseconds"] = seconds * 1e6
    if call.op.name in STREAMING:
        written = sum(each.numel() * each.element_size() for each in tensors(run(*arguments)))
        line["gigabytes_per_second"] = (size + written) / seconds / 1e9
        line["share"] = (size + written) / seconds / copy
    return line


def _form(call: CallSignature) -> str:
    """Shapes of the first tensors, enough to tell calls apart."""
    shapes = [each.shape for each in call.args if isinstance(each, TensorLayout)][:2]
    return " ".join("x".join(map(str, shape)) for shape in shapes)
