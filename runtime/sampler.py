"""Draws one token per row of logits. A row's result depends on that row, its parameters, seed and position.

Turns what requests ask for into the arrays of the operation `sample`, which owns the pipeline. Knows nothing
of requests, caches or stop rules. The op library must be loaded.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer.kernels import sample as sample_op
from deepinfer.kernels.sampling import NO_TOKEN, NOT_A_NUMBER, NOTHING_ALLOWED, OK, Arguments
from deepinfer.runtime.sampling_params import SamplingParams

__all__ = ["NOTHING_ALLOWED", "NOT_A_NUMBER", "NO_TOKEN", "OK", "STATUS_NAMES", "Sampled", "sample"]

STATUS_NAMES: Final = {OK: "ok", NOT_A_NUMBER: "numerical_error", NOTHING_ALLOWED: "no_allowed_token"}

_NO_INTEGERS = torch.zeros(0, dtype=torch.int64)
_NO_SHARES = torch.zeros(0, dtype=torch.float64)
_NO_MASKS = torch.zeros(0, 0, dtype=torch.int32)
_NO_PENALTIES = torch.zeros(0, 3)
_NO_BIAS = torch.zeros(0)


class Sampled(NamedTuple):
    """Result of `sample`, one entry per row."""

    token_ids: NDArray[np.int64]  # [rows]; NO_TOKEN where status is not OK
    status: NDArray[np.int8]  # [rows]; OK, NOT_A_NUMBER or NOTHING_ALLOWED


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    seeds: Sequence[int],
) -> Sampled:
    """Draws a token for every row (spec engine B.2 to B.5, B.8).

    logits: [rows, vocab] float32 on the CPU, not modified. params, positions, seeds: one per row; a position
    is the index, within prompt plus output, of the token being made. A row that holds a NaN or +inf, or only
    -inf, gets no token but a status; other rows are not affected.
    """
    rows = len(logits)
    assert logits.ndim == 2 and logits.dtype == torch.float32, (logits.shape, logits.dtype)
    assert len(params) == len(positions) == len(seeds) == rows, "one entry per row"
    arguments = Arguments(
        logits=logits,
        seeds=torch.from_numpy(np.fromiter(seeds, np.uint64, rows).view(np.int64)),
        positions=torch.from_numpy(np.fromiter(positions, np.int64, rows)),
        temperatures=torch.from_numpy(np.fromiter((p.temperature for p in params), np.float64, rows)),
        top_k=_NO_INTEGERS,
        top_p=_NO_SHARES,
        min_p=_NO_SHARES,
        penalties=_NO_PENALTIES,
        history_offsets=_NO_INTEGERS,
        history_ids=_NO_INTEGERS,
        history_counts=_NO_INTEGERS,
        bias_offsets=_NO_INTEGERS,
        bias_ids=_NO_INTEGERS,
        bias=_NO_BIAS,
        masks=_NO_MASKS,
        mask_index=_NO_INTEGERS,
    )
    token_ids, status, _, _ = sample_op.native(*arguments)
    return Sampled(token_ids.numpy(), status.numpy())
