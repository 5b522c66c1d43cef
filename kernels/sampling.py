"""From a row of logits to the integer distribution it is drawn from (spec engine B.2 to B.4, design.md 9).

The definition that `sample.py` and `verify_drafts.py` share, one row at a time, in NumPy. In this order:

    penalties   of every id in the row's history: l / r or l * r (l > 0 or not) by the repetition factor r; if
                it was generated, then - frequency * count, - presence
    bias        added; -inf bans the id
    mask        a cleared bit bans the id
    status      a NaN or +inf, even where banned: 1; nothing above -inf: 2; then no token is drawn
    greedy      temperature 0: the largest logit, the lowest id among equals; nothing below applies to it
    forced      the `forced_top_k` largest (0: all), equal ones at the edge by lower id
    temperature z = (l - max) * float32(1 / T), T at least 1e-5
    top-k       l >= k-th largest; equal ones at the edge stay, as far as forced leaves them
    masses      e = exp(z), S = sum of e over the kept columns, P = floor(e / S * 2^31)
    top-p       P >= the largest v whose masses of at least v sum to ceil(top_p * sum P) or more
    min-p       e >= min_p, as the largest e is 1
    masses      again, over what is kept
    draw        the first column, by id, whose running sum of P exceeds word * sum P / 2^32

What is -inf is never kept, the largest always is. Log-probabilities are z - ln S over the kept columns, -inf
elsewhere ("processed"; a greedy row takes T = 1 and what the forced top-k leaves), or the
log-softmax of the logits as they came ("raw"). The best are listed by logit, equal ones by lower id.

Numerics  float32 after the logits. S is a tree of pairwise additions whose shape depends on the number of
          kept columns alone; masses are integers, whose sums have no order.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer.errors import UsageError
from deepinfer.kernels import philox
from deepinfer.kernels.checks import check_dtype, check_shape, check_tensor

OK: Final = 0
NOT_A_NUMBER: Final = 1  # a NaN or +inf among the row's logits
NOTHING_ALLOWED: Final = 2  # every logit is -inf
FORCED_TOP_K: Final = 4096
NO_TOKEN: Final = -1
MIN_TEMPERATURE: Final = 1e-5

MASS: Final = np.float32(2.0**31)
_MIN_COLUMNS = 64  # a multiple of every vector width
_INFINITY = np.float32(np.inf)

Floats = NDArray[np.float32]

SCHEMA: Final = (
    "Tensor seeds, Tensor positions, Tensor temperatures, Tensor top_k, Tensor top_p, Tensor min_p, "
    "Tensor penalties, Tensor history_offsets, Tensor history_ids, Tensor history_counts, "
    "Tensor bias_offsets, Tensor bias_ids, Tensor bias, Tensor masks, Tensor mask_index, int forced_top_k, "
    "int num_logprobs, bool raw_logprobs"
)


class Arguments(NamedTuple):
    """What both operations take, in the order of their schemas. "[0]": an empty tensor means none."""

    logits: torch.Tensor  # [N, V] f32, not modified
    seeds: torch.Tensor  # [N] i64, the bits of an unsigned seed
    positions: torch.Tensor  # [N] i64: index, within prompt plus output, of the token that is made
    temperatures: torch.Tensor  # [N] f64; 0 is greedy
    top_k: torch.Tensor  # [N] i64, 0 or less: no limit; or [0]
    top_p: torch.Tensor  # [N] f64 in 0 .. 1; or [0]
    min_p: torch.Tensor  # [N] f64 in 0 .. 1; or [0]
    penalties: torch.Tensor  # [N, 3] f32: repetition (above 0, 1 for none), frequency, presence; or [0, 3]
    history_offsets: torch.Tensor  # [N + 1] i64 bounds of a row's ids; or [0]
    history_ids: torch.Tensor  # i64, rising within a row: ids of prompt and output
    history_counts: torch.Tensor  # i64: how often the id was generated, 0 if it stands in the prompt alone
    bias_offsets: torch.Tensor  # [N + 1] i64; or [0]
    bias_ids: torch.Tensor  # i64, rising within a row
    bias: torch.Tensor  # f32, finite or -inf
    masks: torch.Tensor  # [M, ceil(V / 32)] i32: bit i of word w allows id 32 w + i; or [0, 0]
    mask_index: torch.Tensor  # [N] i64, row of `masks` or -1; or [0]
    forced_top_k: int = FORCED_TOP_K  # 0: none
    num_logprobs: int = -1  # -1: none; else that many of the best beside the token's own
    raw_logprobs: bool = False


class Distribution(NamedTuple):
    """What one row is drawn from."""

    status: int
    greedy: int  # token of a greedy row, or NO_TOKEN
    ids: NDArray[np.int64]  # kept columns, ascending
    masses: NDArray[np.uint64]  # theirs; the row draws id c with masses[c] / sum of masses
    logits: Floats  # adjusted, all columns
    largest: np.float32
    factor: np.float32
    log_sum: np.float32


def check_arguments(op: str, a: Arguments) -> None:
    """Shapes and dtypes. Raises UsageError."""
    check_tensor(op, "logits", a.logits, (None, None), (torch.float32,))
    rows, vocab = a.logits.shape
    if not 1 <= vocab < 2**31:
        raise UsageError(f"must have 1 to 2^31 - 1 columns, got {vocab}", where=f"{op}: logits")
    for name, dtype, needed in (
        ("seeds", torch.int64, True),
        ("positions", torch.int64, True),
        ("temperatures", torch.float64, True),
        ("top_k", torch.int64, False),
        ("top_p", torch.float64, False),
        ("min_p", torch.float64, False),
        ("mask_index", torch.int64, False),
    ):
        tensor = getattr(a, name)
        check_tensor(op, name, tensor, (rows if needed or tensor.shape != (0,) else 0,), (dtype,))
    for name, values, dtype in (("history", "history_counts", torch.int64), ("bias", "bias", torch.float32)):
        ids, offsets = getattr(a, f"{name}_ids"), getattr(a, f"{name}_offsets")
        check_tensor(op, f"{name}_ids", ids, (None,), (torch.int64,))
        check_tensor(op, values, getattr(a, values), (ids.shape[0],), (dtype,))
        unused = offsets.shape == (0,) and ids.shape[0] == 0
        check_tensor(op, f"{name}_offsets", offsets, (0 if unused else rows + 1,), (torch.int64,))
    check_shape(op, "penalties", a.penalties, (rows if a.penalties.shape[0] else 0, 3))
    check_dtype(op, "penalties", a.penalties, (torch.float32,))
    check_shape(op, "masks", a.masks, (None, -(-vocab // 32) if a.masks.shape[0] else None))
    check_dtype(op, "masks", a.masks, (torch.int32,))
    if a.forced_top_k < 0 or a.num_logprobs < -1:
        raise UsageError(
            f"forced_top_k must be at least 0, num_logprobs -1, got {a.forced_top_k}, {a.num_logprobs}",
            where=op,
        )


def check_values(op: str, a: Arguments) -> None:
    """Ranges. Raises UsageError."""
    in_unit = ((a.top_p, "top_p"), (a.min_p, "min_p"))
    faults = [name for values, name in in_unit if not bool(((values >= 0) & (values <= 1)).all())]
    if not bool(((a.temperatures >= 0) & a.temperatures.isfinite()).all()):
        faults.append("temperatures")
    if bool((a.positions < 0).any()):
        faults.append("positions")
    if not bool(a.penalties.isfinite().all()) or bool((a.penalties[:, 0] <= 0).any()):
        faults.append("penalties")
    if bool((a.history_counts < 0).any()):
        faults.append("history_counts")
    if not bool((a.bias < torch.inf).all()):
        faults.append("bias")
    if bool(((a.mask_index < -1) | (a.mask_index >= a.masks.shape[0])).any()):
        faults.append("mask_index")
    for name in ("history", "bias"):
        if not _rising(getattr(a, f"{name}_offsets"), getattr(a, f"{name}_ids"), a.logits.shape[1]):
            faults.append(f"{name}_ids or {name}_offsets")
    if faults:
        raise UsageError(f"out of range: {', '.join(faults)}", where=op)


def _rising(offsets: torch.Tensor, ids: torch.Tensor, vocab: int) -> bool:
    """Whether offsets cover the ids in order, and every row's ids rise and lie in the vocabulary."""
    if not offsets.numel():
        return True
    if offsets[0] != 0 or offsets[-1] != ids.numel() or bool((offsets.diff() < 0).any()):
        return False
    parts = ids.tensor_split(offsets[1:-1])
    return all(bool((part.diff() > 0).all()) for part in parts) and bool(((ids >= 0) & (ids < vocab)).all())


