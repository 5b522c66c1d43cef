"""The readers of the corpus packages against writers of the same formats."""

import gzip
import struct

import numpy as np
import pytest
from corpus_packages import deb, lzw, pack_codes, r_database, r_strings, r_value, verse_store
from hypothesis import given, settings
from hypothesis import strategies as st
from package_formats import FormatError, decompress_lzw, read_deb, read_r_database, read_verses


def test_files_of_a_package() -> None:
    package = deb({"usr/a": b"one", "usr/b": b"two"})
    assert read_deb(package, ["usr/b", "usr/a"]) == {"usr/a": b"one", "usr/b": b"two"}
    with pytest.raises(FormatError, match="lacks usr/c"):
        read_deb(package, ["usr/c"])
    with pytest.raises(FormatError, match="not a Debian package"):
        read_deb(b"PK", ["usr/a"])


def test_r_character_vectors() -> None:
    vectors = {"emma": ["first line", "", "£20,000"], "persuasion": []}
    assert read_r_database(*r_database(vectors)) == vectors


def test_r_values_of_other_kinds_are_refused() -> None:
    with pytest.raises(FormatError, match="kind 14"):
        read_r_database(gzip.compress(r_value(struct.pack(">ii", 14, 0))), b"")
    with pytest.raises(FormatError, match="ends early"):
        read_r_database(gzip.compress(r_value(r_strings(["text"])[:-1])), b"")


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=400), st.integers(0, 50))
def test_lzw_round_trip(data: bytes, clear_after: int) -> None:
    assert decompress_lzw(lzw(data * 3, clear_after)) == data * 3


def test_lzw_with_wider_codes() -> None:
    data = np.random.default_rng(1).integers(0, 40, 6000, dtype=np.uint8).tobytes()  # more than 2^11 entries
    assert decompress_lzw(lzw(data)) == data


def test_lzw_impossible_code() -> None:
    with pytest.raises(FormatError, match="impossible"):
        decompress_lzw(pack_codes([(65, 9), (300, 9)]))


def test_verses_across_windows() -> None:
    lines = [f"Ge1:{number} And it was so, the day {number}." for number in range(1, 30)]
    verses = read_verses(verse_store(lines, 100))
    assert verses[0] == ("Ge1:1", "And it was so, the day 1.")
    assert [f"{reference} {text}" for reference, text in verses] == lines
    with pytest.raises(FormatError, match="not a text store"):
        read_verses(b"XX02" + bytes(200))
