"""Linear layers whose weights are stored in FP8, or unquantised as whole checkpoints may be."""

from torch import Tensor

from deepinfer.graphs.context import Scope, StepContext
from deepinfer.kernels import linear_fp8


def project(ctx: StepContext, weights: Scope, name: str, x: Tensor) -> Tensor:
    """Apply the linear `name` to `x [T, K]` (12.4); `native` precision rounds what enters FP8 weights."""
    out = linear_fp8(x.unsqueeze(1), *weights.matrix(name), ctx.quantizes_inputs, *ctx.input_groups)
    return out.squeeze(1)
