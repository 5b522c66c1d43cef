"""A cache of build results by key, so that an interrupted or changed build repeats only what is missing.

An entry is a directory of files below a private root (0700, this user's), put in place by one rename and
verified by hash whenever it is taken out: a damaged entry is a miss and is removed. The least recently used
entries go when the size limit is passed. The key is a SHA-256 over everything that determines the files; how
it is computed is the builder's affair.
"""

import contextlib
import errno
import hashlib
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from deepinfer.artifacts import atomic
from deepinfer.artifacts.canonical import MAX_JSON_BYTES, canonical_bytes, decode_struct
from deepinfer.artifacts.files import is_plain_name, list_names, open_regular_file, read_descriptor
from deepinfer.artifacts.private import open_private_directory
from deepinfer.artifacts.schema import FileEntry, Record, Sha256
from deepinfer.errors import BuildError, DeepInferError

DEFAULT_MAX_BYTES = 4 * 1024**3
_INDEX_NAME = "entry.json"
_ENTRY = "entry"
_KEY = re.compile(r"[0-9a-f]{64}")
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class _Index(Record, frozen=True, kw_only=True):
    key: Sha256
    files: tuple[FileEntry, ...]


class _Entry(NamedTuple):
    last_used_ns: int
    key: str
    size_bytes: int


class BuildCache:
    """Files by key, below `root`. Raises BuildError when the root is not private to this user.

    Several builders may share one root: entries appear whole, and the first one put under a key stays.
    """

    def __init__(self, root: Path, *, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self.root, self.max_bytes = root, max_bytes
        with self._opened() as root_fd:
            atomic.remove_stale_wrappers(root_fd)

    def get(self, key: str) -> dict[str, bytes] | None:
        """The files put under `key`, by name, or None; what is returned is what was hashed."""
        _check_key(key)
        with self._opened() as root_fd:
            try:
                entry_fd = os.open(key, _DIRECTORY_FLAGS, dir_fd=root_fd)
            except FileNotFoundError:
                return None
            except OSError:
                _remove(root_fd, key)
                return None
            try:
                files = _read_entry(entry_fd, key)
                now = time.time_ns()
                os.utime(entry_fd, ns=(now, now))
            except (DeepInferError, OSError):
                # damaged, or being pruned by another builder at this moment: a miss either way
                _remove(root_fd, key)
                return None
            finally:
                os.close(entry_fd)
            return files

    def put(self, key: str, files: Mapping[str, bytes]) -> None:
        """Store plain-named files under `key`, then prune; an entry larger than the limit is not stored.

        Raises BuildError when it cannot be written; nothing is left then.
        """
        _check_key(key)
        assert all(is_plain_name(name) and name != _INDEX_NAME for name in files), sorted(files)
        if sum(len(data) for data in files.values()) > self.max_bytes:
            return
        with self._opened() as root_fd:
            wrapper, wrapper_fd = atomic.create_wrapper(root_fd)
            try:
                _write_entry(wrapper_fd, key, files)
                try:
                    os.rename(_ENTRY, key, src_dir_fd=wrapper_fd, dst_dir_fd=root_fd)
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                        raise
            finally:
                os.close(wrapper_fd)
                atomic.remove_tree(root_fd, wrapper)
            _prune(root_fd, self.max_bytes, keep=key)

    def clear(self) -> None:
        """Remove every entry."""
        with self._opened() as root_fd:
            for entry in _entries(root_fd):
                _remove(root_fd, entry.key)

    @property
    def size_bytes(self) -> int:
        """Bytes in all entries."""
        with self._opened() as root_fd:
            return sum(entry.size_bytes for entry in _entries(root_fd))

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        root_fd = open_private_directory(self.root, BuildError, create=True)
        assert root_fd is not None
        try:
            yield root_fd
        except OSError as error:
            raise BuildError(
                f"the build cache cannot be used: {error.strerror}",
                where=str(self.root),
                action="check the space and the permissions there, or name another directory",
            ) from error
        finally:
            os.close(root_fd)


def _check_key(key: str) -> None:
    assert _KEY.fullmatch(key), f"a key is 64 hex digits, got {key!r}"


def _read_entry(entry_fd: int, key: str) -> dict[str, bytes]:
    index = decode_struct(_read(entry_fd, _INDEX_NAME, MAX_JSON_BYTES), _Index, where=_INDEX_NAME)
    if index.key != key:
        raise BuildError("an entry lies under another key", where=key)
    files = {}
    for entry in index.files:
        data = _read(entry_fd, entry.path, entry.bytes)
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            raise BuildError("an entry is damaged", where=f"{key}/{entry.path}")
        files[entry.path] = data
    return files


def _read(directory_fd: int, name: str, limit: int) -> bytes:
    descriptor = open_regular_file(directory_fd, name)
    try:
        return read_descriptor(descriptor, limit, where=name)
    finally:
        os.close(descriptor)


def _write_entry(wrapper_fd: int, key: str, files: Mapping[str, bytes]) -> None:
    """Not made durable: after a power cut the hashes do not match, and the entry is a miss."""
    os.mkdir(_ENTRY, 0o700, dir_fd=wrapper_fd)
    entry_fd = os.open(_ENTRY, _DIRECTORY_FLAGS, dir_fd=wrapper_fd)
    try:
        index = _Index(
            key=key,
            files=tuple(
                FileEntry(path=name, bytes=len(files[name]), sha256=hashlib.sha256(files[name]).hexdigest())
                for name in sorted(files)
            ),
        )
        for name, data in {**files, _INDEX_NAME: canonical_bytes(index)}.items():
            descriptor = atomic.create_file(entry_fd, name, 0o600)
            try:
                atomic.write_all(descriptor, data)
            finally:
                os.close(descriptor)
    finally:
        os.close(entry_fd)


def _entries(root_fd: int) -> list[_Entry]:
    """All entries, the least recently used first."""
    found = []
    for name in list_names(root_fd):
        if not _KEY.fullmatch(name):
            continue
        with contextlib.suppress(OSError):  # another builder may prune it at this moment
            entry_fd = os.open(name, _DIRECTORY_FLAGS, dir_fd=root_fd)
            try:
                with os.scandir(entry_fd) as files:
                    size = sum(file.stat(follow_symlinks=False).st_size for file in files)
                found.append(_Entry(os.fstat(entry_fd).st_mtime_ns, name, size))
            finally:
                os.close(entry_fd)
    return sorted(found)


def _prune(root_fd: int, max_bytes: int, *, keep: str) -> None:
    entries = _entries(root_fd)
    total = sum(entry.size_bytes for entry in entries)
    for entry in entries:
        if total <= max_bytes:
            return
        if entry.key != keep:
            _remove(root_fd, entry.key)
            total -= entry.size_bytes


def _remove(root_fd: int, key: str) -> None:
    atomic.remove_tree(root_fd, key)
    with contextlib.suppress(OSError):  # it was not a directory
        os.unlink(key, dir_fd=root_fd)
