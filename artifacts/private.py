"""Directories and files that belong to one user alone: the trust store and the build cache live in such.

A directory that another user could write to, or could have made, is refused rather than repaired.
"""

import os
import stat
from pathlib import Path

from deepinfer.errors import DeepInferError

_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def open_private_directory(path: Path, error_class: type[DeepInferError], *, create: bool) -> int | None:
    """Descriptor of a 0700 directory of this user; None when it is absent and not to be created.

    Raises `error_class` for a link, a foreign owner or another mode.
    """
    try:
        if create and not os.path.lexists(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(path, _DIRECTORY_FLAGS)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise error_class(
            f"not a directory of its own that can be used: {error.strerror}",
            where=str(path),
            action="remove it, or name another directory",
        ) from error
    problem = _problem(os.fstat(descriptor), 0o700)
    if problem:
        os.close(descriptor)
        raise error_class(problem, where=str(path), action=f"check what is in it, then: chmod 700 {path}")
    return descriptor


def open_private_file(
    directory_fd: int, name: str, error_class: type[DeepInferError], *, where: str
) -> int | None:
    """Descriptor of a 0600 regular file of this user with one name; None when it is absent."""
    try:
        descriptor = os.open(name, _FILE_FLAGS, dir_fd=directory_fd)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise error_class(f"cannot be opened: {error.strerror}", where=where, action="remove it") from error
    info = os.fstat(descriptor)
    problem = _problem(info, 0o600)
    if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1:
        problem = "not a regular file with one name"
    if problem:
        os.close(descriptor)
        raise error_class(problem, where=where, action="check who changed it, then remove it")
    return descriptor


def _problem(info: os.stat_result, mode: int) -> str | None:
    if info.st_uid != os.geteuid():
        return f"belongs to user {info.st_uid}, not to you"
    found = stat.S_IMODE(info.st_mode)
    if found != mode:
        return f"its mode is {found:04o}, not {mode:04o}: others may have changed it"
    return None