def distribution(a: Arguments, row: int) -> Distribution:
    """The definition; see the module text."""
    raw = a.logits[row].numpy()
    logits = adjusted_logits(a, row)
    both = np.concatenate((raw, logits))
    nothing = Distribution(
        OK, NO_TOKEN, np.empty(0, np.int64), np.empty(0, np.uint64), logits, *[np.float32(0)] * 3
    )
    if bool((np.isnan(both) | (both == _INFINITY)).any()):
        return nothing._replace(status=NOT_A_NUMBER)
    largest = logits.max()
    if largest == -_INFINITY:
        return nothing._replace(status=NOTHING_ALLOWED)
    temperature = float(a.temperatures[row])
    greedy = int(logits.argmax()) if temperature == 0 else NO_TOKEN  # the first among equals
    temperature = max(temperature, MIN_TEMPERATURE) if temperature else 1.0
    factor = temperature_factor(temperature)
    ids = keep_largest(logits, a.forced_top_k or len(logits))
    if temperature_is_drawn := greedy == NO_TOKEN:
        ids = ids[top_k_keeps(logits[ids], int(a.top_k[row]) if a.top_k.numel() else 0)]
    exponentials, masses, log_sum = weigh(logits[ids], largest, factor)
    if temperature_is_drawn:
        kept = top_p_keeps(masses, float(a.top_p[row]) if a.top_p.numel() else 1.0)
        kept &= exponentials >= np.float32(float(a.min_p[row]) if a.min_p.numel() else 0.0)
        ids = ids[kept]
        _, masses, log_sum = weigh(logits[ids], largest, factor)
    return Distribution(OK, greedy, ids, masses, logits, largest, factor, log_sum)


