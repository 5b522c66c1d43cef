"""Whose native code this user is willing to run: the ids of artifacts built or trusted here.

The store is `artifacts.json` (0600) in a directory of the user (0700). Anything else there is refused, never
repaired. Asking writes nothing; changes are made under the directory's lock and appear whole.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from deepinfer.artifacts.atomic import locked, replace_file
from deepinfer.artifacts.canonical import MAX_JSON_BYTES, canonical_bytes, decode_struct
from deepinfer.artifacts.files import read_descriptor
from deepinfer.artifacts.private import open_private_directory, open_private_file
from deepinfer.artifacts.schema import Record, Sha256
from deepinfer.errors import ArtifactUntrustedError, DeepInferError

STORE_NAME = "artifacts.json"
Origin = Literal["built", "trusted"]


class TrustEntry(Record, frozen=True, kw_only=True):
    """One artifact and how it came to be trusted."""

    id: Sha256
    origin: Origin


class _Store(Record, frozen=True, kw_only=True):
    format_version: Literal[1] = 1
    artifacts: tuple[TrustEntry, ...]


def default_trust_directory() -> Path:
    """`$XDG_CONFIG_HOME/deepinfer`, or `~/.config/deepinfer`.

    Raises ArtifactUntrustedError for a user without a home directory.
    """
    base = os.environ.get("XDG_CONFIG_HOME", "")
    # the base directory specification: a relative value is to be ignored
    if base.startswith("/"):
        return Path(base) / "deepinfer"
    try:
        return Path.home() / ".config" / "deepinfer"
    except RuntimeError as error:
        raise ArtifactUntrustedError(
            "this user has no home directory to keep the list of trusted artifacts in",
            where="HOME",
            action="set HOME or XDG_CONFIG_HOME",
        ) from error


class TrustStore:
    """The trust store of one user. Every method raises ArtifactUntrustedError when it cannot be relied on."""

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = default_trust_directory() if directory is None else directory

    def record_built(self, artifact_id: str) -> None:
        """Remember that this user built the artifact here."""
        self._put(artifact_id, "built")

    def trust(self, artifact_id: str) -> None:
        """Remember that this user trusts the artifact; one built here keeps that origin."""
        self._put(artifact_id, "trusted")

    def forget(self, artifact_id: str) -> bool:
        """Withdraw the trust; False when there was none."""
        with self._changing() as origins:
            return origins.pop(artifact_id, None) is not None

    def is_trusted(self, artifact_id: str) -> bool:
        """True when the artifact was built by this user here, or trusted by name."""
        return self.origin(artifact_id) is not None

    def origin(self, artifact_id: str) -> Origin | None:
        """How the artifact came to be trusted, or None."""
        return self.entries().get(artifact_id)

    def entries(self) -> dict[str, Origin]:
        """All trusted ids with their origins."""
        directory_fd = open_private_directory(self.directory, ArtifactUntrustedError, create=False)
        if directory_fd is None:
            return {}
        try:
            return self._read(directory_fd)
        finally:
            os.close(directory_fd)

    def require(self, artifact_id: str, directory: Path | str) -> None:
        """Raise ArtifactUntrustedError unless the artifact in `directory` may be loaded by this user."""
        if not self.is_trusted(artifact_id):
            raise ArtifactUntrustedError(
                "loading an artifact runs its native code, and you neither built nor trusted this one",
                where=str(directory),
                action=f"if you know where it comes from: deepinfer trust {directory}",
            )

    def _put(self, artifact_id: str, origin: Origin) -> None:
        with self._changing() as origins:
            if origins.get(artifact_id) != "built":
                origins[artifact_id] = origin

    @contextlib.contextmanager
    def _changing(self) -> Iterator[dict[str, Origin]]:
        directory_fd = open_private_directory(self.directory, ArtifactUntrustedError, create=True)
        assert directory_fd is not None
        try:
            with locked(directory_fd):
                origins = self._read(directory_fd)
                before = dict(origins)
                yield origins
                if origins != before:
                    entries = tuple(TrustEntry(id=key, origin=origins[key]) for key in sorted(origins))
                    data = canonical_bytes(_Store(artifacts=entries))
                    decode_struct(data, _Store, where=self._where)  # an id that is none is refused here
                    replace_file(directory_fd, STORE_NAME, data, mode=0o600)
        except OSError as error:
            raise ArtifactUntrustedError(
                f"the trust store cannot be written: {error.strerror}",
                where=self._where,
                action="check the space and the permissions there",
            ) from error
        finally:
            os.close(directory_fd)

    @property
    def _where(self) -> str:
        return str(self.directory / STORE_NAME)

    def _read(self, directory_fd: int) -> dict[str, Origin]:
        descriptor = open_private_file(directory_fd, STORE_NAME, ArtifactUntrustedError, where=self._where)
        if descriptor is None:
            return {}
        try:
            data = read_descriptor(descriptor, MAX_JSON_BYTES, where=self._where)
            store = decode_struct(data, _Store, where=self._where)
        except ArtifactUntrustedError:
            raise
        except DeepInferError as error:
            raise ArtifactUntrustedError(
                "the trust store is damaged",
                where=self._where,
                action="remove it, then trust or rebuild again",
            ) from error
        finally:
            os.close(descriptor)
        return {entry.id: entry.origin for entry in store.artifacts}
