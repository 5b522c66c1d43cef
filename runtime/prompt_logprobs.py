"""Log-probabilities of tokens that are given, not drawn: a prompt's own, and those of a forced continuation.

By the operation that draws, so that a token has the same bits whether it was drawn, forced or in a prompt.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer.kernels import sample as sample_op
from deepinfer.kernels.sampling import FORCED_TOP_K, OK, Arguments, adjusted_logits, rank_of
from deepinfer.runtime.outputs import Logprob, Logprobs
from deepinfer.runtime.sampler_interface import LOWEST_LOGPROB
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.sampling_state import SamplingState


def prompt_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], params: SamplingParams
) -> list[Logprobs | None]:
    """For each row of `logits [rows, vocab] f32`: the token that follows it, and the best (spec engine H.2).

    Temperature, top_k, top_p and min_p of the request apply, penalties, bias and bans do not; in the mode
    "raw" none does. A token without a finite value has the lowest of float32. None for a row that is no
    distribution.
    """
    assert params.prompt_logprobs is not None
    return _of_rows(_plain_arguments(logits, params), token_ids, params.prompt_logprobs)


def forced_logprobs(
    logits: torch.Tensor, token_id: int, params: SamplingParams, state: SamplingState | None
) -> Logprobs | None:
    """Of a token that was forced in place of the one drawn from `logits [vocab] f32` (spec engine H.3)."""
    assert params.logprobs is not None
    arguments = _plain_arguments(logits[None], params)
    if state is not None:
        arguments = arguments._replace(**_of_state(params, state))
    return _of_rows(arguments, [token_id], params.logprobs)[0]


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


def _of_rows(arguments: Arguments, token_ids: Sequence[int], count: int) -> list[Logprobs | None]:
    """For each row: its token, then the `count` best; None for a row that is no distribution."""
    # Processed, all that is kept is listed, as what is not listed is not kept. Raw, the best names the sum.
    raw, vocab = arguments.raw_logprobs, arguments.logits.shape[1]
    num_listed = max(count, 1) if raw else min(vocab, FORCED_TOP_K)
    _, status, *listed = sample_op.native(*arguments._replace(num_logprobs=num_listed))
    all_ids, all_values = (each.numpy()[:, 1:] for each in listed)
    rows = zip(status.tolist(), token_ids, all_ids, all_values, strict=True)
    return [
        _of_row(arguments, row, token, count, ids, values) if code == OK else None
        for row, (code, token, ids, values) in enumerate(rows)
    ]


def _of_row(
    arguments: Arguments,
    row: int,
    token_id: int,
    count: int,
    ids: NDArray[np.int64],
    values: NDArray[np.float32],
) -> Logprobs:
    """ids, values: what the operation lists, the largest first."""
    places = np.flatnonzero(ids == token_id)
    if len(places):
        rank, value = int(places[0]) + 1, float(values[places[0]])
    elif arguments.raw_logprobs:
        logits = arguments.logits[row].numpy()
        with np.errstate(over="ignore"):
            # as the operation does it: the largest logit's value is 0 - log sum
            value = float(logits[token_id] - logits[ids[0]] + values[0])
        rank = rank_of(logits, token_id)
    else:
        rank, value = rank_of(adjusted_logits(arguments, row), token_id), LOWEST_LOGPROB
    entries = {token_id: Logprob(max(value, LOWEST_LOGPROB), rank)}
    best = zip(ids[:count].tolist(), values[:count].tolist(), strict=True)
    for place, (other, other_value) in enumerate(best, start=1):
        if place != rank and other_value >= LOWEST_LOGPROB:
            entries[other] = Logprob(other_value, place)
    return entries
