"""A whole decode step on native operations against the plain eager step, at several numbers of rows.

Both run the same step functions from Python, over the same weights and caches of their own; each row is a
request of 64 tokens. The second line of each case puts the linears back to torch's float32 products, on
weights that were widened beforehand: what is gained elsewhere is not lost in the linears.
"""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from harness import Line, compare

from deepinfer.graphs.cache_layout import CacheLayout, cache_layout
from deepinfer.graphs.checkpoint import Checkpoint
from deepinfer.graphs.config import load_config
from deepinfer.graphs.eager import allocate_caches, pad_rows
from deepinfer.graphs.records import PRECISIONS
from deepinfer.graphs.rows import StepInputs
from deepinfer.graphs.step import forward_step
from deepinfer.graphs.store import build_store
from deepinfer.kernels import Op, captured_ops
from deepinfer.kernels.linear_fp8 import dequantize_tiles
from deepinfer.kernels.native import load_host_library
from deepinfer.kernels.registry import routed_ops

EXAMPLES = Path(__file__).parent.parent / "examples"
MODELS = {"v41-tiny": EXAMPLES / "v41-tiny", "trained": EXAMPLES / "tiny" / "checkpoint"}
ROWS = (1, 4, 16)
CONTEXT = 64
FLOOR = 3.0


def run(threads: int) -> list[Line]:
    """The lines of this area."""
    load_host_library()
    lines = []
    for name, folder in MODELS.items():
        if not list(folder.glob("*.safetensors")):
            continue
        for precision in ("float32", "native"):
            for rows in ROWS:
                lines += _step(name, folder, precision, rows)
    return lines


def _step(name: str, folder: Path, precision: str, rows: int) -> list[Line]:
    config = load_config(folder)
    layout = cache_layout(config, precision, max_num_seqs=rows, max_model_len=256)  # type: ignore[arg-type]
    plain, packed = (
        build_store(Checkpoint(folder, config), config, 256, packed=packed) for packed in (False, True)
    )
    inputs = decode_rows(layout, rows)
    kind = PRECISIONS[precision]  # type: ignore[index]
    caches = {each: allocate_caches(layout) for each in ("eager", "native", "aten.mm")}
    padded = pad_rows(inputs, -rows % 8, pad_table=True)

    def step(
        each: str, weights: dict[str, Any], given: StepInputs, route: Callable[[], Any]
    ) -> Callable[[], Any]:
        def call() -> torch.Tensor:
            with torch.no_grad(), route():
                return forward_step(config, kind, weights, given, caches[each])

        return call

    widened = _with_torch_linears(plain)
    result = compare(
        {
            "eager": step("eager", plain, padded, nullcontext),
            "native": step("native", packed, inputs, captured_ops),
            "aten.mm": step("aten.mm", packed, inputs, lambda: routed_ops(widened)),
        }
    )
    label = f"decode step, {name}, {precision}, {rows} rows"
    return [
        result.line(label, "native", "eager", floor=FLOOR),
        result.line(f"{label}, linears as aten.mm", "native", "aten.mm"),
    ]


def decode_rows(layout: CacheLayout, rows: int) -> StepInputs:
    """A decode step of `rows` requests, all at position CONTEXT."""
    lines = torch.arange(rows)
    per_request = layout.max_blocks_per_request
    return StepInputs(
        token_ids=torch.full((rows,), 7),
        positions=torch.full((rows,), CONTEXT),
        request_index=lines,
        block_table=1 + torch.arange(rows * per_request).reshape(rows, per_request),
        slot_ids=lines + 1,
        num_computed_tokens=torch.full((rows,), CONTEXT),
        row_starts=lines.clone(),
        row_counts=torch.ones(rows, dtype=torch.int64),
    )


def _with_torch_linears(plain: dict[str, torch.Tensor]) -> Callable[[Op], Callable[..., Any]]:
    """Native operations, but the linears that stand alone are torch's products on widened weights.

    Widened weights are found by the shape of the packed one: equal shapes cost the same.
    """
    wide: dict[tuple[int, ...], torch.Tensor] = {}  # by groups, outputs, inputs
    for weight_name, weight in plain.items():
        scale = plain.get(weight_name.removesuffix("weight") + "scale")
        if weight_name.endswith(".weight") and scale is not None and ".ffn." not in weight_name:
            matrices = dequantize_tiles(weight, scale)
            wide[tuple(matrices.shape)] = matrices.transpose(1, 2).contiguous()

    def linear_fp8(
        x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, quantize: bool
    ) -> torch.Tensor:
        inputs = x.shape[2]
        matrices = wide[x.shape[1], weight[0].numel() // inputs, inputs]
        return torch.bmm(x.float().transpose(0, 1), matrices).transpose(0, 1).to(x.dtype).contiguous()

    def route(op: Op) -> Callable[..., Any]:
        return linear_fp8 if op.name == "linear_fp8" else op.native

    return route
