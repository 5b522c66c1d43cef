"""Writing an artifact: it appears at its target complete, or not at all.

Everything is written below a private, locked wrapper directory beside the target, made durable, and put in
place by one rename. Two builders of one target work apart, each in its own wrapper: rename(2) refuses a
target that another has filled meanwhile (without `force`) or swaps it whole (with it: the last one stays).
They take turns, by a lock on the parent directory, only to judge what is at the target and to swap it.

This file knows what a manifest must say about files; it knows nothing of graphs or tensors.
"""

import contextlib
import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from deepinfer.artifacts import atomic
from deepinfer.artifacts.canonical import artifact_id_of, canonical_bytes
from deepinfer.artifacts.certificate import report_file
from deepinfer.artifacts.files import CHUNK_BYTES, open_parent, split_path
from deepinfer.artifacts.replaceable import check_replaceable
from deepinfer.artifacts.schema import MANIFEST_NAME, REPORTS_DIRECTORY, FileEntry, Manifest
from deepinfer.artifacts.validation import check_case_clash, decode_manifest, graph_order
from deepinfer.errors import ArtifactWriteError

_CONTENT = "artifact"  # the directory inside the wrapper that becomes the target


class ArtifactWriter:
    """Context manager that builds one artifact; leaving it without `finish` leaves nothing behind.

    `target` is the artifact's directory; its parent must exist. A target that is not an empty directory is
    refused; with `force`, one that holds an artifact and nothing else is replaced. Raises ArtifactWriteError.
    """

    def __init__(self, target: Path, *, force: bool = False) -> None:
        self._parent, self._name = atomic.lexical_parent(target)
        self._target, self._force = target, force
        self._entries: dict[str, FileEntry] = {}
        self._directories: set[str] = set()
        self._stack = contextlib.ExitStack()
        self._content_fd = -1

    def __enter__(self) -> "ArtifactWriter":
        if self._name in ("", ".."):
            raise ArtifactWriteError("not the name of a new directory", where=str(self._target))
        with self._reported(str(self._target)), contextlib.ExitStack() as stack:
            self._parent_fd = os.open(self._parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, self._parent_fd)
            with atomic.locked(self._parent_fd):
                check_replaceable(self._parent_fd, self._name, force=self._force, where=str(self._target))
            atomic.remove_stale_wrappers(self._parent_fd)
            self._wrapper, self._wrapper_fd = atomic.create_wrapper(self._parent_fd)
            stack.callback(os.close, self._wrapper_fd)
            stack.callback(atomic.remove_tree, self._parent_fd, self._wrapper)
            os.mkdir(_CONTENT, dir_fd=self._wrapper_fd)  # its mode follows the umask; the wrapper hides it
            self._content_fd = os.open(
                _CONTENT, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._wrapper_fd
            )
            stack.callback(os.close, self._content_fd)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._content_fd = -1
        self._stack.close()

    def add_file(self, path: str, data: bytes) -> FileEntry:
        """Write one file from memory and return its entry."""
        with self.create_file(path) as file:
            file.write(data)
        return self._entries[path]

    def add_file_from(self, path: str, source: Path) -> FileEntry:
        """Copy one file in; the recorded hash is of the bytes that were written. `source` may be a link."""
        try:
            opened = source.open("rb")
        except OSError as error:
            raise ArtifactWriteError(f"cannot be read: {error.strerror}", where=str(source)) from error
        with opened, self.create_file(path) as file:
            if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
                raise ArtifactWriteError("not a regular file", where=str(source))
            while chunk := opened.read(CHUNK_BYTES):
                file.write(chunk)
        return self._entries[path]

    @contextlib.contextmanager
    def create_file(self, path: str) -> Iterator["FileInProgress"]:
        """Write one file piece by piece: `with writer.create_file(path) as file: file.write(data)`.

        The file counts only when the block ends without an exception; its name cannot be used again.
        """
        assert self._content_fd >= 0, "the writer is not open"
        components = split_path(path)
        if path == MANIFEST_NAME or components[0] == REPORTS_DIRECTORY:
            raise ArtifactWriteError("is written by the format itself", where=path)
        if path in self._entries:
            raise ArtifactWriteError("was already added", where=path)
        check_case_clash([*self._entries, path])
        with self._reported(path):
            self._make_directories(components[:-1])
            with open_parent(self._content_fd, components) as directory_fd:
                descriptor = atomic.create_file(directory_fd, components[-1])
                try:
                    file = FileInProgress(descriptor)
                    yield file
                    os.fsync(descriptor)
                except BaseException:
                    os.unlink(components[-1], dir_fd=directory_fd)
                    raise
                finally:
                    os.close(descriptor)
        self._entries[path] = FileEntry(path=path, bytes=file.size, sha256=file.hexdigest())

    def finish(self, manifest: Manifest, reports: Mapping[str, dict[str, Any]] | None = None) -> str:
        """Complete the manifest with the files that were added, put the artifact in place, return its id.

        `manifest.files` must be empty; graphs are sorted here. `reports` are sidecars to put beside the
        files, content by kind: they appear with the artifact, and its id does not depend on them. Raises
        ArtifactFormatError for a manifest that no reader would take, ArtifactWriteError when the target
        cannot be written.
        """
        assert self._content_fd >= 0, "the writer is not open"
        assert not manifest.files, "the writer fills in the files"
        entries = tuple(self._entries[path] for path in sorted(self._entries))
        graphs = tuple(sorted(manifest.graphs, key=graph_order))
        data = canonical_bytes(msgspec.structs.replace(manifest, files=entries, graphs=graphs))
        decode_manifest(data)  # types and rules: nothing is written that a reader would refuse
        artifact_id = artifact_id_of(data)
        sidecars = dict(report_file(artifact_id, kind, content) for kind, content in (reports or {}).items())
        with self._reported(str(self._target)):
            if sidecars:
                self._make_directories((REPORTS_DIRECTORY,))
            for name, content in sidecars.items():
                self._write_whole((REPORTS_DIRECTORY, name), content)
            self._write_whole((MANIFEST_NAME,), data)
            for directory in sorted(self._directories, reverse=True):
                with open_parent(self._content_fd, (*directory.split("/"), ".")) as directory_fd:
                    os.fsync(directory_fd)
            os.fsync(self._content_fd)
            with atomic.locked(self._parent_fd):
                self._put_in_place()
        self._content_fd = -1
        self._sync_parent()
        return artifact_id

    def _write_whole(self, components: tuple[str, ...], data: bytes) -> None:
        """Write a file that the manifest does not list."""
        with open_parent(self._content_fd, components) as directory_fd:
            descriptor = atomic.create_file(directory_fd, components[-1])
        try:
            atomic.write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _make_directories(self, components: tuple[str, ...]) -> None:
        for depth in range(1, len(components) + 1):
            directory = "/".join(components[:depth])
            if directory not in self._directories:
                with open_parent(self._content_fd, components[:depth]) as above_fd:
                    os.mkdir(components[depth - 1], dir_fd=above_fd)
                self._directories.add(directory)

    def _put_in_place(self) -> None:
        try:
            # atomic: takes an absent name or an empty directory, refuses anything else
            os.rename(_CONTENT, self._name, src_dir_fd=self._wrapper_fd, dst_dir_fd=self._parent_fd)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        else:
            return
        check_replaceable(self._parent_fd, self._name, force=self._force, where=str(self._target))
        if not atomic.exchange(self._wrapper_fd, _CONTENT, self._parent_fd, self._name):
            self._replace_by_two_renames()
            return
        try:  # what came out is about to be deleted: judge it, not what was there before the swap
            check_replaceable(self._wrapper_fd, _CONTENT, force=True, where=str(self._target))
        except BaseException:
            atomic.exchange(self._wrapper_fd, _CONTENT, self._parent_fd, self._name)
            raise

    def _replace_by_two_renames(self) -> None:
        """Where names cannot be swapped: a crash between the renames leaves the old artifact set aside.

        Its name there is not one that cleaning up deletes.
        """
        aside = f"{self._name}.old-{secrets.token_hex(8)}"
        os.rename(self._name, aside, src_dir_fd=self._parent_fd, dst_dir_fd=self._parent_fd)
        try:
            check_replaceable(self._parent_fd, aside, force=True, where=str(self._target))
            os.rename(_CONTENT, self._name, src_dir_fd=self._wrapper_fd, dst_dir_fd=self._parent_fd)
        except BaseException:
            with contextlib.suppress(OSError):  # another builder may have taken the name: then both stay
                os.rename(aside, self._name, src_dir_fd=self._parent_fd, dst_dir_fd=self._parent_fd)
            raise
        atomic.remove_tree(self._parent_fd, aside)

    def _sync_parent(self) -> None:
        try:
            os.fsync(self._parent_fd)
        except OSError as error:
            raise ArtifactWriteError(
                f"complete, but its name may not survive a power cut: {error.strerror}",
                where=str(self._target),
                action="check the file system, then rebuild with --force",
            ) from error

    @contextlib.contextmanager
    def _reported(self, where: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            action = "choose a directory that exists and that you may write to"
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                action = "free some space"
            raise ArtifactWriteError(
                f"cannot be written: {error.strerror or error}", where=where, action=action
            ) from error


class FileInProgress:
    """A file being written and hashed at the same time."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._digest, self.size = descriptor, hashlib.sha256(), 0

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append all of `data`, which may be any contiguous buffer; return its size in bytes."""
        view = memoryview(data).cast("B")
        atomic.write_all(self._descriptor, view)
        self._digest.update(view)
        self.size += len(view)
        return len(view)

    def hexdigest(self) -> str:
        """SHA-256 of what was written so far."""
        return self._digest.hexdigest()
