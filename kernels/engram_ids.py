"""Rows of the n-gram table that belong to each token: hashes of it and the tokens before it (spec 9.4).

    c_s = token_map[token at position p - s], s = 0 .. n - 1; where p - s < 0, the padding token's
    h_0 = c_0 m_0,  h_i = h_(i-1) xor c_i m_i (int64)
    id[column] = h_i mod prime[column] + offset[column], columns i = 1 .. n - 1, each with its heads

Shapes    token_ids, positions, request_index [T]; history int32 | int64 [slots, L, 1] with L >= n - 1, any
          strides, read only; token_map [V]; multipliers [n], n >= 2; primes, offsets [columns], columns a
          multiple of n - 1; slot_ids, num_computed_tokens [R]; all int64 but history
          -> ids [T, columns] int64
Meaning   rows of a request follow each other in position order. The token of an earlier position is that of
          an earlier row if the position is not below num_computed_tokens of the row's line, else it stands at
          history[slot, position % L]. Padding rows (position -1) get zeros. Token ids beyond the map, or
          negative, count as its last or first entry.
Native    the same integers; every index that a row leads to is checked first.
"""

from __future__ import annotations

import torch

from deepinfer.errors import UsageError
from deepinfer.kernels.checks import check_multiple, check_tensor
from deepinfer.kernels.registry import Op

_INT64 = (torch.int64,)


def _check(
    token_ids: torch.Tensor,
    history: torch.Tensor,
    token_map: torch.Tensor,
    multipliers: torch.Tensor,
    primes: torch.Tensor,
    offsets: torch.Tensor,
    pad_token_id: int,
    positions: torch.Tensor,
    request_index: torch.Tensor,
    slot_ids: torch.Tensor,
    num_computed_tokens: torch.Tensor,
) -> None:
    check_tensor("engram_ids", "token_ids", token_ids, (None,), _INT64)
    for name, tensor in (("token_map", token_map), ("multipliers", multipliers), ("primes", primes)):
        check_tensor("engram_ids", name, tensor, (None,), _INT64)
    check_tensor("engram_ids", "offsets", offsets, tuple(primes.shape), _INT64)
    check_tensor("engram_ids", "positions", positions, tuple(token_ids.shape), _INT64)
    check_tensor("engram_ids", "request_index", request_index, tuple(token_ids.shape), _INT64)
    check_tensor("engram_ids", "slot_ids", slot_ids, (None,), _INT64)
    check_tensor("engram_ids", "num_computed_tokens", num_computed_tokens, tuple(slot_ids.shape), _INT64)
    ngram = multipliers.shape[0]
    if ngram < 2:
        raise UsageError(f"must have at least 2 entries, got {ngram}", where="engram_ids: multipliers")
    check_multiple("engram_ids", "size of primes", primes.shape[0], ngram - 1)
    if not 0 <= pad_token_id < token_map.shape[0]:
        raise UsageError(
            f"must lie in 0 .. {token_map.shape[0] - 1}, got {pad_token_id}", where="engram_ids: pad_token_id"
        )
    _check_history(history, ngram)


def _check_history(history: torch.Tensor, ngram: int) -> None:
    shape = tuple(history.shape)
    if history.dtype not in (torch.int32, torch.int64):
        raise UsageError(f"must be int32 or int64, got {history.dtype}", where="engram_ids: history")
    if len(shape) != 3 or shape[2] != 1:
        raise UsageError(f"must have shape [any, any, 1], got {list(shape)}", where="engram_ids: history")
    if shape[1] < ngram - 1:
        raise UsageError(
            f"must hold at least {ngram - 1} tokens, got {shape[1]}", where="engram_ids: history"
        )


