"""The trust store: what this user built or trusted, and nothing that anybody else could have written."""

import os
from pathlib import Path

import pytest

from deepinfer.artifacts import TrustStore, default_trust_directory
from deepinfer.errors import ArtifactUntrustedError, DeepInferError

ID, OTHER = "a" * 64, "b" * 64


@pytest.fixture
def store(tmp_path: Path) -> TrustStore:
    """A store that knows one artifact built here."""
    store = TrustStore(tmp_path / "config" / "deepinfer")
    store.record_built(ID)
    return store


def test_nothing_is_trusted_until_it_is_built_or_trusted(store: TrustStore) -> None:
    assert store.is_trusted(ID)
    assert store.origin(ID) == "built"
    assert not store.is_trusted(OTHER)
    store.trust(OTHER)
    assert TrustStore(store.directory).origin(OTHER) == "trusted"
    assert store.entries() == {ID: "built", OTHER: "trusted"}


def test_trusting_what_was_built_here_keeps_its_origin(store: TrustStore) -> None:
    store.trust(ID)
    assert store.origin(ID) == "built"
    store.trust(OTHER)
    store.record_built(OTHER)
    assert store.origin(OTHER) == "built"


def test_trust_can_be_withdrawn(store: TrustStore) -> None:
    assert store.forget(ID)
    assert not store.forget(ID)
    assert not store.is_trusted(ID)


def test_requiring_names_the_command(store: TrustStore) -> None:
    store.require(ID, "x.di")
    with pytest.raises(ArtifactUntrustedError, match=r"DI403.*deepinfer trust x\.di"):
        store.require(OTHER, "x.di")


def test_asking_writes_nothing(tmp_path: Path) -> None:
    assert not TrustStore(tmp_path / "none" / "here").is_trusted(ID)
    assert list(tmp_path.iterdir()) == []


def test_modes_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        TrustStore(tmp_path / "store").trust(ID)
    finally:
        os.umask(before)
    assert (tmp_path / "store").stat().st_mode & 0o7777 == 0o700
    assert (tmp_path / "store" / "artifacts.json").stat().st_mode & 0o7777 == 0o600


@pytest.mark.parametrize("bad", ["", "a" * 63, "A" * 64, "a" * 64 + "\n", "../../x"])
def test_what_is_no_id_is_not_stored(store: TrustStore, bad: str) -> None:
    with pytest.raises(DeepInferError):
        store.trust(bad)
    assert store.entries() == {ID: "built"}


def refused(store: TrustStore) -> str:
    """Every method refuses; the common message."""
    messages = set()
    for call in (store.is_trusted, store.trust, store.record_built, store.forget, store.origin):
        with pytest.raises(ArtifactUntrustedError) as caught:
            call(ID)
        messages.add(str(caught.value))
    (message,) = messages
    return message


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701, 0o1700])
def test_a_directory_open_to_others_is_refused(store: TrustStore, mode: int) -> None:
    store.directory.chmod(mode)
    assert f"its mode is {mode:04o}, not 0700" in refused(store)


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o602, 0o400])
def test_a_file_open_to_others_is_refused(store: TrustStore, mode: int) -> None:
    (store.directory / "artifacts.json").chmod(mode)
    assert f"its mode is {mode:04o}, not 0600" in refused(store)


def test_another_users_directory_is_refused(store: TrustStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    assert "belongs to user" in refused(store)


def test_another_users_file_is_refused(store: TrustStore) -> None:
    if os.geteuid():
        pytest.skip("only root can give a file away")
    os.chown(store.directory / "artifacts.json", 4242, -1)
    assert "belongs to user 4242" in refused(store)


def test_links_are_refused(store: TrustStore, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(store.directory)
    refused(TrustStore(tmp_path / "link"))
    file = store.directory / "artifacts.json"
    file.rename(tmp_path / "moved.json")
    file.symlink_to(tmp_path / "moved.json")
    refused(store)
    file.unlink()
    os.link(tmp_path / "moved.json", file)
    assert "one name" in refused(store)


def test_a_fifo_is_refused_without_waiting(store: TrustStore) -> None:
    file = store.directory / "artifacts.json"
    file.unlink()
    os.mkfifo(file, 0o600)
    assert "not a regular file" in refused(store)


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("")
    refused(TrustStore(tmp_path / "store"))


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"format_version":2,"artifacts":[]}', b'{"artifacts":[],"format_version":1,"x":1}',
     b'{"artifacts":[{"id":"x","origin":"built"}],"format_version":1}',
     b'{"artifacts":[{"id":"' + b"a" * 64 + b'","origin":"me"}],"format_version":1}'],
)  # fmt: skip
def test_a_damaged_store_trusts_nothing_and_is_not_overwritten(store: TrustStore, content: bytes) -> None:
    (store.directory / "artifacts.json").write_bytes(content)
    assert "damaged" in refused(store)
    assert (store.directory / "artifacts.json").read_bytes() == content


def test_the_default_follows_the_base_directory_rules(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert default_trust_directory() == tmp_path / "deepinfer"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_CONFIG_HOME", ignored)
        assert default_trust_directory() == tmp_path / "home" / ".config" / "deepinfer"


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(ArtifactUntrustedError, match="XDG_CONFIG_HOME"):
        default_trust_directory()
