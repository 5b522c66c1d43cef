"""Log-probabilities of tokens that are given, not drawn: a prompt's own, and those of a forced continuation.

By the definition of the sampler, one row at a time, so a value is a function of its row alone.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer.kernels.sampling import OK, Arguments, distribution, logprobs
from deepinfer.runtime.outputs import Logprob, Logprobs
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.sampling_state import SamplingState

_LOWEST = float(np.finfo(np.float32).min)


def prompt_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], params: SamplingParams
) -> list[Logprobs | None]:
    """For each row of `logits [rows, vocab] f32`: the token that follows it, and the best (spec engine H.2).

    Temperature, top_k, top_p and min_p of the request apply, penalties, bias and bans do not; in the mode
    "raw" none does. A token without a finite value has the lowest of float32. None for a row that is no
    distribution.
    """
    assert params.prompt_logprobs is not None
    rows = len(token_ids)
    arguments = _plain_arguments(logits, params)._replace(num_logprobs=params.prompt_logprobs)
    return [_of_row(arguments, row, token_ids[row]) for row in range(rows)]


def forced_logprobs(
    logits: torch.Tensor, token_id: int, params: SamplingParams, state: SamplingState | None
) -> Logprobs | None:
    """Of a token that was forced in place of the one drawn from `logits [vocab] f32` (spec engine H.3)."""
    assert params.logprobs is not None
    arguments = _plain_arguments(logits[None], params)._replace(num_logprobs=params.logprobs)
    if state is not None:
        arguments = arguments._replace(**_of_state(params, state))
    return _of_row(arguments, 0, token_id)


def _of_state(params: SamplingParams, state: SamplingState) -> dict[str, Any]:
    factors = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    found = {
        "penalties": torch.tensor([factors], dtype=torch.float32),
        "history_offsets": torch.tensor([0, len(state.history_ids)]),
        "history_ids": torch.from_numpy(state.history_ids),
        "history_counts": torch.from_numpy(state.history_counts),
        "bias_offsets": torch.tensor([0, len(state.bias_ids)]),
        "bias_ids": torch.from_numpy(state.bias_ids),
        "bias": torch.from_numpy(state.bias),
    }
    if state.mask is not None:
        found |= {
            "masks": torch.from_numpy(state.mask[None]),
            "mask_index": torch.zeros(1, dtype=torch.int64),
        }
    return found


def _plain_arguments(logits: torch.Tensor, params: SamplingParams) -> Arguments:
    rows = len(logits)
    none = torch.zeros(0, dtype=torch.int64)
    return Arguments(
        logits=logits,
        seeds=torch.zeros(rows, dtype=torch.int64),
        positions=torch.zeros(rows, dtype=torch.int64),
        temperatures=torch.full((rows,), params.temperature, dtype=torch.float64),
        top_k=torch.full((rows,), params.top_k, dtype=torch.int64),
        top_p=torch.full((rows,), params.top_p, dtype=torch.float64),
        min_p=torch.full((rows,), params.min_p, dtype=torch.float64),
        penalties=torch.zeros(0, 3),
        history_offsets=none,
        history_ids=none,
        history_counts=none,
        bias_offsets=none,
        bias_ids=none,
        bias=torch.zeros(0),
        masks=torch.zeros(0, 0, dtype=torch.int32),
        mask_index=none,
        raw_logprobs=params.logprobs_mode == "raw",
    )


def _of_row(arguments: Arguments, row: int, token_id: int) -> Logprobs | None:
    found = distribution(arguments, row)
    if found.status != OK:
        return None
    ids, values = logprobs(arguments, row, found, token_id)
    kept = arguments.raw_logprobs or token_id in found.ids
    logits = arguments.logits[row].numpy() if arguments.raw_logprobs else found.logits
    entries = {
        token_id: Logprob(max(float(values[0]), _LOWEST) if kept else _LOWEST, rank_of(logits, token_id))
    }
    for place, (other, value) in enumerate(zip(ids[1:].tolist(), values[1:].tolist(), strict=True), start=1):
        if other >= 0 and other != token_id and math.isfinite(value):
            entries[other] = Logprob(value, place)
    return entries


def rank_of(logits: NDArray[np.float32], token_id: int) -> int:
    """Place of a token by falling logit and rising id, from 1."""
    own = logits[token_id]
    return 1 + int((logits > own).sum()) + int((logits[:token_id] == own).sum())
