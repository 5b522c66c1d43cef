"""Opening and hashing files of a directory that may be hostile.

Paths are relative, made of plain names, and walked one component at a time below a directory descriptor
without following links; what was opened is judged on the open descriptor, so nothing can be swapped between
the check and the use. This file knows nothing of manifests.
"""

import errno
import hashlib
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from deepinfer.errors import ArtifactCorruptError, ArtifactFormatError

MAX_PATH_COMPONENTS = 4
CHUNK_BYTES = 1024 * 1024

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_COPY_AGAIN = "copy the artifact again or rebuild it"
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# O_NONBLOCK: opening a FIFO must fail the type check, not wait for a writer
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class FileStamp(NamedTuple):
    """Which bytes were hashed: the same stamp on another descriptor means that they are unchanged."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


def is_plain_name(name: str) -> bool:
    """True for 1 to 100 characters of `[A-Za-z0-9._-]` without a leading dot."""
    return _NAME.fullmatch(name) is not None


def split_path(path: str) -> tuple[str, ...]:
    """The components of a relative path of plain names; anything else is an ArtifactFormatError."""
    components = tuple(path.split("/"))
    if len(components) > MAX_PATH_COMPONENTS or not all(is_plain_name(name) for name in components):
        raise ArtifactFormatError(
            "not a path that an artifact may hold (names are 1 to 100 of A-Z a-z 0-9 . _ - without a leading "
            f"dot, at most {MAX_PATH_COMPONENTS} deep)",
            where=ascii(path[:200]),
        )
    return components


def open_directory(path: Path) -> int:
    """The descriptor of an artifact's root; a link at the root itself is the user's choice."""
    try:
        return os.open(path, _DIRECTORY_FLAGS)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ArtifactFormatError(
            f"cannot open the directory: {reason}", where=str(path), action="give the path of an artifact"
        ) from error


@contextmanager
def open_parent(root_fd: int, components: tuple[str, ...]) -> Iterator[int]:
    """The descriptor of the directory that holds the last component, walked without following links.

    Raises OSError as the kernel does.
    """
    current = os.dup(root_fd)
    try:
        for name in components[:-1]:
            below = os.open(name, _DIRECTORY_FLAGS | os.O_NOFOLLOW, dir_fd=current)
            os.close(current)
            current = below
        yield current
    finally:
        os.close(current)


def open_regular_file(root_fd: int, path: str) -> int:
    """Open `path` below the directory for reading and return the descriptor.

    Raises ArtifactFormatError for a path that may not be, ArtifactCorruptError for a missing file, a link
    anywhere on the way, a hard link, or anything that is not a regular file.
    """
    components = split_path(path)
    try:
        with open_parent(root_fd, components) as parent_fd:
            # a device is not even opened; the descriptor below is judged again
            _check_regular(os.stat(components[-1], dir_fd=parent_fd, follow_symlinks=False), path)
            descriptor = os.open(components[-1], _FILE_FLAGS, dir_fd=parent_fd)
    except OSError as error:
        raise _refusal(error, path) from error
    try:
        _check_regular(os.fstat(descriptor), path)
    except ArtifactCorruptError:
        os.close(descriptor)
        raise
    return descriptor


def list_names(directory_fd: int) -> list[str]:
    """Names in an open directory, sorted."""
    with os.scandir(directory_fd) as entries:
        return sorted(entry.name for entry in entries)


def stamp_of(descriptor: int) -> FileStamp:
    """The stamp of an open file."""
    info = os.fstat(descriptor)
    return FileStamp(info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


def hash_descriptor(descriptor: int) -> tuple[str, int]:
    """SHA-256 (hex) and number of bytes read from the start; the file position is left alone."""
    digest, position = hashlib.sha256(), 0
    while chunk := os.pread(descriptor, CHUNK_BYTES, position):
        digest.update(chunk)
        position += len(chunk)
    return digest.hexdigest(), position


def read_descriptor(descriptor: int, limit: int, *, where: str) -> bytes:
    """All bytes of an open file; more than `limit` is an ArtifactCorruptError, found before they are read."""
    size = os.fstat(descriptor).st_size
    chunks: list[bytes] = []
    position = 0
    while size <= limit and position <= limit:
        chunk = os.pread(descriptor, CHUNK_BYTES, position)
        if not chunk:
            return b"".join(chunks)
        chunks.append(chunk)
        position += len(chunk)
    raise ArtifactCorruptError(f"larger than the limit of {limit} bytes", where=where, action=_COPY_AGAIN)


def _check_regular(info: os.stat_result, path: str) -> None:
    if stat.S_ISLNK(info.st_mode):
        raise ArtifactCorruptError("a symbolic link, which is not followed", where=path, action=_COPY_AGAIN)
    if not stat.S_ISREG(info.st_mode):
        raise ArtifactCorruptError("not a regular file", where=path, action=_COPY_AGAIN)
    if info.st_nlink != 1:
        raise ArtifactCorruptError(
            f"has {info.st_nlink} hard links, so another name can change it", where=path, action=_COPY_AGAIN
        )


def _refusal(error: OSError, path: str) -> ArtifactCorruptError:
    if error.errno == errno.ENOENT:
        return ArtifactCorruptError("missing", where=path, action=_COPY_AGAIN)
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return ArtifactCorruptError(
            "not a regular file below plain directories", where=path, action=_COPY_AGAIN
        )
    return ArtifactCorruptError(f"cannot be opened: {error.strerror}", where=path, action=_COPY_AGAIN)
