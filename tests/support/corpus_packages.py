"""Small made-up packages in the formats of the tiny model's corpus."""

import gzip
import io
import struct
import tarfile
import zlib

import numpy as np


def deb(files: dict[str, bytes]) -> bytes:
    """A Debian package with these files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    package = b"!<arch>\n"
    for name, data in (("debian-binary", b"2.0\nx"), ("data.tar.xz", buffer.getvalue())):
        package += f"{name:<16}{0:<12}{0:<6}{0:<6}{0o100644:<8o}{len(data):<10}`\n".encode()
        package += data + b"\n" * (len(data) % 2)
    return package


def r_value(body: bytes) -> bytes:
    return b"X\n" + struct.pack(">iiii", 3, 0, 0, 5) + b"UTF-8" + body


def r_string(text: str) -> bytes:
    return struct.pack(">ii", 9, len(text.encode())) + text.encode()


def r_strings(texts: list[str]) -> bytes:
    return struct.pack(">ii", 16, len(texts)) + b"".join(r_string(text) for text in texts)


def r_named_list(items: dict[str, bytes], names_symbol: bytes) -> bytes:
    names = struct.pack(">i", 0x402) + names_symbol + r_strings(list(items)) + struct.pack(">i", 254)
    return struct.pack(">ii", 0x213, len(items)) + b"".join(items.values()) + names


def r_database(vectors: dict[str, list[str]]) -> tuple[bytes, bytes]:
    """The index and the database file of character vectors."""
    database, places = b"", {}
    for name, lines in vectors.items():
        value = r_value(r_strings(lines))
        entry = struct.pack(">i", len(value)) + zlib.compress(value)
        places[name] = struct.pack(">iiii", 13, 2, len(database), len(entry))
        database += entry
    inner = r_named_list(places, struct.pack(">i", 1) + r_string("names"))
    index = r_value(r_named_list({"variables": inner}, struct.pack(">i", 0x1FF)))  # the symbol's second use
    return gzip.compress(index), database


def lzw(data: bytes, clear_after: int = 0) -> bytes:
    """Unix `compress` codes for `data`; with `clear_after`, a clear code after so many codes."""
    codes: list[tuple[int, int]] = []
    table = {bytes([value]): value for value in range(256)}
    bits, entries, word, since_clear = 9, 257, b"", 0
    for position in range(len(data)):
        byte = data[position : position + 1]
        if word + byte in table:
            word += byte
            continue
        codes.append((table[word], bits))
        since_clear += 1
        table[word + byte] = entries
        entries += 1
        word = byte
        if entries - 1 == 1 << bits:  # the reader's table lags one entry behind
            bits += 1
        if clear_after and since_clear == clear_after:
            codes.append((256, bits))
            table = {bytes([value]): value for value in range(256)}
            bits, entries, since_clear = 9, 257, 0
    if word:
        codes.append((table[word], bits))
    return pack_codes(codes)


def pack_codes(codes: list[tuple[int, int]]) -> bytes:
    """Codes with their widths, low bit first; a new width or a clear code ends a group of eight."""
    number, at, group = 0, 0, 0
    width = 9
    for code, bits in codes:
        if bits != width:
            at = group = group + -(-(at - group) // (8 * width)) * 8 * width
            width = bits
        number |= code << at
        at += bits
        if code == 256:
            at = group = group + -(-(at - group) // (8 * width)) * 8 * width
            width = 9
    return number.to_bytes((at + 7) // 8, "little")


def verse_store(lines: list[str], window: int) -> bytes:
    """A text store of these verses, cut into windows."""
    text = "".join(f"{line}\n" for line in ("a title", *lines)).encode()
    windows = [lzw(text[at : at + window]) for at in range(0, len(text), window)]
    first = 92 + 4 * (len(windows) + 1)
    offsets = np.cumsum([first, *(len(data) for data in windows)]).tolist()
    head = b"EC02".ljust(84, b"\0") + struct.pack(">II", window, len(windows))
    return head + struct.pack(f">{len(offsets)}I", *offsets) + b"".join(windows)
