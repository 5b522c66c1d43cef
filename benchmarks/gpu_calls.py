"""Calls of operations at the released model's shapes, as data (`gpu_calls.json`), and tensors for them.

The file lets a machine that has nothing but torch and Triton measure what the model calls. A test makes it
again from the model's config and compares.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import torch

from deepinfer.kernels import OPS, Op
from deepinfer.kernels.signature import CallSignature, TensorLayout

CALLS_FILE = Path(__file__).parent / "gpu_calls.json"
MAX_BYTES = 16 << 30  # of one call's tensors: the n-gram tables stay out
_NAMES = re.compile(r"\w+(?:\(\w!\))? (\w+)")
_BY_NAME = {op.name: op for op in OPS}


def encoded(call: CallSignature) -> dict[str, Any]:
    """The call as JSON values."""
    return {"op": call.op.name, "args": [_encoded(argument) for argument in call.args]}


def decoded(call: dict[str, Any]) -> CallSignature:
    """The inverse of `encoded`."""
    return CallSignature(_BY_NAME[call["op"]], tuple(_decoded(argument) for argument in call["args"]))


def released_calls() -> list[CallSignature]:
    """All calls of the file."""
    return [decoded(call) for call in json.loads(CALLS_FILE.read_text())]


def call_bytes(call: CallSignature) -> int:
    """Bytes of the call's tensors."""
    return sum(
        math.prod(each.shape) * each.dtype.itemsize for each in call.args if isinstance(each, TensorLayout)
    )


def parameter_names(op: Op) -> list[str]:
    """Names of an operation's arguments, from its schema."""
    return _NAMES.findall(op.schema.partition("(")[2].rpartition("->")[0])


def filled(call: CallSignature, device: torch.device) -> tuple[Any, ...]:
    """Arguments for one call: decode rows at a context of 4,096 tokens, each of a request of its own.

    Every index lies within what it points into, which is asserted.
    """
    names = parameter_names(call.op)
    given = dict(zip(names, call.args, strict=False))  # the last may be left out
    with torch.device(device):
        return tuple(
            _fill(name, value, given) if isinstance(value, TensorLayout) else value
            for name, value in given.items()
        )


def _encoded(argument: object) -> object:
    if isinstance(argument, TensorLayout):
        return {"shape": argument.shape, "stride": argument.stride, "dtype": str(argument.dtype)[6:]}
    return {"dtype": str(argument)[6:]} if isinstance(argument, torch.dtype) else argument


def _decoded(argument: Any) -> object:
    if not isinstance(argument, dict):
        return argument
    dtype = getattr(torch, argument["dtype"])
    if "shape" not in argument:
        return dtype
    return TensorLayout(tuple(argument["shape"]), tuple(argument["stride"]), dtype)


def _fill(name: str, layout: TensorLayout, given: dict[str, Any]) -> torch.Tensor:
    tensor = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype)
    if layout.dtype == torch.uint8:
        # scales near one; codes without NaN
        return tensor.random_(120, 128) if name.endswith("scale") else tensor.random_(0, 120)
    if layout.dtype.is_floating_point:
        return _floats(name, tensor)
    return tensor.copy_(_integers(name, layout, given))


def _floats(name: str, tensor: torch.Tensor) -> torch.Tensor:
    constants = {"temperatures": 0.8, "top_p": 0.9, "min_p": 0.0, "bias": 0.0}
    if name in constants and tensor.dim() == 1 and not (name == "bias" and tensor.shape[0] > 64):
        return tensor.fill_(constants[name])
    if name == "penalties":
        return tensor.copy_(torch.tensor([1.1, 0.1, 0.1]).expand_as(tensor))
    if name == "draft_log_probs":
        return tensor.normal_().log_softmax(-1)
    return tensor.normal_(std=3.0 if name == "logits" else 0.1)


def _integers(name: str, layout: TensorLayout, given: dict[str, Any]) -> torch.Tensor:
    shape, rows = layout.shape, layout.shape[0] if layout.shape else 1
    row = torch.arange(rows)
    cells = torch.arange(math.prod(shape)).reshape(shape)
    region = given.get("region", given.get("compressed"))
    if name in ("positions", "num_computed_tokens"):
        reach = given["table"].shape[0] if "table" in given else 4096
        return torch.full(shape, min(4096, reach) - 1)
    if name in ("request_index", "draft_index", "draft_ids", "seeds"):
        return row
    if name == "row_counts":
        return torch.ones(shape)
    if name in ("history_offsets", "bias_offsets", "row_offsets"):
        return row
    if name == "slot_ids":
        ring = given.get("ring", given.get("open_group", given.get("history", region)))
        slots = max(2, ring.shape[0]) if ring is not None else rows + 1
        assert rows < slots or ring.shape[0] == 0, (name, rows, slots)
        return 1 + row % (slots - 1)
    if name == "block_table":
        blocks = max(2, region.shape[0]) if region is not None else 2
        return 1 + cells % (blocks - 1)
    if name == "picks":
        seen = 4096 * 2 // 4  # entries of the coarser ratio at this context
        assert shape[1] <= seen, shape
        return torch.arange(shape[1]).expand(shape)
    if name == "candidates":
        return torch.arange(shape[1]).expand(shape)
    if name == "expert_ids":
        return (cells * 7) % given["w13"].shape[0]
    if name in ("token_map", "primes", "multipliers", "offsets"):
        return cells % 97 + 3
    if name == "masks":
        return torch.full(shape, -1)
    return torch.zeros(shape)
