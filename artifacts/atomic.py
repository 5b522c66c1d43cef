"""Directories and files that appear complete or not at all, and cleaning up after builders that died.

A builder works in a wrapper directory `.deepinfer-build-<32 hex digits>` beside its target and holds a lock
on it (flock: the kernel drops it when the process dies, so no process id can be mistaken). Whoever finds such
a wrapper of the same user with its lock free may delete it. This file knows nothing of manifests.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

WRAPPER_PREFIX = ".deepinfer-build-"
_WRAPPER_NAME = re.compile(re.escape(WRAPPER_PREFIX) + r"[0-9a-f]{32}")
_TEMPORARY_NAME = re.compile(r"[A-Za-z0-9._-]+\.[0-9a-f]{32}\.tmp")
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_RENAME_EXCHANGE = 2  # linux/fs.h
_NOT_SUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM)


def create_wrapper(parent_fd: int) -> tuple[str, int]:
    """Make and lock a private (0700) working directory below `parent_fd`; return its name and descriptor."""
    for _ in range(100):
        name = WRAPPER_PREFIX + secrets.token_hex(16)
        os.mkdir(name, 0o700, dir_fd=parent_fd)
        try:
            wrapper_fd = os.open(name, _DIRECTORY_FLAGS, dir_fd=parent_fd)
        except FileNotFoundError:
            continue  # a cleaner saw it before it was locked
        except OSError:
            os.rmdir(name, dir_fd=parent_fd)
            raise
        if try_lock(wrapper_fd) and same_directory(parent_fd, name, wrapper_fd):
            return name, wrapper_fd
        os.close(wrapper_fd)
    raise OSError(errno.EAGAIN, "other builders keep removing the working directory")


def remove_stale_wrappers(parent_fd: int) -> list[str]:
    """Delete the wrappers of dead builders of this user below `parent_fd`; return their names."""
    removed = []
    with os.scandir(parent_fd) as entries:
        names = [entry.name for entry in entries if _WRAPPER_NAME.fullmatch(entry.name)]
    for name in names:
        try:
            wrapper_fd = os.open(name, _DIRECTORY_FLAGS, dir_fd=parent_fd)
        except OSError:
            continue  # already gone, or a link: not ours
        try:
            mine = os.fstat(wrapper_fd).st_uid == os.geteuid()
            if mine and try_lock(wrapper_fd) and same_directory(parent_fd, name, wrapper_fd):
                remove_tree(parent_fd, name)
                removed.append(name)
        finally:
            os.close(wrapper_fd)
    return removed


def try_lock(descriptor: int) -> bool:
    """Take the exclusive lock of an open file or directory if nobody holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def same_directory(parent_fd: int, name: str, descriptor: int) -> bool:
    """True while `name` still names the directory that the descriptor is open on."""
    try:
        named = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(descriptor))


def remove_tree(parent_fd: int, name: str) -> None:
    """Delete a directory below `parent_fd` without following links; what cannot be deleted stays."""
    shutil.rmtree(name, ignore_errors=True, dir_fd=parent_fd)


def create_file(directory_fd: int, name: str, mode: int = 0o666) -> int:
    """A new file for writing; one that exists, or a link in its place, is an error."""
    return os.open(name, _CREATE_FLAGS, mode, dir_fd=directory_fd)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write every byte, however little the kernel takes at a time."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def sync_directory(parent_fd: int, name: str) -> None:
    """Make the entries of a directory durable."""
    descriptor = os.open(name, _DIRECTORY_FLAGS, dir_fd=parent_fd)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(directory_fd: int) -> Iterator[None]:
    """Hold the lock of a directory: one process at a time replaces files in it."""
    fcntl.flock(directory_fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(directory_fd, fcntl.LOCK_UN)


def replace_file(directory_fd: int, name: str, data: bytes, *, mode: int = 0o666) -> None:
    """Write a file that appears complete, replacing one of the same name; nothing is left on failure.

    The caller holds `locked(directory_fd)`, so every temporary file found is of a writer that died.
    """
    _remove_temporary_files(directory_fd)
    temporary = f"{name}.{secrets.token_hex(16)}.tmp"
    try:
        descriptor = create_file(directory_fd, temporary, mode)
        try:
            write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, name, src_dir_fd=directory_fd, dst_dir_fd=directory_fd)
        os.fsync(directory_fd)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=directory_fd)
        raise


def is_temporary_file(name: str) -> bool:
    """True for the names that `replace_file` gives its temporary files."""
    return _TEMPORARY_NAME.fullmatch(name) is not None


def _remove_temporary_files(directory_fd: int) -> None:
    with os.scandir(directory_fd) as entries:
        names = [entry.name for entry in entries if is_temporary_file(entry.name)]
    for name in names:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=directory_fd)


def exchange(first_fd: int, first: str, second_fd: int, second: str) -> bool:
    """Swap two names in one atomic step; False where the kernel or the file system cannot."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    result = function(first_fd, os.fsencode(first), second_fd, os.fsencode(second), _RENAME_EXCHANGE)
    if result == 0:
        return True
    code = ctypes.get_errno()
    if code in _NOT_SUPPORTED:
        return False
    raise OSError(code, os.strerror(code), second)


def lexical_parent(target: Path) -> tuple[Path, str]:
    """The directory that holds `target` and its name in it, without following a link at the target."""
    absolute = target.absolute()
    return absolute.parent, absolute.name
