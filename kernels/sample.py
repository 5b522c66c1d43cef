"""One token per row of logits: penalties, bans, mask, filters, a draw in integers, log-probabilities.

Maths     `sampling.py`: spec engine B.2 to B.5 in the order of design.md 9. The random word is that of Philox
          stream 3 * position (case 0) with the seed as key, so neither the batch nor a row's place enters.
Shapes    logits [N, V] fp32 and the arguments of `sampling.Arguments`
          -> token_ids [N] i64 (-1 where the status is not 0), status [N] i8, logprob_ids [N, 1 + L] i64 and
          logprobs [N, 1 + L] fp32 with L = num_logprobs (the token first, then the best; -1 and -inf beyond)
Numerics  as `sampling.py`. A row whose status is not 0 leaves the others untouched.
Native    no sort of the vocabulary: a pass for maxima of groups, a threshold by counting, a pass that packs
          what reaches it (`cpu/select.h`). exp of `cpu/vector_math.h`: a mass may differ from the reference
          by its last bits, everything that is not an exponential is equal.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from deepinfer.kernels import philox
from deepinfer.kernels.registry import Op
from deepinfer.kernels.sampling import (
    OK,
    SCHEMA,
    Arguments,
    Results,
    check_arguments,
    check_values,
    distribution,
    draw_token,
)

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def sample_reference(*arguments: Any) -> Outputs:
    """The definition; see the module text."""
    a = Arguments(*arguments)
    check_arguments("sample", a)
    check_values("sample", a)
    results, status = Results(a), torch.zeros(a.logits.shape[0], dtype=torch.int8)
    for row in range(a.logits.shape[0]):
        found = distribution(a, row)
        status[row] = found.status
        if found.status == OK:
            results.emit(row, found, draw_token(a, row, found, philox.FRESH))
    return results.token_ids, status, results.logprob_ids, results.logprobs


def sample_fake(*arguments: Any) -> Outputs:
    """Shape rule."""
    a = Arguments(*arguments)
    check_arguments("sample", a)
    rows, columns = a.logits.shape[0], 1 + a.num_logprobs
    return (
        a.logits.new_empty((rows,), dtype=torch.int64),
        a.logits.new_empty((rows,), dtype=torch.int8),
        a.logits.new_empty((rows, columns), dtype=torch.int64),
        a.logits.new_empty((rows, columns)),
    )


def make_arguments(rows: int, vocab: int, seed: int) -> Arguments:
    """A varied case without history and bias, whose lists are no arrays per row."""
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=(rows, vocab)) * 3).astype(np.float32)
    pick = lambda *choices: torch.from_numpy(rng.choice(choices, rows))  # noqa: E731
    none = torch.zeros(0, dtype=torch.int64)
    return Arguments(
        logits=torch.from_numpy(logits),
        seeds=torch.from_numpy(rng.integers(-(2**63), 2**63, rows)),
        positions=torch.from_numpy(rng.integers(0, 1 << 20, rows)),
        temperatures=pick(0.0, 1e-5, 0.4, 1.0, 5.0),
        top_k=pick(0, 1, 5, 50),
        top_p=pick(0.3, 0.9, 1.0),
        min_p=pick(0.0, 0.0, 0.05),
        penalties=torch.zeros(0, 3),
        history_offsets=none,
        history_ids=none,
        history_counts=none,
        bias_offsets=none,
        bias_ids=none,
        bias=torch.zeros(0),
        masks=torch.from_numpy(rng.integers(-(2**31), 2**31, (3, -(-vocab // 32))).astype(np.int32)),
        mask_index=torch.from_numpy(rng.integers(-1, 3, rows)),
        num_logprobs=4,
    )


def _make_inputs(rows: int, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
    return tuple(make_arguments(rows, 300, seed))


sample = Op(
    name="sample",
    schema=f"sample(Tensor logits, {SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
    reference=sample_reference,
    fake=sample_fake,
    make_inputs=_make_inputs,
    tolerance={torch.float32: (2e-6, 2e-6), torch.bfloat16: (2e-6, 2e-6)},
)
