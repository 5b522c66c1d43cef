"""Random numbers of the sampler: Philox4x32-10 as a pure function of (seed, stream), vectorised.

There is no state and no call count: the same (seed, stream) gives the same word in any batch, in any order,
after any restart. Owns the numbering of streams (spec engine B.5). Knows nothing of tokens or logits.
"""

from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

ROW_STRIDE: Final = 10_000_019  # positions between two rows of one request; a prime above any context length
CASES: Final = 3
FRESH: Final = 0  # an ordinary draw
RESAMPLE: Final = 1  # the draw after a rejected draft token
COIN: Final = 2  # the coin that accepts or rejects a draft token

_ROUNDS = 10
_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], dtype=np.uint64)
_WEYL = np.array([0x9E3779B9, 0xBB67AE85], dtype=np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)

Words = NDArray[np.uint64]  # every entry is below 2**32


def philox4x32(counter: tuple[ArrayLike, ...], key: tuple[ArrayLike, ArrayLike]) -> tuple[Words, ...]:
    """Ten rounds of Philox4x32 over four counter words and two key words (all broadcast together).

    Returns the four output words as uint64 arrays with values below 2**32.
    """
    words = np.broadcast_arrays(*(np.asarray(word, dtype=np.uint64) for word in (*counter, *key)))
    pair = (2,) + (1,) * words[0].ndim
    multipliers, weyl = _MULTIPLIERS.reshape(pair), _WEYL.reshape(pair)
    even, odd, round_key = np.stack(words[0:4:2]), np.stack(words[1:4:2]), np.stack(words[4:6])
    for _ in range(_ROUNDS):
        product = even * multipliers  # 32 x 32 -> 64 bits, exact
        even = (product >> _HALF)[::-1] ^ odd ^ round_key
        odd = (product & _LOW)[::-1]
        round_key = (round_key + weyl) & _LOW
    return even[0], odd[0], even[1], odd[1]


def stream(position: ArrayLike, case: int, row: ArrayLike = 0) -> Words:
    """Number of the stream for `case` at `position`, `row` rows into the step (spec engine B.5.2).

    position: index, within prompt plus output, of the token that the draw makes.
    """
    assert 0 <= case < CASES, case
    place = np.asarray(position, dtype=np.uint64) + np.asarray(row, dtype=np.uint64) * np.uint64(ROW_STRIDE)
    return place * np.uint64(CASES) + np.uint64(case)


def random_word(seeds: ArrayLike, streams: ArrayLike) -> Words:
    """32 random bits per (seed, stream): word 0 of Philox with the seed as key, the stream as counter."""
    seeds = np.asarray(seeds, dtype=np.uint64)
    streams = np.asarray(streams, dtype=np.uint64)
    return philox4x32((streams & _LOW, streams >> _HALF, 0, 0), (seeds & _LOW, seeds >> _HALF))[0]


def integer_draw(words: ArrayLike, bounds: ArrayLike) -> Words:
    """Integers in [0, bound) from 32-bit words; bounds up to 2**32."""
    return (np.asarray(words, dtype=np.uint64) * np.asarray(bounds, dtype=np.uint64)) >> _HALF
