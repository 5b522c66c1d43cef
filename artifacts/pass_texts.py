"""The text of a graph before its first pass and after each one: a sidecar per graph below `reports/`.

The texts are near duplicates, so they are compressed together; what they say is for people and tools, and is
never trusted. Outside the identity: a build keeps them, a copy may lose them. Knows nothing of their content.
"""

import base64
import binascii
import lzma
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from deepinfer.artifacts.canonical import MAX_JSON_BYTES, canonical_bytes, convert_struct
from deepinfer.artifacts.certificate import read_report
from deepinfer.artifacts.schema import Count, Name, Record
from deepinfer.errors import ArtifactCorruptError

CAPTURED = "captured"  # what stands for the graph before its first pass
MAX_TEXTS_BYTES = 64 * 1024 * 1024  # all texts of one graph
_MIN_WINDOW_BYTES = 4096  # of the format
_MAX_WINDOW_BYTES = 8 * 1024 * 1024  # several texts of the largest graphs
_MAX_DECODER_BYTES = 128 * 1024 * 1024  # a stream can ask for a window of gigabytes
_REMOVE = "remove it and build the artifact again, with --force"


class StoredText(Record, frozen=True, kw_only=True):
    """One text: the pass it was taken after, and how many of the bytes are its."""

    after: Name
    bytes: Count


class PassTexts(Record, frozen=True, kw_only=True):
    """The sidecar's content: the texts in order of the passes, as Base64 of their compressed bytes."""

    texts: tuple[StoredText, ...]
    compression: Literal["xz"] = "xz"
    data: str


def pass_texts_kind(graph: str) -> str:
    """The kind of the sidecar that holds a graph's texts."""
    return f"passes-{graph}"


def pack_texts(texts: Sequence[tuple[str, str]]) -> bytes | None:
    """The sidecar's content from pairs of (pass, text after it); None when that is more than is ever read."""
    encoded = [(after, text.encode()) for after, text in texts]
    data = b"".join(text for _, text in encoded)
    if len(data) > MAX_TEXTS_BYTES:
        return None
    stored = tuple(StoredText(after=after, bytes=len(text)) for after, text in encoded)
    # a window as large as the texts: what the compressor takes of memory follows it
    window = min(max(len(data), _MIN_WINDOW_BYTES), _MAX_WINDOW_BYTES)
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": window}]
    packed = base64.b64encode(lzma.compress(data, filters=filters)).decode()
    content = canonical_bytes(PassTexts(texts=stored, data=packed))
    return content if len(content) <= MAX_JSON_BYTES // 2 else None  # room for what a report adds


def unpack_texts(content: object, *, where: str) -> dict[str, str]:
    """Text by pass, in order, from a sidecar's parsed content.

    Raises ArtifactFormatError for content of another shape, ArtifactCorruptError for bytes that do not give
    the texts that are announced; no more memory is taken than MAX_TEXTS_BYTES and what a decoder needs.
    """
    packed = convert_struct(content, PassTexts, where=where)
    expected = sum(text.bytes for text in packed.texts)
    if expected > MAX_TEXTS_BYTES:
        raise _corrupt(f"announces {expected} bytes of text, the limit is {MAX_TEXTS_BYTES}", where)
    data = _decompressed(packed.data, expected, where)
    texts: dict[str, str] = {}
    position = 0
    for text in packed.texts:
        if text.after in texts:
            raise _corrupt(f"holds the text after {text.after} twice", where)
        try:
            texts[text.after] = data[position : position + text.bytes].decode()
        except UnicodeDecodeError as error:
            raise _corrupt(f"the text after {text.after} is not UTF-8", where) from error
        position += text.bytes
    return texts


def read_pass_texts(directory: Path | str, graph: str, artifact_id: str) -> dict[str, str] | None:
    """The texts of a graph by pass, in order; None where they were not kept.

    Raises ArtifactFormatError or ArtifactCorruptError for a sidecar that cannot be read.
    """
    report = read_report(directory, pass_texts_kind(graph))
    if report is None:
        return None
    where = f"reports/{pass_texts_kind(graph)}"
    if report.artifact_id != artifact_id:
        raise _corrupt("the artifact was replaced while it was read", where)
    return unpack_texts(report.content, where=where)


def _decompressed(packed: str, expected: int, where: str) -> bytes:
    """The compressed bytes' content, which must be `expected` bytes; more are never made."""
    try:
        compressed = base64.b64decode(packed, validate=True)
        decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MAX_DECODER_BYTES)
        data = decoder.decompress(compressed, max_length=expected + 1)
        if len(data) == expected and not decoder.eof:  # the end of the stream may take one more call
            data += decoder.decompress(b"", max_length=1)
    except (ValueError, binascii.Error, lzma.LZMAError, EOFError) as error:
        raise _corrupt(f"cannot be decompressed: {error}", where) from error
    if len(data) != expected or not decoder.eof or decoder.unused_data:
        raise _corrupt(f"does not decompress to the {expected} bytes of text that it announces", where)
    return data


def _corrupt(what: str, where: str) -> ArtifactCorruptError:
    return ArtifactCorruptError(what, where=where, action=_REMOVE)
