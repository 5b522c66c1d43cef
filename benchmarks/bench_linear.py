"""Linear layers against float32 through torch (MKL): packed weights of every format, few rows and many.

The quantised formats are read from matrices that no cache holds, in either form. With one or two rows, a mere
sum of the float32 weights shows what memory allows: neither side can be much faster than that.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from harness import Line, compare

from deepinfer.kernels import linear, linear_fp4, linear_fp8
from deepinfer.kernels.packing import pack_linear, pack_linear_fp4, pack_linear_fp8

SHAPES = ((512, 2048), (2048, 4096), (5120, 1280))  # inputs, outputs
ROWS = (1, 2, 4, 8, 16, 64, 256)
FEW_ROWS = 16
READ_ROWS = 2
# 42 MB in FP4, 335 MB in float32
LARGE = (5120, 16384)


def run(threads: int) -> list[Line]:
    """The lines of this area."""
    lines = []
    for inputs, outputs in SHAPES:
        weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0)) / inputs**0.5
        for rows in ROWS:
            lines += _dense(weight, rows)
    return lines + _quantised()


def _dense(weight: torch.Tensor, rows: int) -> list[Line]:
    outputs, inputs = weight.shape
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows))
    packed, halves = pack_linear(weight), pack_linear(weight.bfloat16())
    calls: dict[str, Callable[[], object]] = {
        "float32": lambda: linear.native(x, packed, torch.float32),
        "bfloat16": lambda: linear.native(x, halves, torch.float32),
        "mkl": lambda: F.linear(x, weight),
    }
    if rows <= READ_ROWS:
        calls["read"] = packed.sum
    times = compare(calls, rounds=15 if rows <= FEW_ROWS else 7)
    label = f"linear {inputs} x {outputs}, {rows} rows"
    floor = 1.2 if rows <= FEW_ROWS else 0.9
    lines = [
        times.line(label, "float32", "mkl", floor),
        times.line(f"{label}, bf16 weights", "bfloat16", "mkl"),
    ]
    if rows <= READ_ROWS:
        lines.append(times.line(f"{label}, read of the weights", "read", "mkl"))
    return lines


def _quantised() -> list[Line]:
    """One row, in bf16 with quantised activations, against one row in float32."""
    inputs, outputs = LARGE
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (1, outputs, inputs), generator=generator, dtype=torch.uint8)
    codes[codes % 128 == 127] = 0
    fp8 = pack_linear_fp8(codes, torch.full((1, outputs // 32, inputs // 32), 118, dtype=torch.uint8))
    nibbles = codes[..., : inputs // 2].contiguous()
    fp4 = pack_linear_fp4(nibbles, torch.full((1, outputs, inputs // 32), 122, dtype=torch.uint8))
    weight = torch.randn(outputs, inputs, generator=generator)
    x = torch.randn(1, inputs, generator=generator)
    x3, ids = x.bfloat16().unsqueeze(1), torch.zeros(1, 1, dtype=torch.int64)
    calls: dict[str, Callable[[], object]] = {
        "FP8": lambda: linear_fp8.native(x3, *fp8, True),
        "FP4": lambda: linear_fp4.native(x3, *fp4, ids, True),
        "mkl": lambda: F.linear(x, weight),
    }
    times = compare(calls, rounds=15)
    label = f"{inputs} x {outputs}, 1 row"
    return [
        times.line(f"linear_fp8 {label}", "FP8", "mkl", 2.5),
        times.line(f"linear_fp4 {label}", "FP4", "mkl", 3.5),
    ]
