"""Sidecars: certificates and measurements below `reports/`, tied to one artifact by its id.

They are outside the identity: adding, replacing or losing one changes nothing that is trusted, and nothing in
them is ever trusted. A sidecar of another artifact is refused when asked for by kind, ignored in a listing.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from deepinfer.artifacts.atomic import locked, replace_file
from deepinfer.artifacts.canonical import MAX_JSON_BYTES, canonical_bytes, decode_struct
from deepinfer.artifacts.files import open_directory, open_regular_file, read_descriptor
from deepinfer.artifacts.reader import read_manifest
from deepinfer.artifacts.schema import REPORTS_DIRECTORY, Certificate, Report
from deepinfer.artifacts.tree import report_names
from deepinfer.artifacts.validation import check_certificate
from deepinfer.errors import ArtifactFormatError, ArtifactWriteError, DeepInferError

_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ID_DIGITS = 16  # enough to keep names apart; the full id inside decides
S = TypeVar("S", bound=Certificate | Report)


def sidecar_name(kind: str, artifact_id: str) -> str:
    """File name of a sidecar below `reports/`."""
    return f"{kind}-{artifact_id[:_ID_DIGITS]}.json"


def write_certificate(directory: Path | str, certificate: Certificate) -> Path:
    """Store a certificate beside the artifact in `directory`, replacing one of its kind; return its path.

    Raises ArtifactFormatError when it is of another artifact or breaks a rule, ArtifactWriteError when the
    directory cannot be written (the artifact itself is never touched).
    """
    return _write(directory, certificate)


def write_report(directory: Path | str, report: Report) -> Path:
    """Store any other measurement beside the artifact; as `write_certificate`."""
    return _write(directory, report)


def read_certificate(directory: Path | str, kind: str) -> Certificate | None:
    """The certificate of a kind, or None when there is none.

    Raises ArtifactFormatError when the file is of another artifact, ArtifactCorruptError when it is damaged.
    """
    return _read(directory, kind, Certificate)


def read_report(directory: Path | str, kind: str) -> Report | None:
    """The measurement of a kind, or None; as `read_certificate`."""
    return _read(directory, kind, Report)


def list_certificates(directory: Path | str) -> tuple[list[Certificate], list[str]]:
    """All certificates of this very artifact, and the names of files that are no sidecar of it."""
    certificates, ignored = [], []
    with _opened(directory) as root_fd:
        _, artifact_id = read_manifest(root_fd)
        for name in report_names(root_fd):
            try:
                certificates.append(_load(root_fd, name, artifact_id, Certificate))
            except DeepInferError:
                if not _is_report(root_fd, name, artifact_id):
                    ignored.append(name)
    return certificates, ignored


def report_file(artifact_id: str, kind: str, content: dict[str, Any]) -> tuple[str, bytes]:
    """Name below `reports/` and bytes of a measurement, for who writes it together with the artifact."""
    report = Report(artifact_id=artifact_id, kind=kind, content=content)
    name, data = sidecar_name(kind, artifact_id), canonical_bytes(report)
    _decode(data, name, artifact_id, Report)  # nothing is written that would not be read
    return name, data


def _is_report(root_fd: int, name: str, artifact_id: str) -> bool:
    try:
        _load(root_fd, name, artifact_id, Report)
    except DeepInferError:
        return False
    return True


def _write(directory: Path | str, sidecar: Certificate | Report) -> Path:
    data = canonical_bytes(sidecar)
    name = sidecar_name(sidecar.kind, sidecar.artifact_id)
    _decode(data, name, sidecar.artifact_id, type(sidecar))  # nothing is written that would not be read
    with _opened(directory) as root_fd:
        _, artifact_id = read_manifest(root_fd)
        if artifact_id != sidecar.artifact_id:
            raise ArtifactFormatError(
                f"a report on the artifact {sidecar.artifact_id[:_ID_DIGITS]} does not belong to "
                f"{artifact_id[:_ID_DIGITS]}",
                where=str(directory),
            )
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(REPORTS_DIRECTORY, dir_fd=root_fd)
            reports_fd = os.open(REPORTS_DIRECTORY, _DIRECTORY_FLAGS, dir_fd=root_fd)
            try:
                with locked(reports_fd):
                    replace_file(reports_fd, name, data)
            finally:
                os.close(reports_fd)
        except OSError as error:
            raise ArtifactWriteError(
                f"the report cannot be written: {error.strerror}",
                where=f"{directory}/{REPORTS_DIRECTORY}/{name}",
                action="check the space and the permissions there",
            ) from error
    return Path(directory) / REPORTS_DIRECTORY / name


def _read(directory: Path | str, kind: str, struct_type: type[S]) -> S | None:
    with _opened(directory) as root_fd:
        _, artifact_id = read_manifest(root_fd)
        name = sidecar_name(kind, artifact_id)
        if name not in report_names(root_fd):
            return None
        return _load(root_fd, name, artifact_id, struct_type)


def _load(root_fd: int, name: str, artifact_id: str, struct_type: type[S]) -> S:
    path = f"{REPORTS_DIRECTORY}/{name}"
    descriptor = open_regular_file(root_fd, path)
    try:
        data = read_descriptor(descriptor, MAX_JSON_BYTES, where=path)
    finally:
        os.close(descriptor)
    return _decode(data, name, artifact_id, struct_type)


def _decode(data: bytes, name: str, artifact_id: str, struct_type: type[S]) -> S:
    path = f"{REPORTS_DIRECTORY}/{name}"
    sidecar = decode_struct(data, struct_type, where=path)
    if sidecar.artifact_id != artifact_id or name != sidecar_name(sidecar.kind, artifact_id):
        raise ArtifactFormatError(
            f"a report on another artifact ({sidecar.artifact_id[:_ID_DIGITS]})",
            where=path,
            action="remove it, and measure again",
        )
    if isinstance(sidecar, Certificate):
        check_certificate(sidecar, where=path)
    return sidecar


@contextlib.contextmanager
def _opened(directory: Path | str) -> Iterator[int]:
    root_fd = open_directory(Path(directory))
    try:
        yield root_fd
    finally:
        os.close(root_fd)
