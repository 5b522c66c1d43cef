"""Whole sequences at once, as training sees them: attention, pooling and index scores with gradients.

All sequences of a step have one length and are in it from their first token to their last: what a row needs
of its request is found among the rows, and `[T, ...]` stands for `[sequences * length, ...]`. The C++ library
of training forms does the same where it is loaded and fits; without it, torch's own functions do.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.kernels.training_library import Attend, IndexScores, training_library_fits


def attend_sequences(
    query: Tensor,
    record: Tensor,
    entries: Tensor,
    picks: Tensor,
    sink: Tensor,
    scale: float,
    window: int,
    length: int,
) -> tuple[Tensor, Tensor]:
    """Attend `query [T, H, d]` to the last `window` of `record [T, d]` and to picked entries (spec 5.3).

    `entries [sequences, n, d]` belong to a sequence, `picks [T, k]` choose from them, -1: none. Returns the
    output `[T, H, d]` and the mass of every key `[T, window + k]`, oldest first, which carries no gradient.
    """
    if training_library_fits(query, query.shape[-1], window + picks.shape[1]):
        return Attend.apply(
            query.contiguous(), record.contiguous(), entries.contiguous(), picks, sink, scale, window, length
        )
    rows = torch.arange(query.shape[0])
    offsets = torch.arange(window - 1, -1, -1)
    visible = (rows % length).unsqueeze(1) >= offsets
    keys = take_rows(record, (rows.unsqueeze(1) - offsets).clamp(min=0))
    chosen = (rows // length).unsqueeze(1) * entries.shape[1] + picks.clamp(min=0)
    keys = torch.cat((keys, take_rows(entries.flatten(0, 1), chosen)), dim=1)
    visible = torch.cat((visible, picks >= 0), dim=1).unsqueeze(1)
    logits = torch.matmul(query, keys.transpose(1, 2)) * scale
    logits = torch.where(visible, logits, -torch.inf)
    sinks = sink.view(1, -1, 1).expand(rows.shape[0], -1, 1)
    shares = torch.softmax(torch.cat((logits, sinks), dim=-1), dim=-1)[..., :-1]
    return torch.matmul(shares, keys), shares.detach().sum(1)


def pool_groups(value: Tensor, gate: Tensor, ratio: int, length: int) -> Tensor:
    """Softmax-pool each row of `value [T, d]` with its `ratio - 1` predecessors by `gate [T, d]` (spec 6.2).

    Only the last row of a group has a meaning; rows before it may look beyond their sequence.
    """
    rows = torch.arange(value.shape[0])
    places = (rows.unsqueeze(1) - torch.arange(ratio - 1, -1, -1)).clamp(min=0)
    shares = torch.softmax(take_rows(gate, places), dim=1)
    return (take_rows(value, places) * shares).sum(1)


def index_scores(query: Tensor, head_weights: Tensor, keys: Tensor, ratio: int, length: int) -> Tensor:
    """Score every entry for every row: `[T, n]`, meaningful where the entry is visible (spec 7.3).

    `query [T, H, d]`, `head_weights [T, H]`, `keys [sequences, n, d]`; entry j closes at position
    `ratio * (j + 1) - 1`.
    """
    if training_library_fits(query, query.shape[-1], 0):
        return IndexScores.apply(query.contiguous(), head_weights, keys.contiguous(), ratio, length)
    heads = query.shape[1]
    queries = query.unflatten(0, (-1, length)).flatten(1, 2)
    dots = torch.bmm(queries, keys.transpose(1, 2)).unflatten(1, (-1, heads)).flatten(0, 1)
    return (dots.relu() * head_weights.unsqueeze(-1)).sum(1)


def take_rows(values: Tensor, index: Tensor) -> Tensor:
    """Return `values [n, d]` at `index [...]`: `[..., d]`; the gradient adds up without atomic updates."""
    return F.embedding(index, values)
