"""The C++ library of training forms (`training/`) and its autograd functions.

Training is the only user: no artifact holds this library. It computes what `differentiable.py` computes with
torch's own functions, in a fraction of the memory traffic.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepinfer.kernels.native import build_op_library, host_isa

LANES, MAX_KEYS, STREAMS, MAX_ITERATIONS = 16, 1024, 4, 32
_loaded = False


def load_training_library(cache_dir: Path | None = None) -> None:
    """Build (or find) the library for this machine and load it. Raises LoweringError without a compiler."""
    global _loaded
    if not _loaded:
        source_dir = Path(__file__).parent / "training"
        torch.ops.load_library(str(build_op_library(host_isa(), cache_dir, source_dir=source_dir)))
        _loaded = True


def training_library_fits(value: Tensor, width: int, keys: int) -> bool:
    """Whether the library is loaded and takes `value` with this width and number of keys per row."""
    return _loaded and value.dtype == torch.float32 and width % LANES == 0 and keys <= MAX_KEYS


class Attend(torch.autograd.Function):
    """Attention over windows and picked entries; see `sequences.attend_sequences`."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        record: Tensor,
        stored: Tensor,
        picks: Tensor,
        sink: Tensor,
        scale: float,
        window: int,
        length: int,
    ) -> tuple[Tensor, Tensor]:
        output, shares, sink_share = torch.ops.deepinfer_training.attend_forward(
            query, record, stored, picks, sink, scale, window, length
        )
        ctx.save_for_backward(query, record, stored, picks, output, shares, sink_share)
        ctx.settings = (scale, window, length)
        mass = shares.sum(1)
        ctx.mark_non_differentiable(mass)
        return output, mass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients = torch.ops.deepinfer_training.attend_backward(
            gradient.contiguous(), *ctx.saved_tensors, *ctx.settings
        )
        query, record, stored, sink = gradients
        return query, record, stored, None, sink, None, None, None


class Collapse(torch.autograd.Function):
    """The weighted sum of four streams."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, pre: Tensor) -> Tensor:
        ctx.save_for_backward(residual, pre)
        return torch.ops.deepinfer_training.collapse_forward(residual, pre)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.deepinfer_training.collapse_backward(gradient.contiguous(), *ctx.saved_tensors)


class Expand(torch.autograd.Function):
    """A sublayer's output added to the mixed streams."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        ctx.save_for_backward(y, residual, post, comb)
        return torch.ops.deepinfer_training.expand_forward(y, residual, post, comb)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return torch.ops.deepinfer_training.expand_backward(gradient.contiguous(), *ctx.saved_tensors)


class Mix(torch.autograd.Function):
    """`pre`, `post` and `comb` from the mixing logits, Sinkhorn iterations included."""

    @staticmethod
    def forward(
        ctx: Any, mixes: Tensor, base: Tensor, scale: Tensor, iterations: int, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(mixes, base, scale)
        ctx.settings = (iterations, eps)
        return torch.ops.deepinfer_training.mix_forward(mixes, base, scale, iterations, eps)

    @staticmethod
    def backward(ctx: Any, pre: Tensor, post: Tensor, comb: Tensor) -> tuple[Tensor | None, ...]:
        gradients = torch.ops.deepinfer_training.mix_backward(
            pre.contiguous(), post.contiguous(), comb.contiguous(), *ctx.saved_tensors, *ctx.settings
        )
        return (*gradients, None, None)


class IndexScores(torch.autograd.Function):
    """Index scores of visible entries; the gradient is expected to be that of few entries."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, head_weights: Tensor, keys: Tensor, ratio: int, length: int
    ) -> Tensor:
        ctx.save_for_backward(query, head_weights, keys)
        ctx.settings = (ratio, length)
        return torch.ops.deepinfer_training.index_forward(query, head_weights, keys, ratio, length)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradients = torch.ops.deepinfer_training.index_backward(
            gradient.contiguous(), *ctx.saved_tensors, *ctx.settings
        )
        return (*gradients, None, None)
