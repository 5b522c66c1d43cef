"""Text token by token, against the library's decoding of all tokens at once."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_pieces import ALPHABET
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models

from deepinfer.errors import TokenizerError
from deepinfer.runtime.detokenizer import Detokenizer, Utf8Decoder
from deepinfer.runtime.token_bytes import TokenBytes

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny" / "checkpoint" / "tokenizer.json"

WORDS = ["▁", "▁▁", "▁Hello", "▁wor", "ld", "##ld", "##", "a", "aa", ".", "'", "n't", "do", "not", ",", "世"]
WORDS += ["a</w>", "end</w>", "</w>", "Ġx", "é", "<0xZZ>", "|", " b", "  "]
SPECIALS = ["<s>", "</s>"]


def words(decoder: decoders.Decoder | None) -> Tokenizer:
    """Words of many kinds, a token per byte, two special tokens and an added one that is none."""
    vocab = {word: index for index, word in enumerate([*WORDS, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="a"))
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    tokenizer.add_tokens([AddedToken("<added token>", special=False)])
    return tokenizer


def llama() -> decoders.Decoder:
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return decoders.Sequence(parts)


DECODERS = {
    "none": None,
    "replace, byte fallback, fuse, strip": llama(),
    "replace, byte fallback, fuse": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    ),
    "byte fallback, metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "metaspace": decoders.Metaspace(),
    "metaspace, first": decoders.Metaspace("▁", "first"),
    "metaspace, never": decoders.Metaspace("▁", "never"),
    "wordpiece": decoders.WordPiece(),
    "wordpiece, no cleanup": decoders.WordPiece("##", False),
    "byte pair": decoders.BPEDecoder("</w>"),
    "regex": decoders.Replace(Regex("a+"), "b"),
    "strip each": decoders.Strip(" ", 1, 1),
    "byte level": decoders.ByteLevel(),
    "byte level in a sequence": decoders.Sequence(
        [decoders.Replace("a", "o"), decoders.ByteLevel(), decoders.Fuse()]
    ),
}
TOKENIZERS = {name: words(decoder) for name, decoder in DECODERS.items()}
PIECES = {name: TokenBytes(tokenizer) for name, tokenizer in TOKENIZERS.items()}
BYTES_OF_A_CHARACTER = ["<0xE4>", "<0xB8>", "<0x96>"]


def text_of(pieces: TokenBytes, ids: Sequence[int], prompt: Sequence[int] = (), skip: bool = True) -> str:
    detokenizer = Detokenizer(pieces, prompt, skip_special_tokens=skip)
    chunks = [detokenizer.utf8.decode(detokenizer.push(token)) for token in ids]
    return "".join(chunks) + detokenizer.utf8.decode(b"", final=True)


# Bytes of a character only together: where a run of byte tokens is broken, the library replaces all of it.
UNITS = st.one_of(
    st.sampled_from([*WORDS, *SPECIALS, "<added token>"]).map(lambda word: [word]),
    st.just(BYTES_OF_A_CHARACTER),
    st.sampled_from(["<0x20>", "<0x41>"]).map(lambda word: [word]),
)
TOKENS = st.lists(UNITS, max_size=10).map(lambda units: [word for unit in units for word in unit])


@pytest.mark.parametrize("name", TOKENIZERS)
@given(words=TOKENS, skip=st.booleans())
@settings(max_examples=80, deadline=None)
def test_text_is_that_of_decoding_all_tokens_at_once(name: str, words: list[str], skip: bool) -> None:
    tokenizer = TOKENIZERS[name]
    ids = [tokenizer.token_to_id(word) for word in words]
    assert text_of(PIECES[name], ids, skip=skip) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(words=TOKENS, split=st.integers(0, 30), skip=st.booleans())
@settings(max_examples=60, deadline=None)
def test_text_continues_the_prompt(name: str, words: list[str], split: int, skip: bool) -> None:
    """Prompt and text together are the text of all tokens: a space between the two is there once."""
    tokenizer = TOKENIZERS[name]
    ids = [tokenizer.token_to_id(word) for word in words]
    prompt, output = ids[:split], ids[split:]
    alone = Detokenizer(PIECES[name], skip_special_tokens=skip)
    before = "".join(alone.utf8.decode(alone.push(token)) for token in prompt)  # but for half a character
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert before + text_of(PIECES[name], output, prompt, skip) == whole


def test_a_word_that_the_prompt_leaves_open_goes_on_without_a_space() -> None:
    tokenizer, pieces = TOKENIZERS["byte pair"], PIECES["byte pair"]
    open_word, closed_word = (
        [tokenizer.token_to_id(word) for word in words] for words in (["end</w>", "a"], ["a", "end</w>"])
    )
    output = [tokenizer.token_to_id("a</w>")]
    assert text_of(pieces, output, open_word) == "a"
    assert text_of(pieces, output, closed_word) == " a"


@given(st.lists(st.integers(0, 3060), max_size=40), st.integers(0, 40), st.booleans())
@settings(max_examples=200, deadline=None)
def test_a_real_tokenizer_gives_the_same_text(ids: list[int], split: int, skip: bool) -> None:
    """Byte-level pieces at random: most are no valid UTF-8, which both replace alike."""
    tokenizer, pieces = EXAMPLE_TOKENIZER, EXAMPLE_PIECES
    assert text_of(pieces, ids, skip=skip) == tokenizer.decode(ids, skip_special_tokens=skip)
    alone = Detokenizer(pieces, skip_special_tokens=skip)
    before = "".join(alone.utf8.decode(alone.push(token)) for token in ids[:split])
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert before + text_of(pieces, ids[split:], ids[:split], skip) == whole


EXAMPLE_TOKENIZER = Tokenizer.from_file(str(EXAMPLE))
EXAMPLE_PIECES = TokenBytes(EXAMPLE_TOKENIZER)


@given(
    st.lists(st.sampled_from([0x41, 0x80, 0x90, 0x96, 0xA0, 0xB8, 0xC3, 0xE0, 0xE4, 0xED, 0xF0, 0xF4, 0xFF]))
)
@settings(max_examples=500, deadline=None)
def test_characters_come_out_as_soon_as_they_are_certain(data: list[int]) -> None:
    """STP-04: together they are those of all bytes at once, and at most three bytes wait."""
    decoder, text = Utf8Decoder(), ""
    for count, byte in enumerate(data, start=1):
        text += decoder.decode(bytes([byte]))
        assert len(decoder.pending) <= 3
        whole = bytes(data[:count]).decode("utf-8", "replace")
        assert text == (whole[:-1] if decoder.pending else whole)
    assert text + decoder.decode(b"", final=True) == bytes(data).decode("utf-8", "replace")


def test_a_space_and_half_a_character_in_one_token() -> None:
    """The space is shown at once, the character with its second half."""
    tokenizer = Tokenizer(
        models.WordLevel({ALPHABET[0x20] + ALPHABET[0xE4]: 0, ALPHABET[0xB8] + ALPHABET[0x96]: 1})
    )
    tokenizer.decoder = decoders.ByteLevel()
    detokenizer = Detokenizer(TokenBytes(tokenizer))
    assert [detokenizer.utf8.decode(detokenizer.push(token)) for token in (0, 1)] == [" ", "世"]


def test_a_broken_run_of_byte_tokens_loses_only_what_is_no_character() -> None:
    tokenizer = TOKENIZERS["replace, byte fallback, fuse"]
    ids = [tokenizer.token_to_id(word) for word in [*BYTES_OF_A_CHARACTER, "<0xFF>", "a"]]
    assert text_of(PIECES["replace, byte fallback, fuse"], ids) == "世�a"


def test_unknown_ids_add_nothing() -> None:
    for name, pieces in PIECES.items():
        known = TOKENIZERS[name].token_to_id("a")
        ids = [10_000, known, 10_001, known]
        assert text_of(pieces, ids) == TOKENIZERS[name].decode(ids)


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.CTC(),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.ByteLevel(), decoders.Metaspace()]),
    ],
)
def test_a_decoder_that_cannot_stream_is_refused_by_name(decoder: decoders.Decoder) -> None:
    with pytest.raises(TokenizerError, match=r"stage 1|stage 2"):
        TokenBytes(words(decoder))


def test_a_token_costs_the_same_however_long_the_text_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in bytes that are decoded, after a hundred tokens and after ten thousand."""
    decoded: list[int] = []
    plain = Utf8Decoder.decode

    def counting(self: Utf8Decoder, data: bytes, *, final: bool = False) -> str:
        decoded.append(len(data) + len(self.pending))
        return plain(self, data, final=final)

    monkeypatch.setattr(Utf8Decoder, "decode", counting)
    detokenizer = Detokenizer(EXAMPLE_PIECES)
    ids = [200 + n % 2000 for n in range(10_000)]
    for token in ids:
        detokenizer.utf8.decode(detokenizer.push(token))
    longest = max(len(EXAMPLE_PIECES.piece(token, False).now) for token in ids)
    assert len(decoded) == 10_001 and max(decoded[5000:]) <= longest + 3
