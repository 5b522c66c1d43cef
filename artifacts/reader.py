"""Opening an artifact: nothing of it is used before its manifest, its names and its hashes have been checked.

`OpenedArtifact` keeps the root's descriptor, so an artifact that is replaced meanwhile stays the one that was
checked. A file handed out later is the file that was hashed: either its stamp (inode, size, change times) on
the new descriptor is the one recorded, or it is hashed again on that descriptor.

Opening executes nothing and does not ask whether the artifact is trusted: see `trust.py`.
"""

import hashlib
import os
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from deepinfer.artifacts.canonical import MAX_JSON_BYTES, artifact_id_of, decode_struct
from deepinfer.artifacts.files import (
    FileStamp,
    hash_descriptor,
    open_directory,
    open_regular_file,
    read_descriptor,
    stamp_of,
)
from deepinfer.artifacts.safetensors_index import TensorEntry, read_index
from deepinfer.artifacts.schema import (
    KERNEL_TABLE,
    MANIFEST_NAME,
    FileEntry,
    GraphSignature,
    KernelTable,
    Manifest,
    PassReport,
)
from deepinfer.artifacts.tree import check_tree
from deepinfer.artifacts.validation import check_signature, decode_manifest
from deepinfer.errors import ArtifactCorruptError, ArtifactFormatError, ArtifactMismatchError

_OTHER_BYTES = "its bytes are not those that the manifest names"
_COPY_AGAIN = "copy the artifact again or rebuild it"
T = TypeVar("T")


def open_artifact(directory: Path | str, *, verify: bool = True) -> "OpenedArtifact":
    """Open and check the artifact in `directory`.

    With `verify=False`, which is for looking only, the files below `weights/` are not hashed now (they are
    when they are opened); all else is. Raises ArtifactFormatError when the directory is not an artifact of a
    known format, ArtifactCorruptError when a file is missing, changed, superfluous or of a wrong kind.
    """
    root_fd = open_directory(Path(directory))
    try:
        return OpenedArtifact(Path(directory), root_fd, verify=verify)
    except BaseException:
        os.close(root_fd)
        raise


def read_manifest(root_fd: int) -> tuple[Manifest, str]:
    """The checked manifest below an open directory, and the artifact id."""
    try:
        os.stat(MANIFEST_NAME, dir_fd=root_fd, follow_symlinks=False)
    except OSError as error:
        raise ArtifactFormatError(
            "not an artifact: it has no manifest.json",
            action="give the directory that deepinfer-compile wrote",
        ) from error
    descriptor = open_regular_file(root_fd, MANIFEST_NAME)
    try:
        data = read_descriptor(descriptor, MAX_JSON_BYTES, where=MANIFEST_NAME)
    finally:
        os.close(descriptor)
    return decode_manifest(data), artifact_id_of(data)


