"""The bytes that each token of a `tokenizers` file adds to a text, derived from the file's decoder.

A decoder of that library turns a whole list of tokens into text. Here its stages are taken apart into what
they do to one token, so that text can grow token by token at a cost that does not depend on its length.
Knows nothing of requests; UTF-8 is the caller's business, since a token may end in the middle of a character.

Where a run of byte tokens (`<0xE4>`) is not valid UTF-8, the library replaces every byte of the run, valid
characters in it included, which no text that is already shown could follow. Here, as with byte-level
tokenizers, only the bytes that belong to no character are replaced.
"""

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from tokenizers import Regex, decoders
from tokenizers import Tokenizer as FastTokenizer

from deepinfer.errors import TokenizerError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Piece(NamedTuple):
    """What one token adds: `now`, and `later` as soon as another token follows."""

    now: bytes
    later: bytes = b""


class LeadingStrip(NamedTuple):
    """How many times a byte is taken off the beginning of the whole text."""

    byte: bytes
    times: int


def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level tokenizers: printable Latin-1 is itself, the rest is from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()


class TokenBytes:
    """The pieces of one tokenizer's tokens; each is derived once. May be shared by all requests."""

    def __init__(self, tokenizer: FastTokenizer) -> None:
        """Raises TokenizerError for a decoder that cannot be taken apart, by its name."""
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.leading_strip = LeadingStrip(b"", 0)
        self._stages: list[tuple[str, decoders.Decoder]] = []
        self._byte_fallback: int | None = None  # how many stages come before that one
        self._byte_level = False
        self._pieces: dict[tuple[int, bool], Piece | None] = {}
        decoder = tokenizer.decoder
        # Without a decoder the library joins tokens by spaces.
        self._joined = decoder is None
        if decoder is not None:
            self._take_apart(_flattened(json.loads(decoder.__getstate__())))

    def piece(self, token_id: int, first: bool) -> Piece | None:
        """What `token_id` adds as the first token of a text or as a later one; None for an unknown id."""
        key = (token_id, first)
        if key not in self._pieces:
            token = self._tokenizer.id_to_token(token_id)
            self._pieces[key] = None if token is None else self._derive(token, first)
        return self._pieces[key]

    def _take_apart(self, stages: list[dict[str, Any]]) -> None:
        whole = False  # a stage before this one has joined all tokens to one text
        for number, stage in enumerate(stages):
            kind = stage.get("type")
            if kind == "Fuse" or (kind == "ByteLevel" and not whole and self._byte_fallback is None):
                whole, self._byte_level = True, self._byte_level or kind == "ByteLevel"
            elif kind == "Strip" and whole and self._strips_leading_byte(stage):
                self.leading_strip = LeadingStrip(stage["content"].encode(), stage["start"])
            elif kind == "ByteFallback" and not whole:
                self._byte_fallback = len(self._stages)
            elif kind in _STAGES and not whole:
                self._stages.append((kind, _STAGES[kind](stage)))
            else:
                raise TokenizerError(
                    f"stage {number + 1} of its decoder, {kind}, does not work token by token there",
                    where="tokenizer.json",
                    action=f"decoders that can: ByteLevel, ByteFallback, Fuse, {', '.join(sorted(_STAGES))}",
                )

    def _strips_leading_byte(self, stage: dict[str, Any]) -> bool:
        once = self.leading_strip.times == 0
        return once and stage["stop"] == 0 and stage["content"].isascii() and len(stage["content"]) == 1

    def _derive(self, token: str, first: bool) -> Piece:
        if self._joined:
            return Piece((token if first else " " + token).encode())
        at_end = self._bytes(token, first, last=True)
        if all(kind != "BPEDecoder" for kind, _ in self._stages):
            return Piece(at_end)
        going_on = self._bytes(token, first, last=False)
        # A mark of a word's end is a space unless the text ends there; inside a token it always is one.
        now = at_end if going_on.startswith(at_end) else going_on
        return Piece(now, going_on[len(now) :])

    def _bytes(self, token: str, first: bool, *, last: bool) -> bytes:
        """The token's bytes after all stages; those that look at single tokens are the library's own code."""
        text = token
        for number in range(len(self._stages) + 1):
            byte = _BYTE_TOKEN.fullmatch(text) if number == self._byte_fallback else None
            if byte is not None:
                return bytes([int(byte[1], 16)])
            if number < len(self._stages):
                kind, stage = self._stages[number]
                # A stage that minds a token's place only asks whether it is the first, or the last.
                before = [""] if kind in ("Metaspace", "WordPiece") and not first else []
                after = [""] if kind == "BPEDecoder" and not last else []
                text = stage.decode([*before, text, *after])
        return self._as_bytes(text)

    def _as_bytes(self, text: str) -> bytes:
        if self._byte_level and all(character in _BYTE_OF for character in text):
            return bytes(_BYTE_OF[character] for character in text)
        return text.encode()


def _flattened(stage: dict[str, Any]) -> list[dict[str, Any]]:
    if stage.get("type") != "Sequence":
        return [stage]
    return [inner for outer in stage["decoders"] for inner in _flattened(outer)]


def _replace(stage: dict[str, Any]) -> decoders.Decoder:
    pattern = stage["pattern"]
    text = Regex(pattern["Regex"]) if "Regex" in pattern else pattern["String"]
    return decoders.Replace(text, stage["content"])


def _metaspace(stage: dict[str, Any]) -> decoders.Decoder:
    return decoders.Metaspace(stage["replacement"], stage["prepend_scheme"], stage.get("split", True))


# What treats tokens one by one, rebuilt from its description.
_STAGES: dict[str, Callable[[dict[str, Any]], decoders.Decoder]] = {
    "Replace": _replace,
    "Metaspace": _metaspace,
    "Strip": lambda stage: decoders.Strip(stage["content"], stage["start"], stage["stop"]),
    "WordPiece": lambda stage: decoders.WordPiece(stage["prefix"], stage["cleanup"]),
    "BPEDecoder": lambda stage: decoders.BPEDecoder(stage["suffix"]),
}
