"""Router, hyper-connections, norms, rotation and n-gram memory against their plain definitions.

Native precision, by rows of a step. The router is also set against what a user of torch would write: one
product with weights kept in float32, then softplus and a sort.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from harness import Line, compare

from deepinfer.kernels import (
    Op,
    engram_gate,
    engram_gather,
    engram_ids,
    mhc_collapse,
    mhc_expand,
    mhc_mix,
    moe_gate,
    rms_norm,
    rope,
)
from deepinfer.kernels.moe_gate import route
from deepinfer.kernels.packing import pack_linear

ROWS = (1, 4, 16, 64)
STREAMS, EPS = 4, 1e-20
# experts, hidden size, experts per token
ROUTERS = {"tiny": (16, 192, 4), "256 experts": (256, 5120, 8), "release": (384, 5120, 6)}
WIDTHS = {"tiny": 192, "release": 5120}
COLUMNS, RECORD = 24, 264  # n-gram columns and bytes of a table row, release
TABLE_ROWS = 400_000  # 106 MB: beyond the caches
ROUNDS = 5


def run(threads: int) -> list[Line]:
    """The lines of this area."""
    lines = []
    for name in ROUTERS:
        for rows in ROWS:
            lines += _router(name, rows)
    for name, width in WIDTHS.items():
        for rows in ROWS:
            lines += [_plain(op, name, rows, make(rows, width)) for op, make in _STREAM_OPS]
        lines += [_plain(rms_norm, name, rows, _norm(rows, width)) for rows in (1, 256)]
    embed = torch.randint(0, 120, (TABLE_ROWS, RECORD), dtype=torch.uint8)
    for rows in ROWS:
        lines.append(_plain(rope, "release queries", rows, _queries(rows)))
        lines.append(_plain(engram_ids, "release", rows, _tokens(rows)))
        ids = torch.randint(0, TABLE_ROWS, (rows, COLUMNS))
        lines.append(_plain(engram_gather, "release", rows, (embed, ids, torch.bfloat16)))
    return lines


def _plain(op: Op, model: str, rows: int, arguments: tuple[Any, ...]) -> Line:
    calls = {"native": lambda: op.native(*arguments), "plain": lambda: op.reference(*arguments)}
    return compare(calls, rounds=ROUNDS).line(f"{op.name}, {model}, {rows} rows", "native", "plain")


def _router(name: str, rows: int) -> list[Line]:
    experts, hidden, top_k = ROUTERS[name]
    x = torch.randn(rows, hidden).bfloat16()
    weight = torch.randn(experts, hidden).div(hidden**0.5).bfloat16()
    wide, packed = weight.float(), pack_linear(weight)
    rest = (torch.randn(experts) / 4, torch.arange(rows), top_k, True, 1.5)

    def by_torch() -> object:
        return route(F.linear(x.float(), wide), rest[0], top_k, True, 1.5)

    calls = {
        "native": lambda: moe_gate.native(x, packed, *rest),
        "plain": lambda: moe_gate.reference(x, weight, *rest),
        "torch": by_torch,
    }
    times = compare(calls, rounds=ROUNDS)
    label = f"moe_gate, {name}, {rows} rows"
    return [
        times.line(label, "native", "plain", 3 if rows == 1 else None),
        times.line(f"{label}: to float32 torch", "native", "torch"),
    ]


def _mix(rows: int, width: int) -> tuple[Any, ...]:
    outputs, inputs = (2 + STREAMS) * STREAMS, STREAMS * width
    fn = torch.randn(outputs, inputs) / inputs**0.5
    residual = torch.randn(rows, STREAMS, width).bfloat16()
    return residual, fn, torch.randn(outputs), torch.tensor([0.7, 1.3, 2.0]), 20, EPS, 1e-6


def _collapse(rows: int, width: int) -> tuple[Any, ...]:
    residual = torch.randn(rows, STREAMS, width).bfloat16()
    return residual, torch.rand(rows, STREAMS), torch.rand(width).bfloat16(), EPS


def _expand(rows: int, width: int) -> tuple[Any, ...]:
    y, residual = torch.randn(rows, width).bfloat16(), torch.randn(rows, STREAMS, width).bfloat16()
    return y, residual, torch.rand(rows, STREAMS), torch.rand(rows, STREAMS, STREAMS)


def _memory(rows: int, width: int) -> tuple[Any, ...]:
    key_and_value = torch.randn(rows, (STREAMS + 1) * width).bfloat16()
    return torch.randn(rows, STREAMS, width).bfloat16(), key_and_value, torch.rand(STREAMS, width), EPS


def _norm(rows: int, width: int) -> tuple[Any, ...]:
    return torch.randn(rows, width).bfloat16(), torch.rand(width).bfloat16(), EPS


def _queries(rows: int) -> tuple[Any, ...]:
    angles = torch.arange(256).unsqueeze(1) * torch.rand(32)
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    return torch.randn(rows, 64, 512).bfloat16(), table, torch.arange(rows), False


def _tokens(rows: int) -> tuple[Any, ...]:
    primes = torch.arange(COLUMNS) * 2 + 16_000_057
    tables = (
        torch.randint(0, 99_092, (129_280,)),
        torch.randint(1, 2**46, (4,)),
        primes,
        primes.cumsum(0) - primes,
    )
    history = torch.randint(0, 129_280, (rows + 1, 9, 1), dtype=torch.int32)
    tokens, positions = torch.randint(0, 129_280, (rows,)), torch.arange(rows) + 100
    return tokens, history, *tables, 2, positions, torch.arange(rows), torch.arange(rows) + 1, positions


_STREAM_OPS: tuple[tuple[Op, Callable[[int, int], tuple[Any, ...]]], ...] = (
    (mhc_mix, _mix),
    (mhc_collapse, _collapse),
    (mhc_expand, _expand),
    (engram_gate, _memory),
)
