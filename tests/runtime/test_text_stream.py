"""Streamed text with stop strings, against its definition on the whole text."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_pieces import byte_level, cut, final_text, first_stop, stream_of

from deepinfer.runtime.stop_strings import StopStrings
from deepinfer.runtime.text_stream import TextStream, TokenSpan

SMILE = "😀".encode()


def shown(stream: TextStream, ids: list[int]) -> tuple[list[str], list[int], str | None]:
    """Deltas of text and of tokens after each token, and the stop string that ended it; ends the text."""
    texts, counts, stop = [], [], None
    for token in ids:
        stop = stream.push(token)
        if stop is not None:
            break
        delta = stream.take()
        texts.append(delta.text)
        counts.append(delta.num_tokens)
    stream.end()
    delta = stream.take()
    return [*texts, delta.text], [*counts, delta.num_tokens], stop


# Few characters, so that stop strings occur and overlap; some of several bytes, one shared lead byte.
ALPHABET = "ab<é世丗"
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), min_size=1, max_size=4, unique=True)
TEXTS = st.text(ALPHABET, max_size=16)
BROKEN = st.lists(
    st.sampled_from(
        [b"a", b"b", "世".encode(), b"\xe4", b"\xb8", b"\x96", b"\xc3", b"\xff", b"\xed\xa0", SMILE[:3]]
    ),
    max_size=14,
).map(b"".join)
BYTES = st.one_of(TEXTS.map(str.encode), BROKEN)
PLACES = st.lists(st.integers(1, 60), max_size=24)


@given(BYTES, STOPS, PLACES, st.booleans(), st.integers(0, 4))
@settings(max_examples=300, deadline=None)
def test_any_split_shows_the_text_of_the_definition(
    data: bytes, stops: list[str], places: list[int], include: bool, min_tokens: int
) -> None:
    """STP-03, STP-07, STP-08, STP-09, STP-23."""
    pieces = cut(data, places)
    stream, ids = stream_of(pieces, stops, include_stop=include, min_tokens=min_tokens)
    texts, counts, stop = shown(stream, ids)
    found = first_stop(pieces, stops, min_tokens)
    assert "".join(texts) == stream.text
    assert stream.text == final_text(pieces, stops, include_stop=include, min_tokens=min_tokens)
    assert stop == (found[0] if found else None)
    assert sum(counts) == stream.num_tokens == (found[1] + 1 if found else len(pieces))


@given(BYTES, STOPS, PLACES, PLACES)
@settings(max_examples=150, deadline=None)
def test_two_splits_of_a_text_show_the_same(
    data: bytes, stops: list[str], some: list[int], other: list[int]
) -> None:
    """STP-08."""
    results = []
    for places in (some, other):
        stream, ids = stream_of(cut(data, places), stops)
        stop = shown(stream, ids)[2]
        results.append((stream.text, stop))
    assert results[0] == results[1]


@given(TEXTS, STOPS, PLACES)
@settings(max_examples=300, deadline=None)
def test_nothing_is_held_back_without_need_and_no_stop_string_is_shown(
    text: str, stops: list[str], places: list[int]
) -> None:
    """STP-05, STP-06: what is held can still be left out; what is shown can no more."""
    pieces = cut(text.encode(), places)
    token_bytes, ids = byte_level([*pieces, *(stop.encode() for stop in stops)])
    stream = TextStream(token_bytes, stops=StopStrings(stops))
    so_far = b""
    for piece in pieces:
        if stream.push(ids[piece]) is not None:
            break
        so_far += piece
        visible = stream.take() and stream.text
        certain = so_far.decode("utf-8", "ignore")
        assert certain.startswith(visible)
        endings = []
        for stop in stops:
            whole = stop.encode()
            for length in range(1, len(whole)):
                if so_far.endswith(whole[:length]):
                    twin = stream.copy()
                    for byte in whole[length:]:
                        if twin.push(byte) is not None:
                            break
                    twin.end()
                    assert twin.text.startswith(visible), "shown text was taken back"
                    endings.append(twin.text)
        if visible != certain:
            assert visible in endings, (
                f"{certain[len(visible) :]!r} is held back though it cannot be left out"
            )


@given(BROKEN, PLACES)
@settings(max_examples=300, deadline=None)
def test_only_bytes_that_can_become_a_character_are_waited_for(data: bytes, places: list[int]) -> None:
    """STP-04, STP-06."""
    pieces = cut(data, places)
    stream, ids = stream_of(pieces)
    so_far = b""
    for piece, token in zip(pieces, ids, strict=True):
        stream.push(token)
        stream.take()
        so_far += piece
        whole = so_far.decode("utf-8", "replace")
        can_grow = any(
            len((so_far + tail).decode("utf-8", "replace")) == len(whole)
            and (so_far + tail).decode("utf-8", "replace")[-1] != "�"
            for tail in (
                b"\x80",
                b"\xa0",
                b"\x80\x80",
                b"\xa0\x80",
                b"\x80\x80\x80",
                b"\x90\x80\x80",
                b"\x96",
            )
        )
        assert stream.text == (whole[:-1] if whole.endswith("�") and can_grow else whole)


@given(BYTES, STOPS, PLACES, st.booleans())
@settings(max_examples=200, deadline=None)
def test_spans_tile_the_text_and_chunks_carry_whole_tokens(
    data: bytes, stops: list[str], places: list[int], include: bool
) -> None:
    """STP-10, STP-11, STP-13: ids, spans and text of all chunks are those of the whole."""
    pieces = cut(data, places)
    stream, ids = stream_of(pieces, stops, include_stop=include)
    tokens_out, visible, spans_out = 0, "", []
    for token in ids:
        if stream.push(token) is not None:
            break
        delta = stream.take()
        spans_out += stream.spans(tokens_out, tokens_out + delta.num_tokens)
        tokens_out, visible = tokens_out + delta.num_tokens, visible + delta.text
        assert all(span.end <= len(visible) for span in spans_out)
    stream.end()
    stream.take()
    spans = stream.spans()
    assert len(spans) == stream.num_tokens
    assert list(spans[:tokens_out]) == spans_out, "a span changed after its token was out"
    assert "".join(stream.text[span.start : span.visible_end] for span in spans) == stream.text
    for before, after in itertools.pairwise(spans):
        assert before.start <= before.visible_end <= before.end == after.start


@pytest.mark.parametrize("include", [False, True])
def test_every_tokenisation_stops_at_the_same_place(include: bool) -> None:
    """STP-07: all 16,384 cuts of a text of 15 bytes, none of which shows a part of the stop string."""
    data = b"hello<ST<STOP>x"
    token_bytes, ids = byte_level([data[a:b] for a in range(15) for b in range(a + 1, 16)])
    automaton = StopStrings(["<STOP>"])
    expected = "hello<ST<STOP>" if include else "hello<ST"
    for places in range(1 << 14):
        pieces = cut(data, [n + 1 for n in range(14) if places >> n & 1])
        stream = TextStream(token_bytes, stops=automaton, include_stop=include)
        visible = ""
        for piece in pieces:
            stop = stream.push(ids[piece])
            visible += stream.take().text
            assert expected.startswith(visible)
            if stop is not None:
                break
        stream.end()
        assert (visible + stream.take().text, stop) == (expected, "<STOP>")


def test_a_stop_string_across_tokens_ends_the_text_and_spans_say_what_is_hidden() -> None:
    """STP-03, STP-11, STP-12: the first token is visible but for its last character."""
    stream, ids = stream_of([b"hello<", b"ST", b"OP>"], ["<STOP>"])
    texts, counts, stop = shown(stream, ids)
    assert (texts, counts, stop) == (["hello", "", ""], [0, 0, 3], "<STOP>")
    assert stream.spans() == (TokenSpan(0, 5, 6), TokenSpan(6, 6, 8), TokenSpan(8, 8, 11))


def test_a_token_with_half_a_character_is_not_out_before_its_span_is_known() -> None:
    """STP-10: the token that ends the request makes the half a character of its own."""
    stream, ids = stream_of([b"a\xc9", b"x"])
    stream.push(ids[0])
    assert stream.take() == ("a", 0)
    stream.push(ids[1])
    stream.end(drop_last_token=True)
    assert stream.take() == ("�", 2)
    assert stream.spans() == (TokenSpan(0, 2, 2), TokenSpan(2, 2, 3))


def test_a_character_in_two_tokens_is_shown_whole() -> None:
    """STP-04, STP-06: nothing of it before; text before it at once, since no stop string can hold it."""
    stream, ids = stream_of([SMILE[:2], SMILE[2:]], ["<STOP>"])
    assert shown(stream, ids)[:2] == (["", "😀", ""], [0, 2, 0])
    stream, ids = stream_of([b"hello<", SMILE[:2]], ["<STOP>"])
    assert [delta for token in ids for delta in [stream.push(token), stream.take().text]] == [
        None,
        "hello",
        None,
        "<",
    ]


@pytest.mark.parametrize(
    ("text", "stop", "held"),
    [("hello<", "<STOP>", 1), ("hello<ST", "<STOP>", 3), ("hello<STOP", "<STOP>", 5), ("<S<", "<STOP>", 1)]
    + [("aaaa", "aaab", 3), ("hello", "<STOP>", 0), ("x世", "世界", 1), ("ab", "abcd", 2)],
)
def test_the_longest_suffix_that_begins_the_stop_string_is_held(text: str, stop: str, held: int) -> None:
    """STP-05."""
    stream, ids = stream_of([text.encode()], [stop])
    stream.push(ids[0])
    assert stream.take().text == text[: len(text) - held]


@pytest.mark.parametrize(
    ("stops", "text", "shown_text", "stop"),
    [
        (["ab", "abc"], "zabcq", "z", "ab"),
        (["abcd", "bc"], "xabcdy", "xa", "bc"),
        (["b", "ab"], "zab", "z", "ab"),
    ],
)
def test_the_stop_string_that_ends_first_counts_and_of_those_the_longest(
    stops: list[str], text: str, shown_text: str, stop: str
) -> None:
    """STP-08, STP-09."""
    for size in range(len(text)):
        for places in itertools.combinations(range(1, len(text)), size):
            stream, ids = stream_of(cut(text.encode(), places), stops)
            assert shown(stream, ids)[2] == stop
            assert stream.text == shown_text


def test_held_text_that_became_no_stop_string_is_released_at_the_end() -> None:
    """STP-22."""
    stream, ids = stream_of([b"hello<"], ["<STOP>"])
    stream.push(ids[0])
    assert stream.take() == ("hello", 0)
    stream.end()
    assert stream.take() == ("<", 1)


def test_text_that_was_cut_off_shows_nothing_more() -> None:
    """STP-20: of what was held back nobody knows what it would have become."""
    stream, ids = stream_of([b"hello<"], ["<STOP>"])
    stream.push(ids[0])
    assert stream.take().text == "hello"
    stream.end(release=False)
    assert stream.take() == ("", 1)
    assert (stream.text, stream.spans()) == ("hello", (TokenSpan(0, 5, 6),))


@pytest.mark.parametrize(
    ("pieces", "text", "spans"),
    [
        ([b"hello<", b"ST"], "hello<", (TokenSpan(0, 6, 6), TokenSpan(6, 6, 8))),
        ([b"hi" + SMILE[:1], b"."], "hi�", (TokenSpan(0, 3, 3), TokenSpan(3, 3, 4))),
        ([b"x"], "", (TokenSpan(0, 0, 1),)),
    ],
)
def test_the_token_that_ends_a_request_is_no_part_of_its_text(
    pieces: list[bytes], text: str, spans: tuple[TokenSpan, ...]
) -> None:
    stream, ids = stream_of(pieces, ["<STOP>"])
    for token in ids[:-1]:
        stream.push(token)
        stream.take()
    stream.push(ids[-1])
    stream.end(drop_last_token=True)
    assert sum(delta.num_tokens for delta in [stream.take()]) >= 1
    assert (stream.text, stream.spans()) == (text, spans)


def test_text_behind_a_stop_string_in_its_token_is_left_out() -> None:
    """STP-23."""
    for include, text in ((False, "hello"), (True, "hello<STOP>")):
        stream, ids = stream_of([b"hello<", b"STOP> and more"], ["<STOP>"], include_stop=include)
        assert shown(stream, ids)[2] == "<STOP>"
        assert stream.text == text


def test_a_stop_string_within_the_first_tokens_does_not_count() -> None:
    stream, ids = stream_of([b"a.", b"b", b".", b"."], ["."], min_tokens=3)
    assert shown(stream, ids) == (["a.", "b", ".", ""], [1, 1, 1, 1], ".")
    assert (stream.text, stream.num_tokens) == ("a.b.", 4)
    # What is left of a stop string that did not count may begin another one.
    stream, ids = stream_of([b"aba", b"c", b"ba"], ["aba"], min_tokens=1)
    assert shown(stream, ids) == (["ab", "ac", "b", "a"], [0, 2, 0, 1], None)


def test_a_single_letter_stops() -> None:
    for stops in (["a"], ["a", "b"], ["\n"]):
        stream, ids = stream_of([b"x", stops[0].encode(), b"y"], stops)
        assert shown(stream, ids)[2] == stops[0]
        assert stream.text == "x"


def test_text_held_for_one_stop_string_is_released_when_another_way_is_taken() -> None:
    """Of two stop strings neither is reached."""
    pieces = [b"DEF", b"G", b"HI", b"J"]
    stream, ids = stream_of(pieces, ["DEFGHIJ"])
    assert shown(stream, ids)[0] == ["", "", "", ""]
    stream, ids = stream_of(pieces, ["DEFGHIX"])
    assert shown(stream, ids)[0] == ["", "", "", "DEFGHIJ", ""]


def test_a_prompt_that_ends_within_a_character_is_continued() -> None:
    """The first chunk holds new text only, and a stop string may begin with that character."""
    world = "世".encode()
    token_bytes, ids = byte_level([b"Hello ", world[:2], world[2:]])
    prompt = [ids[b"Hello "], ids[world[:2]]]
    stream = TextStream(token_bytes, prompt)
    stream.push(ids[world[2:]])
    assert stream.take() == ("世", 1)
    stream = TextStream(token_bytes, prompt, stops=StopStrings(["世"]))
    assert stream.push(ids[world[2:]]) == "世"
    stream.end()
    assert (stream.take(), stream.text) == (("", 1), "")


def test_a_copy_goes_on_by_itself() -> None:
    """STP-16: neither sees what the other does."""
    stream, ids = stream_of([b"a<", SMILE[:2], b"S>", SMILE[2:]], ["<S>"])
    stream.push(ids[0])
    twin = stream.copy()
    assert twin.push(ids[2]) == "<S>"
    stream.push(ids[1])
    other = stream.copy()
    stream.push(ids[3])
    other.push(ids[0])
    for one in (stream, twin, other):
        one.end()
    assert (stream.text, twin.text, other.text) == ("a<😀", "a", "a<�a<")


def test_what_is_remembered_besides_the_text_is_bounded() -> None:
    """STP-25: a megabyte without a match leaves no more than the stop string's length behind."""
    stream, ids = stream_of([b"ab" * 2048], ["abababc"])
    for _ in range(256):
        assert stream.push(ids[0]) is None
        stream.take()
        assert len(stream._known) <= len("abababc") - 1
    stream.end()
    assert len(stream.text) == 2**20
