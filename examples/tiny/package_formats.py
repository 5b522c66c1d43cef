"""Readers of the file formats in which the corpus packages keep their texts.

Owns three formats: Debian packages, R's lazy-load databases of character vectors, and the block-compressed
text store of the Bible Retrieval System. Knows nothing of what the texts say. Nothing is unpacked to disk or
executed.
"""

import gzip
import io
import struct
import tarfile
import zlib

_AR_MAGIC = b"!<arch>\n"
_AR_HEADER = 60


class FormatError(ValueError):
    """A file is not what its name says."""


# ---- Debian packages --------------------------------------------------------------------------------------


def read_deb(package: bytes, paths: list[str]) -> dict[str, bytes]:
    """Contents of the named files of a binary package; paths are relative to the root. Raises FormatError."""
    if not package.startswith(_AR_MAGIC):
        raise FormatError("not a Debian package")
    position = len(_AR_MAGIC)
    while position + _AR_HEADER <= len(package):
        header = package[position : position + _AR_HEADER]
        name, size = header[:16].decode("ascii").strip().rstrip("/"), int(header[48:58])
        position += _AR_HEADER
        if name.startswith("data.tar"):
            return _read_tar(package[position : position + size], paths)
        position += size + size % 2
    raise FormatError("the package has no data archive")


def _read_tar(archive: bytes, paths: list[str]) -> dict[str, bytes]:
    found = {}
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:*") as tar:
        for member in tar:
            path = member.name.removeprefix("./")
            if path in paths and member.isfile():
                file = tar.extractfile(member)
                found[path] = file.read() if file else b""
    missing = sorted(set(paths) - set(found))
    if missing:
        raise FormatError(f"the package lacks {', '.join(missing)}")
    return found


# ---- R's serialisation: enough of it for named lists of integers and for character vectors ----------------


class _RReader:
    """Reads one value of R's XDR serialisation, version 2 or 3."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._symbols: list[str] = []

    def read(self) -> object:
        if self._bytes(2) != b"X\n":
            raise FormatError("not a serialised R value")
        version, _, _ = self._integer(), self._integer(), self._integer()
        if version == 3:
            self._bytes(self._integer())  # the native encoding
        return self._item()

    def _bytes(self, count: int) -> bytes:
        if count < 0 or self._at + count > len(self._data):
            raise FormatError("a serialised R value ends early")
        self._at += count
        return self._data[self._at - count : self._at]

    def _integer(self) -> int:
        return int.from_bytes(self._bytes(4), "big", signed=True)

    def _item(self) -> object:
        flags = self._integer()
        kind = flags & 0xFF
        if kind == 254:  # nil
            return None
        if kind == 1:  # a symbol, numbered for later references
            self._symbols.append(str(self._item()))
            return self._symbols[-1]
        if kind == 255:
            return self._symbols[(flags >> 8) - 1]
        if kind == 2:
            return self._pairs(flags)
        if kind == 9:  # one string; length -1 is a missing one
            length = self._integer()
            return None if length < 0 else self._bytes(length).decode("utf-8")
        count = self._integer()
        if kind in (10, 13):  # logicals, integers
            values: list = list(struct.unpack(f">{count}i", self._bytes(4 * count)))
        elif kind in (16, 19):  # strings, a list
            values = [self._item() for _ in range(count)]
        else:
            raise FormatError(f"R values of kind {kind} are not read here")
        attributes = self._item() if flags & 0x200 else None
        if kind == 19 and isinstance(attributes, dict) and "names" in attributes:
            return dict(zip(attributes["names"], values, strict=True))
        return values

    def _pairs(self, flags: int) -> dict[str, object]:
        """A chain of tagged cells; a cell's flags say whether attributes and a tag come before its value."""
        pairs: dict[str, object] = {}
        while flags & 0xFF == 2:
            if flags & 0x200:
                self._item()
            tag = str(self._item()) if flags & 0x400 else ""
            pairs[tag] = self._item()
            flags = self._integer()
        if flags & 0xFF != 254:
            raise FormatError("a chain of R cells ends in something else")
        return pairs


def read_r_database(index: bytes, database: bytes) -> dict[str, list[str]]:
    """Character vectors of a lazy-load database, by name: `index` is the .rdx file, `database` the .rdb file.

    Each entry of the database is a length (4 bytes, big-endian) and a zlib stream. Raises FormatError.
    """
    table = _RReader(gzip.decompress(index)).read()
    if not isinstance(table, dict) or not isinstance(table.get("variables"), dict):
        raise FormatError("the index names no variables")
    vectors = {}
    for name, (offset, length) in table["variables"].items():
        value = _RReader(zlib.decompress(database[offset + 4 : offset + length])).read()
        if not isinstance(value, list) or any(not isinstance(line, str) for line in value):
            raise FormatError(f"{name} is not a vector of strings")
        vectors[name] = value
    return vectors


# ---- Bible Retrieval System -------------------------------------------------------------------------------

_CLEAR = 256
_MAX_BITS = 16
_WINDOW_TABLE = 84  # file offset of: window size, number of windows, then the offsets of the windows


def decompress_lzw(data: bytes) -> bytes:
    """Undo Unix `compress` in block mode with codes of 9 to 16 bits; `data` has no header.

    Codes are packed from the low bit up, in groups of eight; a new width or a clear code begins a new group.
    """
    table = [bytes([value]) for value in range(256)] + [b""]
    parts: list[bytes] = []
    bits, position, group, previous = 9, 0, 0, b""
    while position + bits <= 8 * len(data):
        word = int.from_bytes(data[position >> 3 : (position >> 3) + 4], "little")
        code = (word >> (position & 7)) & ((1 << bits) - 1)
        position += bits
        if code == _CLEAR:
            position = group = _next_group(position, group, bits)
            del table[_CLEAR + 1 :]
            bits, previous = 9, b""
            continue
        if code > len(table) or (code == len(table) and not previous):
            raise FormatError("a compressed window holds an impossible code")
        entry = table[code] if code < len(table) else previous + previous[:1]
        if previous and len(table) < 1 << _MAX_BITS:
            table.append(previous + entry[:1])
        parts.append(entry)
        previous = entry
        if len(table) == 1 << bits and bits < _MAX_BITS:
            position = group = _next_group(position, group, bits)
            bits += 1
    return b"".join(parts)


def _next_group(position: int, group: int, bits: int) -> int:
    return group - (group - position) // (8 * bits) * (8 * bits)


def read_verses(store: bytes) -> list[tuple[str, str]]:
    """Verses of a text store as (reference, text), for example ("Ge1:1", "In the beginning ...").

    Raises FormatError.
    """
    if not store.startswith(b"EC02"):
        raise FormatError("not a text store of the Bible Retrieval System")
    window_bytes, num_windows = struct.unpack_from(">II", store, _WINDOW_TABLE)
    offsets = struct.unpack_from(f">{num_windows + 1}I", store, _WINDOW_TABLE + 8)
    windows = [decompress_lzw(store[a:b]) for a, b in zip(offsets, offsets[1:], strict=False)]
    if any(len(window) != window_bytes for window in windows[:-1]):
        raise FormatError("a window of the text store has the wrong size")
    lines = b"".join(windows).decode("ascii").splitlines()[1:]  # the first line is a title
    return [(reference, text) for reference, _, text in (line.partition(" ") for line in lines)]