class OpenedArtifact:
    """A checked artifact: `manifest`, `artifact_id`, `signatures`, `pass_reports`, `tensors`, and its files.

    `tensors` maps weight names to their place in the files below `weights/`; `kernels` is the table of those
    for a graphics card, or None. A context manager; `close`
    releases the root's descriptor.
    """

    def __init__(self, directory: Path, root_fd: int, *, verify: bool) -> None:
        self.directory, self._root_fd = directory, root_fd
        self._stamps: dict[str, FileStamp] = {}
        self.manifest, self.artifact_id = read_manifest(root_fd)
        self._files = {entry.path: entry for entry in self.manifest.files}
        check_tree(root_fd, set(self._files))
        for entry in self.manifest.files:
            self._check_file(entry, hashed=verify or not entry.path.startswith("weights/"))
        self.signatures = {graph.name: self._read_signature(graph.name) for graph in self.manifest.graphs}
        self.pass_reports = {
            graph.name: self._read_struct(f"graphs/{graph.name}/passes.json", PassReport)
            for graph in self.manifest.graphs
        }
        self.tensors = self._read_tensors(verify=verify)
        self.kernels = self._read_kernels()
        self._check_constants()

    def __enter__(self) -> "OpenedArtifact":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the root's descriptor; descriptors handed out stay open."""
        if self._root_fd >= 0:
            os.close(self._root_fd)
            self._root_fd = -1

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of all files of the identity, sorted."""
        return tuple(self._files)

    def read_file(self, path: str) -> bytes:
        """The bytes of a file of the manifest; it is these very bytes that are hashed."""
        entry = self._files[path]
        descriptor = self._open_sized(entry)
        try:
            data = read_descriptor(descriptor, entry.bytes, where=path)
        finally:
            os.close(descriptor)
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            raise ArtifactCorruptError(_OTHER_BYTES, where=path, action=_COPY_AGAIN)
        return data

    def open_file(self, path: str) -> int:
        """A read-only descriptor of a file whose bytes were verified; the caller closes it.

        For a memory map, or as `/proc/self/fd/<n>` where a library wants a path. Raises KeyError for a path
        that is not in the manifest, ArtifactCorruptError when the file has changed.
        """
        entry = self._files[path]
        descriptor = self._open_sized(entry)
        try:
            if self._stamps.get(path) != stamp_of(descriptor):
                self._hash(descriptor, entry)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _check_file(self, entry: FileEntry, *, hashed: bool) -> None:
        descriptor = self._open_sized(entry)
        try:
            if hashed:
                self._hash(descriptor, entry)
        finally:
            os.close(descriptor)

    def _open_sized(self, entry: FileEntry) -> int:
        assert self._root_fd >= 0, "the artifact is closed"
        descriptor = open_regular_file(self._root_fd, entry.path)
        size = os.fstat(descriptor).st_size
        if size != entry.bytes:
            os.close(descriptor)
            raise ArtifactCorruptError(
                f"{size} bytes, the manifest says {entry.bytes}", where=entry.path, action=_COPY_AGAIN
            )
        return descriptor

    def _hash(self, descriptor: int, entry: FileEntry) -> None:
        before = stamp_of(descriptor)
        digest, size = hash_descriptor(descriptor)
        if (digest, size) != (entry.sha256, entry.bytes):
            raise ArtifactCorruptError(_OTHER_BYTES, where=entry.path, action=_COPY_AGAIN)
        if stamp_of(descriptor) != before:
            raise ArtifactCorruptError("changed while it was read", where=entry.path, action=_COPY_AGAIN)
        self._stamps[entry.path] = before

    def _read_struct(self, path: str, struct_type: type[T]) -> T:
        return decode_struct(self.read_file(path), struct_type, where=path)

    def _read_kernels(self) -> KernelTable | None:
        """The table of kernels, of which every one has its machine code; None where there is none."""
        if KERNEL_TABLE not in self._files:
            return None
        table = self._read_struct(KERNEL_TABLE, KernelTable)
        for entry in table.kernels:
            if f"native/{entry.files}.cubin" not in self._files:
                raise ArtifactFormatError(
                    f"no machine code of {entry.kernel}", where=KERNEL_TABLE, action="rebuild the artifact"
                )
        return table

    def _read_signature(self, graph: str) -> GraphSignature:
        path = f"graphs/{graph}/signature.json"
        signature = self._read_struct(path, GraphSignature)
        check_signature(signature, where=path)
        return signature

    def _read_tensors(self, *, verify: bool) -> dict[str, TensorEntry]:
        tensors: dict[str, TensorEntry] = {}
        for path in self._files:
            if not path.startswith("weights/"):
                continue
            descriptor = self.open_file(path) if verify else self._open_sized(self._files[path])
            try:
                index = read_index(descriptor, path)
            finally:
                os.close(descriptor)
            for name, entry in index.items():
                if name in tensors:
                    raise ArtifactFormatError(
                        f"the weight {name!r:.200} is also in {tensors[name].path}",
                        where=path,
                        action=_COPY_AGAIN,
                    )
                tensors[name] = entry
        return tensors

    def _check_constants(self) -> None:
        for graph, signature in self.signatures.items():
            for constant in signature.constants:
                if constant.weight not in self.tensors:
                    raise ArtifactFormatError(
                        f"needs the weight {constant.weight!r:.200}, which no file below weights/ holds",
                        where=f"graphs/{graph}/signature.json",
                        action="rebuild the artifact",
                    )


def check_compatible(
    manifest: Manifest,
    *,
    torch_version: str,
    device: str,
    arch: str,
    isa_supported: Collection[str],
    directory: Path | str | None = None,
) -> None:
    """Raise ArtifactMismatchError unless native code built as `manifest` says runs, and rounds alike, here.

    `isa_supported` are the ISA names that this machine can execute; the torch version must be the same to
    the last digit, since another one may compute other bits. `arch` is that of the `device`: `x86_64`,
    `sm_90`.
    """
    built, target = manifest.toolchain, manifest.target
    place = "OUT" if directory is None else str(directory)
    rebuild = f"rebuild it here: deepinfer-compile MODEL_DIR -o {place} --force"
    if target.device == "cuda" and device == "cuda":
        rebuild = (
            f"build it for this card: deepinfer-compile MODEL_DIR --target cuda:{arch} -o {place} --force"
        )
    elif target.device == "cuda":
        rebuild = f"run it where such a card is, or {rebuild}"
    where = None if directory is None else str(directory)
    if (target.device, target.arch) != (device, arch):
        here = f"this is {device} {arch}"
        if target.device == "cuda" and device == "cpu":
            here = "torch finds no graphics card here"
        raise ArtifactMismatchError(
            f"built for {target.device} {target.arch}, {here}", where=where, action=rebuild
        )
    if built.torch != torch_version:
        raise ArtifactMismatchError(
            f"built with torch {built.torch}, this is torch {torch_version}", where=where, action=rebuild
        )
    if target.isa not in isa_supported:
        known = ", ".join(sorted(isa_supported)) or "none"
        raise ArtifactMismatchError(
            f"built for the instruction set {target.isa}, this machine has {known}",
            where=where,
            action=rebuild,
        )
