"""Compression, index keys, and index scores with their selection, against the plain definitions.

One row of a decode step, in native precision. `index_topk` must follow the context and not the width of the
block table; its plain form decodes and sorts the whole width, so it is timed at the narrowest that fits.
"""

from typing import Any

import torch
from harness import Line, compare

from deepinfer.kernels import compress, index_key, index_topk
from deepinfer.kernels.packing import PANEL, pack_linear, unpack_linear
from deepinfer.kernels.quantize_fp4 import quantize_fp4_reference

BLOCK_ENTRIES = 128
# hidden size, head_dim, index heads, index_head_dim, index_topk
MODELS = {"tiny": (192, 64, 4, 32, 32), "release": (5120, 512, 32, 128, 512)}


def run(threads: int) -> list[Line]:
    """The lines of this area."""
    lines = []
    for model in MODELS:
        for ratio in (2, 1):
            lines.append(_one_row(f"compress ratio {ratio}, {model}", compress, _compress(model, ratio), 6))
        lines.append(_one_row(f"index_key, {model}", index_key, _index_key(model), None))
    for context in (128, 1024, 16384):
        plain, floor = _index_topk("tiny", context, 64), 5
        lines.append(_one_row(f"index_topk, {context} entries, tiny", index_topk, plain, floor))
    lines += [_width("tiny", context) for context in (128, 1024)]
    lines += [_width("release", 1024), _growth("release")]
    return lines


def _one_row(name: str, op: Any, arguments: tuple[Any, ...], floor: float | None) -> Line:
    unpacked = [unpack_linear(value) if _is_packed(value) else value for value in arguments]
    calls = {"native": lambda: op.native(*arguments), "plain": lambda: op.reference(*unpacked)}
    return compare(calls, rounds=7).line(name, "native", "plain", floor)


def _is_packed(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 3 and value.shape[2] == PANEL


def _width(model: str, context: int) -> Line:
    """How much of its speed the op keeps when the table is 64 times as wide."""
    narrow, wide = (_index_topk(model, context, width) for width in (64, 4096))
    calls = {"4096 wide": lambda: index_topk.native(*wide), "64 wide": lambda: index_topk.native(*narrow)}
    name = f"index_topk, {context} entries, {model}: block table 4096 to 64 wide"
    return compare(calls, rounds=11).line(name, "4096 wide", "64 wide", 0.8)


def _growth(model: str) -> Line:
    """Cost of an entry in a long context against that in a short one."""
    short, long = (_index_topk(model, context, 128) for context in (1024, 16384))
    calls = {"16384": lambda: index_topk.native(*long), "1024": lambda: index_topk.native(*short)}
    times = compare(calls, rounds=7)
    ratio = times.ratio("16384", "1024")
    detail = f"{times.seconds('16384').median * 1e6:.0f} us for 16384 entries"
    name = f"index_topk, {model}: an entry among 16384 to one among 1024"
    return Line(name, 16 * ratio.median, 16 * ratio.low, 16 * ratio.high, None, detail)


def _table(rotated: int) -> torch.Tensor:
    angles = torch.arange(256).unsqueeze(1) * torch.rand(rotated // 2)
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def _compress(model: str, ratio: int) -> tuple[Any, ...]:
    """A row that closes its group, whose predecessor is in the ring."""
    inputs, size, *_ = MODELS[model]
    x = torch.randn(1, inputs).bfloat16()
    wkv, wgate = (torch.randn(size, inputs).div(inputs**0.5).bfloat16() for _ in range(2))
    ring, region = torch.randn(2, 8, 2 * size), torch.zeros(3, BLOCK_ENTRIES, size // 2 + size // 16).byte()
    if ratio == 1:
        wgate, ring = wgate[:0], ring[:0, :0, :0]
    packed = (pack_linear(wkv), pack_linear(wgate) if ratio > 1 else wgate)
    one, row = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    return (
        *(x, *packed, torch.rand(size), 1e-20, ring, _table(32), region),
        *(one * 101, row, one.reshape(1, 1), one, one * 101, one, ratio, True),
    )


def _index_key(model: str) -> tuple[Any, ...]:
    _, inputs, _, size, _ = MODELS[model]
    wk = pack_linear(torch.randn(size, inputs).div(inputs**0.5).bfloat16())
    region = torch.zeros(3, BLOCK_ENTRIES, size // 2 + size // 32).byte()
    one = torch.ones(1, dtype=torch.int64)
    row = torch.zeros(1, dtype=torch.int64)
    latent = torch.randn(1, inputs).bfloat16()
    return (
        *(latent, wk, torch.rand(size), 1e-20, _table(32), region),
        *(one * 101, row, one.reshape(1, 1), 1, True),
    )


def _index_topk(model: str, context: int, width: int) -> tuple[Any, ...]:
    *_, heads, size, top_k = MODELS[model]
    used = -(-context // BLOCK_ENTRIES)
    region = quantize_fp4_reference(torch.randn(used + 1, BLOCK_ENTRIES, size), "e8m0")
    table = torch.zeros(1, max(width, used), dtype=torch.int64)
    table[0, :used] = 1 + torch.randperm(used)
    return (
        *(torch.randn(1, heads, size).bfloat16(), torch.randn(1, heads), region),
        *(torch.empty(1, 0, dtype=torch.int64), torch.tensor([context - 1]), torch.tensor([0]), table),
        *(1, top_k, 8, 0, True, False),
    )