def hash_tokens(
    context: torch.Tensor, multipliers: torch.Tensor, primes: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Hash compressed ids `context [T, n]`, the row's own first, then older ones: `[T, columns]`."""
    first, *older = (context * multipliers).unbind(1)
    heads = primes.shape[0] // len(older)
    hashes = []
    for product in older:
        first = first ^ product
        hashes.append(first)
    repeated = torch.stack(hashes, dim=1).unsqueeze(-1).expand(-1, -1, heads).flatten(1)
    return repeated % primes + offsets


def engram_ids_reference(
    token_ids: torch.Tensor,
    history: torch.Tensor,
    token_map: torch.Tensor,
    multipliers: torch.Tensor,
    primes: torch.Tensor,
    offsets: torch.Tensor,
    pad_token_id: int,
    positions: torch.Tensor,
    request_index: torch.Tensor,
    slot_ids: torch.Tensor,
    num_computed_tokens: torch.Tensor,
) -> torch.Tensor:
    """The definition; see the module text."""
    tables = (token_map, multipliers, primes, offsets, pad_token_id)
    _check(token_ids, history, *tables, positions, request_index, slot_ids, num_computed_tokens)
    valid = (positions >= 0).unsqueeze(1)
    line = torch.where(positions >= 0, request_index, 0)
    back = torch.arange(multipliers.shape[0], device=positions.device)
    wanted = positions.clamp(min=0).unsqueeze(1) - back
    alive, wanted = wanted >= 0, wanted.clamp(min=0)
    slots = torch.where(valid, slot_ids[line].unsqueeze(1), 0)
    from_ring = history[slots, wanted % history.shape[1], 0].long()
    row = torch.arange(len(positions), device=positions.device).unsqueeze(1) - back
    in_step = wanted >= num_computed_tokens[line].unsqueeze(1)
    tokens = torch.where(in_step, token_ids[row.clamp(min=0)], from_ring)
    context = token_map[tokens.clamp(0, token_map.shape[0] - 1)]
    context = torch.where(alive, context, token_map[pad_token_id])
    return torch.where(valid, hash_tokens(context, multipliers, primes, offsets), 0)


def engram_ids_fake(
    token_ids: torch.Tensor,
    history: torch.Tensor,
    token_map: torch.Tensor,
    multipliers: torch.Tensor,
    primes: torch.Tensor,
    offsets: torch.Tensor,
    pad_token_id: int,
    positions: torch.Tensor,
    request_index: torch.Tensor,
    slot_ids: torch.Tensor,
    num_computed_tokens: torch.Tensor,
) -> torch.Tensor:
    """Shape rule."""
    tables = (token_map, multipliers, primes, offsets, pad_token_id)
    _check(token_ids, history, *tables, positions, request_index, slot_ids, num_computed_tokens)
    return token_ids.new_empty((token_ids.shape[0], primes.shape[0]))


def _make_inputs(rows: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor | int, ...]:
    """A decode step: every row is a request of its own; `dtype` does not matter."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int, *shape: int, low: int = 0) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    history = draw(120, rows + 1, 9, 1).to(torch.int32)
    primes = torch.tensor([101, 103, 107, 109, 113, 127])
    positions = draw(40, rows, low=-1)
    return (
        draw(120, rows),
        history,
        draw(50, 110),
        2 * draw(2**55, 4) + 1,
        primes,
        primes.cumsum(0) - primes,
        3,
        positions,
        torch.arange(rows),
        torch.randperm(rows, generator=generator) + 1,
        positions.clamp(min=0),
    )


engram_ids = Op(
    name="engram_ids",
    schema=(
        "engram_ids(Tensor token_ids, Tensor history, Tensor token_map, Tensor multipliers, Tensor primes, "
        "Tensor offsets, int pad_token_id, Tensor positions, Tensor request_index, Tensor slot_ids, "
        "Tensor num_computed_tokens) -> Tensor"
    ),
    reference=engram_ids_reference,
    fake=engram_ids_fake,
    make_inputs=_make_inputs,
    tolerance={torch.float32: (0.0, 0.0), torch.bfloat16: (0.0, 0.0)},
    composite=True,
)
