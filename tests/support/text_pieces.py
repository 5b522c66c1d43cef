"""Tokenizers whose tokens are given byte strings, and text by its definition: all bytes at once."""

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, decoders, models

from deepinfer.runtime.stop_strings import StopStrings
from deepinfer.runtime.text_stream import TextStream
from deepinfer.runtime.token_bytes import TokenBytes

PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
ALPHABET = [chr(byte) if byte in PRINTABLE else chr(256 + OTHERS.index(byte)) for byte in range(256)]


def byte_level(pieces: Iterable[bytes]) -> tuple[TokenBytes, dict[bytes, int]]:
    """A byte-level tokenizer with a token for each single byte (ids 0 to 255) and each further piece."""
    ids = {bytes([byte]): byte for byte in range(256)}
    for piece in pieces:
        ids.setdefault(piece, len(ids))
    vocab = {"".join(ALPHABET[byte] for byte in piece): token for piece, token in ids.items() if piece}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=ALPHABET[0]))
    tokenizer.decoder = decoders.ByteLevel()
    return TokenBytes(tokenizer), ids


def stream_of(
    pieces: Sequence[bytes], stops: Sequence[str] = (), **options: object
) -> tuple[TextStream, list[int]]:
    """A stream for tokens that stand for these pieces, and their ids."""
    token_bytes, ids = byte_level(pieces)
    automaton = StopStrings(stops) if stops else None
    return TextStream(token_bytes, stops=automaton, **options), [ids[piece] for piece in pieces]


def first_stop(
    pieces: Sequence[bytes], stops: Sequence[str], min_tokens: int = 0
) -> tuple[str, int, int] | None:
    """The stop string that counts, by definition: (which, its token's index, its end in bytes)."""
    data, token_of = b"".join(pieces), [n for n, piece in enumerate(pieces) for _ in piece]
    for end in range(1, len(data) + 1):
        if token_of[end - 1] < min_tokens:
            continue
        # With min_tokens 0 the second condition changes nothing: the other string has ended the text before.
        found = [
            stop
            for stop in stops
            if data[:end].endswith(stop.encode())
            and not (min_tokens and any(other in stop[:-1] for other in stops))
        ]
        if found:
            return max(found, key=lambda stop: len(stop.encode())), token_of[end - 1], end
    return None


def final_text(
    pieces: Sequence[bytes], stops: Sequence[str], *, include_stop: bool = False, min_tokens: int = 0
) -> str:
    """The text by definition."""
    data, found = b"".join(pieces), first_stop(pieces, stops, min_tokens)
    if found is not None:
        stop, _, end = found
        data = data[: end if include_stop else end - len(stop.encode())]
    return data.decode("utf-8", "replace")


def cut(data: bytes, places: Iterable[int]) -> list[bytes]:
    """`data` cut at these places; empty pieces are left out."""
    borders = [0, *sorted({place for place in places if 0 < place < len(data)}), len(data)]
    return [data[a:b] for a, b in zip(borders, borders[1:], strict=False) if a < b]