def adjusted_logits(a: Arguments, row: int) -> Floats:
    """Penalties, bias and bans, mask."""
    logits: Floats = a.logits[row].numpy().copy()
    with np.errstate(over="ignore", invalid="ignore"):
        if a.penalties.numel() and a.history_offsets.numel():
            entries = slice(int(a.history_offsets[row]), int(a.history_offsets[row + 1]))
            ids, counts = a.history_ids[entries].numpy(), a.history_counts[entries].numpy()
            repetition, frequency, presence = a.penalties[row].numpy()
            values = logits[ids]
            values = np.where(values > 0, values / repetition, values * repetition)
            generated = values - frequency * counts.astype(np.float32) - presence
            logits[ids] = np.where(counts > 0, generated, values)
        if a.bias_offsets.numel():
            entries = slice(int(a.bias_offsets[row]), int(a.bias_offsets[row + 1]))
            logits[a.bias_ids[entries].numpy()] += a.bias[entries].numpy()
    if a.mask_index.numel() and a.mask_index[row] >= 0:
        words = a.masks[int(a.mask_index[row])].numpy().astype("<i4").view(np.uint8)
        allowed = np.unpackbits(words, bitorder="little")[: len(logits)]
        logits[allowed == 0] = -_INFINITY
    return logits


def rank_of(logits: Floats, token: int) -> int:
    """Place of a token in its row, from 1: by falling logit, equal ones by lower id."""
    own = logits[token]
    return 1 + int(np.count_nonzero(logits > own)) + int(np.count_nonzero(logits[:token] == own))


def temperature_factor(temperature: float) -> np.float32:
    """1 / T; a very high temperature must not make it 0, as -inf times 0 is no number."""
    return max(np.float32(1.0 / temperature), np.finfo(np.float32).tiny)


def keep_largest(logits: Floats, count: int) -> NDArray[np.int64]:
    """Ids, ascending, of the `count` largest logits above -inf, equal ones at the edge by lower id."""
    finite = np.flatnonzero(logits > -_INFINITY)
    order = np.argsort(-logits[finite], kind="stable")[:count]
    return np.sort(finite[order])


def top_k_keeps(logits: Floats, k: int) -> NDArray[np.bool_]:
    """Which reach the k-th largest; all for a `k` below 1."""
    if not 0 < k < len(logits):
        return np.ones(len(logits), bool)
    keeps: NDArray[np.bool_] = logits >= np.partition(logits, len(logits) - k)[len(logits) - k]
    return keeps


