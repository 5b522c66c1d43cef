"""May this directory be replaced by a build? Only an empty one, or one that is an artifact and nothing else.

A damaged artifact may be replaced too, as long as every file in it is one that its manifest names: what a
user put beside them is never deleted. This file judges names only; it hashes nothing.
"""

import os
import stat

from deepinfer.artifacts.atomic import is_temporary_file
from deepinfer.artifacts.canonical import MAX_JSON_BYTES, parse_json
from deepinfer.artifacts.files import list_names, open_regular_file, read_descriptor
from deepinfer.artifacts.schema import ARTIFACT_KIND, MANIFEST_NAME, REPORTS_DIRECTORY
from deepinfer.errors import ArtifactWriteError, DeepInferError

_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_DEPTH = 4


def check_replaceable(parent_fd: int, name: str, *, force: bool, where: str) -> None:
    """Raise ArtifactWriteError unless `name` is absent, empty, or with `force` a replaceable artifact."""
    try:
        info = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
    except FileNotFoundError:
        return
    if stat.S_ISLNK(info.st_mode):
        raise _refused("a symbolic link, which is not followed", where, "give the directory itself")
    if not stat.S_ISDIR(info.st_mode):
        raise _refused("exists and is not a directory", where, "choose another output directory")
    directory_fd = os.open(name, _DIRECTORY_FLAGS, dir_fd=parent_fd)
    try:
        found = list_names(directory_fd)
        if not found:
            return
        if not force:
            raise _refused("exists and is not empty", where, "choose another directory, or add --force")
        expected = _expected_files(directory_fd, where)
        _check_only(directory_fd, "", expected, where)
    finally:
        os.close(directory_fd)


def _expected_files(directory_fd: int, where: str) -> set[str]:
    try:
        descriptor = open_regular_file(directory_fd, MANIFEST_NAME)
        try:
            value = parse_json(read_descriptor(descriptor, MAX_JSON_BYTES, where=where), where=where)
        finally:
            os.close(descriptor)
    except DeepInferError:
        value = None
    if not isinstance(value, dict) or value.get("kind") != ARTIFACT_KIND:
        raise _refused(
            "not an artifact, so it is not replaced even with --force",
            where,
            "remove it yourself, or choose another",
        )
    files = value.get("files")
    entries = files if isinstance(files, list) else []
    paths = (entry.get("path") for entry in entries if isinstance(entry, dict))
    return {path for path in paths if isinstance(path, str)} | {MANIFEST_NAME}


def _check_only(directory_fd: int, prefix: str, expected: set[str], where: str) -> None:
    for name in list_names(directory_fd):
        path = prefix + name
        if stat.S_ISDIR(os.stat(name, dir_fd=directory_fd, follow_symlinks=False).st_mode):
            if path.count("/") >= _MAX_DEPTH:
                raise _unrelated(path, where)
            below_fd = os.open(name, _DIRECTORY_FLAGS, dir_fd=directory_fd)
            try:
                _check_only(below_fd, f"{path}/", expected, where)
            finally:
                os.close(below_fd)
        elif path not in expected and not _is_report(path):
            raise _unrelated(path, where)


def _is_report(path: str) -> bool:
    folder, _, name = path.partition("/")
    return (
        folder == REPORTS_DIRECTORY
        and "/" not in name
        and (name.endswith(".json") or is_temporary_file(name))
    )


def _unrelated(path: str, where: str) -> ArtifactWriteError:
    return _refused(
        f"holds {ascii(path[:200])}, which is no part of the artifact",
        where,
        "move that elsewhere, or choose another",
    )


def _refused(what: str, where: str, action: str) -> ArtifactWriteError:
    return ArtifactWriteError(what, where=where, action=action)
