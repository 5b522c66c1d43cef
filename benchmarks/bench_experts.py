"""Routed and shared experts against their plain definitions, in native precision."""

from typing import Any

import torch
from harness import Line, compare

from deepinfer.kernels import moe_experts, shared_expert
from deepinfer.kernels.packing import pack_linear_fp4, pack_linear_fp8

# hidden size, inner size, experts, experts per row
MODELS = {"tiny": (192, 64, 16, 4), "wide": (2048, 1024, 12, 6)}
FLOOR = 3.0


def run(threads: int) -> list[Line]:
    """The lines of this area."""
    lines = []
    for model in MODELS:
        for rows in (1, 4, 16):
            label, floor = f"moe_experts {model}, {rows} rows", FLOOR if rows == 1 else None
            lines.append(_line(label, moe_experts, _routed(model, rows), floor))
        lines.append(_line(f"shared_expert {model}, 1 row", shared_expert, _shared(model), None))
    return lines


def _line(
    label: str, op: Any, arguments: tuple[tuple[Any, ...], tuple[Any, ...]], floor: float | None
) -> Line:
    plain, packed = arguments
    calls = {"native": lambda: op.native(*packed), "plain": lambda: op.reference(*plain)}
    return compare(calls, rounds=7).line(label, "native", "plain", floor)


def _routed(model: str, rows: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Arguments with plain and with packed weights."""
    width, inner, experts, picks = MODELS[model]
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, width, generator=generator).bfloat16()
    ids = torch.rand(rows, experts, generator=generator).argsort(1)[:, :picks].contiguous()
    weights = torch.rand(rows, picks, generator=generator)
    w13 = _fp4(generator, experts, 2 * inner, width)
    w2 = _fp4(generator, experts, width, inner)
    rest = (10.0, True)
    return (x, ids, weights, *w13, *w2, *rest), (
        x,
        ids,
        weights,
        *pack_linear_fp4(*w13),
        *pack_linear_fp4(*w2),
        *rest,
    )


def _shared(model: str) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    width, inner, _, _ = MODELS[model]
    generator = torch.Generator().manual_seed(0)
    x, routed = torch.randn(1, width, generator=generator).bfloat16(), torch.zeros(1, width)
    w13, w2 = _fp8(generator, 2 * inner, width), _fp8(generator, width, inner)
    rest = (10.0, True)
    return (x, routed, *w13, *w2, *rest), (x, routed, *pack_linear_fp8(*w13), *pack_linear_fp8(*w2), *rest)


def _fp4(
    generator: torch.Generator, experts: int, outputs: int, inputs: int
) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.randint(0, 256, (experts, outputs, inputs // 2), generator=generator, dtype=torch.uint8)
    return weight, torch.full((experts, outputs, inputs // 32), 121, dtype=torch.uint8)


def _fp8(generator: torch.Generator, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.randint(0, 120, (1, outputs, inputs), generator=generator, dtype=torch.uint8)
    return weight, torch.full((1, outputs // 32, inputs // 32), 115, dtype=torch.uint8)