def top_p_keeps(masses: NDArray[np.uint64], top_p: float) -> NDArray[np.bool_]:
    """Which reach the largest mass v such that all of at least v sum to ceil(top_p * total) or more."""
    if top_p >= 1:
        return np.ones(len(masses), bool)
    descending = np.sort(masses)[::-1]
    wanted = max(1.0, np.ceil(top_p * float(masses.sum())))
    edge = descending[np.searchsorted(descending.cumsum(), np.uint64(wanted))]
    keeps: NDArray[np.bool_] = masses >= edge
    return keeps


def weigh(
    logits: Floats, largest: np.float32, factor: np.float32
) -> tuple[Floats, NDArray[np.uint64], np.float32]:
    """exp((l - largest) * factor), their masses out of 2^31, and the logarithm of their sum."""
    columns = len(logits)
    width = max(_MIN_COLUMNS, 1 << (columns - 1).bit_length())
    scaled = np.full(width, -_INFINITY, dtype=np.float32)
    with np.errstate(over="ignore", under="ignore"):
        scaled[:columns] = (logits - largest) * factor
        exponentials = np.exp(scaled)
        total = tree_sum(exponentials)
        shares = exponentials[:columns] / total
    # the product is exact, the conversion truncates
    return exponentials[:columns], (shares * MASS).astype(np.uint64), np.log(total)


def tree_sum(values: Floats) -> np.float32:
    """Sum of a power of two of values by repeatedly adding neighbours: 0+1, 2+3, ...

    Trailing zeros do not change the result, so padding to a larger power of two does not either.
    """
    while len(values) > 1:
        values = values[0::2] + values[1::2]
    return values[0]


def draw(masses: NDArray[np.uint64], word: int) -> int:
    """Column that a random word picks: the first whose running sum exceeds word * total / 2**32."""
    running = masses.cumsum()
    target = philox.integer_draw(word, running[-1])
    return int((running > target).argmax())


def draw_token(a: Arguments, row: int, found: Distribution, case: int, step_row: int = 0) -> int:
    """The greedy token, or a draw from the distribution."""
    if found.greedy != NO_TOKEN:
        return found.greedy
    return int(found.ids[draw(found.masses, random_word(a, row, case, step_row))])


def random_word(a: Arguments, row: int, case: int, step_row: int) -> int:
    """The row's word of a stream, `step_row` rows into its request's step."""
    seed = int(a.seeds[row]) % 2**64
    return int(philox.random_word(seed, philox.stream(int(a.positions[row]), case, step_row)))


def logprobs(a: Arguments, row: int, found: Distribution, token: int) -> tuple[NDArray[np.int64], Floats]:
    """Ids and log-probabilities: the token, then the `num_logprobs` best; -1 and -inf if there are fewer."""
    if a.raw_logprobs:
        logits = a.logits[row].numpy()
        largest, factor = logits.max(), np.float32(1)
        log_sum = np.float32(np.log(np.exp(logits.astype(np.float64) - float(largest)).sum()))
        ids = keep_largest(logits, a.num_logprobs)
    else:
        logits, largest, factor, log_sum, ids = (
            found.logits,
            found.largest,
            found.factor,
            found.log_sum,
            found.ids,
        )
    best = ids[np.argsort(-logits[ids], kind="stable")][: a.num_logprobs]
    listed = np.full(1 + a.num_logprobs, NO_TOKEN, np.int64)
    listed[: 1 + len(best)] = [token, *best]
    values = np.full(len(listed), -_INFINITY, np.float32)
    with np.errstate(over="ignore"):
        values[: 1 + len(best)] = (logits[listed[: 1 + len(best)]] - largest) * factor - log_sum
    return listed, values


class Results:
    """Outputs that both operations have, filled row by row."""

    def __init__(self, a: Arguments) -> None:
        rows, columns = a.logits.shape[0], 1 + a.num_logprobs
        self.token_ids = torch.full((rows,), NO_TOKEN)
        self.logprob_ids = torch.full((rows, columns), NO_TOKEN)
        self.logprobs = torch.full((rows, columns), -torch.inf)
        self._arguments = a

    def emit(self, row: int, found: Distribution, token: int) -> None:
        """The row's token and what is said about it."""
        self.token_ids[row] = token
        if self._arguments.num_logprobs >= 0:
            ids, values = logprobs(self._arguments, row, found, token)
            self.logprob_ids[row], self.logprobs[row] = torch.from_numpy(ids), torch.from_numpy(values)
