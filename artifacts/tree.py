"""The shape of an artifact's directory: every file that the manifest names, and nothing besides.

Only `reports/` may hold more, and only plain JSON files, whose content is not looked at here. This file reads
names and types; it opens no file.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from deepinfer.artifacts.atomic import is_temporary_file
from deepinfer.artifacts.files import MAX_PATH_COMPONENTS, is_plain_name, list_names
from deepinfer.artifacts.schema import MANIFEST_NAME, REPORTS_DIRECTORY
from deepinfer.artifacts.validation import check_case_clash
from deepinfer.errors import ArtifactCorruptError

_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def check_tree(root_fd: int, expected: set[str]) -> None:
    """Raise ArtifactCorruptError for what is missing, superfluous, or of a name that may not be."""
    found: set[str] = set()
    _walk(root_fd, "", found)
    found.discard(MANIFEST_NAME)
    check_case_clash(sorted(found | {MANIFEST_NAME}))
    empty = sorted(path for path in found if path.endswith("/"))
    extra = sorted(found - expected - set(empty))
    if extra:
        raise _refused("not named by the manifest", extra[0], "remove it, or copy the artifact again")
    missing = sorted(expected - found)
    if missing:
        raise _refused("missing", missing[0], "copy the artifact again or rebuild it")
    if empty:
        raise _refused("an empty directory", empty[0], "remove it")


def report_names(root_fd: int) -> list[str]:
    """Names of the sidecars below `reports/`, sorted; anything that is not a plain JSON file is refused."""
    names: list[str] = []
    if not _is_directory(root_fd, REPORTS_DIRECTORY, REPORTS_DIRECTORY):
        return names
    with _open_below(root_fd, REPORTS_DIRECTORY, REPORTS_DIRECTORY) as directory_fd:
        for name in list_names(directory_fd):
            path = f"{REPORTS_DIRECTORY}/{name}"
            if is_temporary_file(name):
                continue  # a sidecar being written, or what a dead writer left: the next one removes it
            if not is_plain_name(name) or not name.endswith(".json"):
                raise _refused("not the name of a report", ascii(path[:200]), "remove it")
            try:
                info = os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
            except FileNotFoundError:
                continue
            if not stat.S_ISREG(info.st_mode) or info.st_nlink > 1:
                raise _refused("not a plain file of its own", path, "remove it")
            names.append(name)
    return names


def _walk(directory_fd: int, prefix: str, found: set[str]) -> None:
    names = list_names(directory_fd)
    if prefix and not names:
        found.add(prefix)
    for name in names:
        path = prefix + name
        if not is_plain_name(name):
            raise _refused("a name that an artifact may not hold", ascii(path[:200]), "remove it")
        if path == REPORTS_DIRECTORY:
            report_names(directory_fd)
        elif _is_directory(directory_fd, name, path):
            if path.count("/") + 1 >= MAX_PATH_COMPONENTS:
                raise _refused("nested too deeply", path, "remove it")
            with _open_below(directory_fd, name, path) as below_fd:
                _walk(below_fd, f"{path}/", found)
        else:
            found.add(path)


def _is_directory(directory_fd: int, name: str, path: str) -> bool:
    try:
        mode = os.stat(name, dir_fd=directory_fd, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return False
    if path == REPORTS_DIRECTORY and not stat.S_ISDIR(mode):
        raise _refused("not a directory", path, "remove it")
    return stat.S_ISDIR(mode)


@contextmanager
def _open_below(directory_fd: int, name: str, path: str) -> Iterator[int]:
    try:
        below_fd = os.open(name, _DIRECTORY_FLAGS, dir_fd=directory_fd)
    except OSError as error:
        raise _refused(f"cannot be listed: {error.strerror}", path, "check its permissions") from error
    try:
        yield below_fd
    finally:
        os.close(below_fd)


def _refused(what: str, where: str, action: str) -> ArtifactCorruptError:
    return ArtifactCorruptError(what, where=where, action=action)
