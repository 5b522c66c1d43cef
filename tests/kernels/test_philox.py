"""Known answers of the generator and of the numbering of streams, and absence of aliasing."""

import numpy as np
import pytest

from deepinfer.kernels import philox

DRAFT_SEED_OFFSET = 1_000_000_007


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_generator_gives_the_published_words(counter: tuple, key: tuple, words: str) -> None:
    assert " ".join(f"{int(word):08x}" for word in philox.philox4x32(counter, key)) == words


@pytest.mark.parametrize(
    ("seed", "position", "case", "row", "number", "word"),
    [
        (1, 16_389, philox.FRESH, 0, 49_167, 0xEB5FC5C1),
        (1, 16_390, philox.FRESH, 0, 49_170, 0xB72D45DE),
        (1, 16_390, philox.RESAMPLE, 0, 49_171, 0x0B0E047F),
        (1, 16_390, philox.COIN, 0, 49_172, 0xFC6CF4A3),
        (1, 16_390, philox.COIN, 1, 30_049_229, 0x59DF0CC0),
        (1, 16_390, philox.FRESH, 5, 150_049_455, 0x3349AEEB),
        (1 + DRAFT_SEED_OFFSET, 16_390, philox.FRESH, 0, 49_170, 0xD43369A9),
        (1 + DRAFT_SEED_OFFSET, 16_390, philox.FRESH, 1, 30_049_227, 0x30FBF4B6),
        (0, 0, philox.FRESH, 0, 0, 0x6627E8D5),
        (1, 0, philox.FRESH, 0, 0, 0xE3E80670),
        (2**63 - 1, 1, philox.FRESH, 0, 3, 0x60D3C4AF),
        (5 + DRAFT_SEED_OFFSET, 100, philox.FRESH, 0, 300, 0x95288AF2),
    ],
)
def test_streams_give_the_specified_words(
    seed: int, position: int, case: int, row: int, number: int, word: int
) -> None:
    assert philox.stream(position, case, row) == number
    assert philox.random_word(seed, number) == word


def test_largest_seed_and_broadcasting_agree_with_single_calls() -> None:
    seeds = np.array([0, 2**32, 2**64 - 1], dtype=np.uint64)[:, None]
    streams = np.arange(7, dtype=np.uint64) * np.uint64(10**9)
    table = philox.random_word(seeds, streams)
    assert table.shape == (3, 7) and len(np.unique(table)) == 21
    for i in range(3):
        for j in range(7):
            assert philox.random_word(seeds[i, 0], streams[j]) == table[i, j]


def test_integer_draw_covers_exactly_the_range() -> None:
    assert philox.integer_draw(0, 10) == 0
    assert philox.integer_draw(0xFFFFFFFF, 10) == 9
    assert philox.integer_draw(0xFFFFFFFF, 2**31) == 2**31 - 1
    assert philox.integer_draw(0xFFFFFFFF, 1) == 0


def test_neighbouring_seeds_share_no_streams() -> None:
    seeds = np.arange(100, dtype=np.uint64)
    seeds = np.concatenate([seeds, seeds + np.uint64(DRAFT_SEED_OFFSET)])[:, None]
    numbers = np.concatenate(
        [philox.stream(np.arange(32), case, row) for case in range(3) for row in range(6)]
    )
    words = philox.random_word(seeds, numbers[None, :]).ravel()
    pairs = len(words) * (len(words) - 1) / 2
    duplicates = len(words) - len(np.unique(words))
    assert duplicates <= 2 * pairs / 2**32 + 10  # the birthday expectation is 1.5


def test_outputs_of_neighbouring_seeds_are_not_shifted_copies() -> None:
    words = philox.random_word(np.arange(64, dtype=np.uint64)[:, None], philox.stream(np.arange(33), 0))
    assert not np.any(words[1:, :-1] == words[:-1, 1:])
