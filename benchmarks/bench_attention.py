"""Attention of one layer in decode: the native ops against the plain eager form, and how the cost grows.

Both write the ring as well. Rows are requests of their own, all at the same context length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from harness import Line, compare
from torch import Tensor

from deepinfer.kernels import dequantize_fp4, dequantize_fp8, quantize_fp4, quantize_fp8, ring_write
from deepinfer.kernels import sparse_attention as attention
from deepinfer.kernels.sparse_attention import softmax_with_sink

BLOCK_TOKENS = 128
ROLLBACK_TOKENS = 6
FLOOR_ONE_ROW = 3.0
FLOOR_FLAT = 0.8  # 1 is expected
NARROW, WIDE = 8, 1024  # blocks per request: contexts of 1,024 and of 131,072 tokens


class Shape(NamedTuple):
    """Sizes of a layer."""

    name: str
    heads: int
    width: int
    window: int
    top_k: int


TINY = Shape("tiny", 6, 64, 32, 32)
RELEASE = Shape("release", 64, 512, 128, 512)


class Step:
    """One decode step in native precision: arguments, and the two ways to run it."""

    def __init__(self, shape: Shape, rows: int, context: int, table_width: int = NARROW) -> None:
        generator = torch.Generator().manual_seed(rows * context)

        def vectors(*sizes: int) -> Tensor:
            return torch.randn(*sizes, shape.width, generator=generator).to(torch.bfloat16)

        used = -(-context // BLOCK_TOKENS)
        self.shape = shape
        self.query, self.sink = vectors(rows, shape.heads), torch.randn(shape.heads, generator=generator)
        self.record = quantize_fp8.native(vectors(rows))
        self.ring = quantize_fp8.native(vectors(rows + 1, shape.window + ROLLBACK_TOKENS))
        self.compressed = quantize_fp4.native(vectors(rows * used + 1, BLOCK_TOKENS), "e4m3")
        self.positions = torch.full((rows,), context - 1)
        chosen = [
            torch.randperm(context, generator=generator)[: shape.top_k].sort().values for _ in range(rows)
        ]
        self.picks = torch.full((rows, shape.top_k), -1)
        self.picks[:, : len(chosen[0])] = torch.stack(chosen)
        self.table = torch.zeros(rows, table_width, dtype=torch.int64)
        self.table[:, :used] = torch.arange(1, rows * used + 1).reshape(rows, used)
        self.lines, self.counts = torch.arange(rows), torch.ones(rows, dtype=torch.int64)
        self.slots = self.lines + 1

    def native(self) -> Tensor:
        """The ops."""
        output, _ = attention.native(
            *(self.query, self.record, self.ring, self.compressed, self.picks, self.sink),
            *(self.shape.width**-0.5, self.shape.window, self.positions, self.lines, self.table, self.slots),
            *(self.positions, True, False),
        )
        where = (self.positions, self.lines, self.slots, self.positions, self.counts)
        ring_write.native(self.ring, self.record, *where)
        return output

    def eager(self) -> Tensor:
        """Gather, decode, multiply, in plain PyTorch."""
        return self._plain(dequantize_fp8.reference, dequantize_fp4.reference)

    def eager_decoding_natively(self) -> Tensor:
        """The same with the records decoded by the op library: what fusion alone is worth."""
        return self._plain(dequantize_fp8.native, dequantize_fp4.native)

    def _plain(self, decode_fp8: Callable[..., Tensor], decode_fp4: Callable[..., Tensor]) -> Tensor:
        length, per_block = self.ring.shape[1], self.compressed.shape[1]
        self.ring.index_put_((self.slots, self.positions % length), self.record)
        wanted = self.positions.unsqueeze(1) - torch.arange(self.shape.window - 1, -1, -1)
        window = self.ring[self.slots.unsqueeze(1), wanted.clamp(min=0) % length]
        entry = self.picks.clamp(min=0)
        picked = self.compressed[self.table[self.lines].gather(1, entry // per_block), entry % per_block]
        keys = torch.cat(
            (decode_fp8(window, torch.bfloat16), decode_fp4(picked, "e4m3", torch.bfloat16)), dim=1
        )
        visible = torch.cat((wanted >= 0, self.picks >= 0), dim=1)
        return softmax_with_sink(self.query, keys, visible, self.sink, self.shape.width**-0.5)[0]


def run(threads: int) -> list[Line]:
    """Against eager by rows and context; then the same context under a longer `max_model_len`."""
    lines = []
    for shape, contexts, row_counts in ((TINY, (16, 128, 1024), (1, 4, 16, 64)), (RELEASE, (1024,), (1, 4))):
        for context in contexts:
            for rows in row_counts:
                step = Step(shape, rows, context)
                result = compare({"eager": step.eager, "native": step.native})
                name = f"attention {shape.name}, rows {rows}, context {context}"
                lines.append(result.line(name, "native", "eager", FLOOR_ONE_ROW if rows == 1 else None))
    step = Step(TINY, 16, 128)
    result = compare({"eager": step.eager_decoding_natively, "native": step.native})
    name = "attention tiny, rows 16, context 128, eager with native decoding"
    lines.append(result.line(name, "native", "eager"))
    for context in (16, 128, 1024):
        tables = {f"{width} blocks": Step(TINY, 4, context, width).native for width in (NARROW, WIDE)}
        name = f"attention tiny, rows 4, context {context}, longer max_model_len"
        result = compare(tables, rounds=15)
        lines.append(result.line(name, f"{WIDE} blocks", f"{NARROW} blocks", FLOOR_FLAT))
    return lines
