"""The build cache: what comes out is what went in, or nothing."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepinfer.artifacts import BuildCache
from deepinfer.artifacts import build_cache as build_cache_module
from deepinfer.errors import BuildError

KEY, OTHER, THIRD = "a" * 64, "b" * 64, "c" * 64
FILES = {"model.so": b"\x7fELF code", "graph.txt": b"text", "empty": b""}


@pytest.fixture
def cache(tmp_path: Path) -> BuildCache:
    """A cache with one entry."""
    cache = BuildCache(tmp_path / "parent" / "cache")
    cache.put(KEY, FILES)
    return cache


def test_an_entry_comes_back_whole(cache: BuildCache) -> None:
    assert cache.get(KEY) == FILES
    assert cache.get(OTHER) is None
    assert BuildCache(cache.root).get(KEY) == FILES


def test_the_first_entry_under_a_key_stays(cache: BuildCache) -> None:
    cache.put(KEY, {"other": b"1"})
    assert cache.get(KEY) == FILES
    assert [path.name for path in cache.root.iterdir()] == [KEY]


def test_everything_in_it_is_private(cache: BuildCache) -> None:
    assert cache.root.stat().st_mode & 0o7777 == 0o700
    for path in cache.root.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


@given(
    edit=st.sampled_from(["model.so", "graph.txt", "entry.json"]),
    position=st.integers(0, 3),
    cut=st.booleans(),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_entry_is_a_miss_and_is_removed(
    cache: BuildCache, edit: str, position: int, cut: bool
) -> None:
    cache.put(KEY, FILES)
    path = cache.root / KEY / edit
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data[:position] if cut else data)
    assert cache.get(KEY) is None
    assert list(cache.root.iterdir()) == []


@pytest.mark.parametrize(
    "kind", ["missing file", "link", "hard link", "entry is a file", "entry is a link", "key"]
)
def test_an_entry_of_a_wrong_kind_is_a_miss_and_is_removed(
    cache: BuildCache, tmp_path: Path, kind: str
) -> None:
    entry, file = cache.root / KEY, cache.root / KEY / "model.so"
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "model.so").write_bytes(FILES["model.so"])
    if kind == "missing file":
        file.unlink()
    elif kind == "link":
        file.unlink()
        file.symlink_to(outside / "model.so")
    elif kind == "hard link":
        file.unlink()
        os.link(outside / "model.so", file)
    elif kind == "key":
        entry.rename(cache.root / OTHER)
        assert cache.get(OTHER) is None
    else:
        entry.rename(tmp_path / "moved")
        if kind == "entry is a file":
            entry.write_text("")
        else:
            entry.symlink_to(tmp_path / "moved")
    assert cache.get(KEY) is None
    assert not os.path.lexists(entry)
    assert (outside / "model.so").read_bytes() == FILES["model.so"]
    assert kind != "entry is a link" or (tmp_path / "moved" / "model.so").exists()
    cache.put(KEY, FILES)
    assert cache.get(KEY) == FILES


def test_the_least_recently_used_entries_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**18, 10**19, 10**9))
    monkeypatch.setattr(build_cache_module.time, "time_ns", lambda: next(clock))
    cache = BuildCache(tmp_path / "cache", max_bytes=3000)
    for second, key in enumerate((KEY, OTHER)):
        cache.put(key, {"x": bytes(1000)})
        os.utime(cache.root / key, ns=(second, second))
    assert cache.get(KEY)  # used just now, so the other one is the older
    cache.put(THIRD, {"x": bytes(1000)})
    assert cache.get(OTHER) is None
    assert cache.get(KEY)
    assert cache.get(THIRD)
    assert cache.size_bytes <= 3000


def test_an_entry_larger_than_the_cache_is_not_stored(tmp_path: Path) -> None:
    cache = BuildCache(tmp_path / "cache", max_bytes=3000)
    cache.put(OTHER, {"x": bytes(100)})
    cache.put(KEY, {"x": bytes(4000)})
    assert cache.get(KEY) is None
    assert cache.get(OTHER)


def test_clearing_leaves_strangers_alone(cache: BuildCache) -> None:
    (cache.root / "notes.txt").write_text("mine")
    cache.clear()
    assert [path.name for path in cache.root.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("mode", [0o755, 0o777, 0o710])
def test_a_root_open_to_others_is_refused(cache: BuildCache, mode: int) -> None:
    cache.root.chmod(mode)
    for call in (lambda: BuildCache(cache.root), lambda: cache.get(KEY), lambda: cache.put(OTHER, FILES)):
        with pytest.raises(BuildError, match="its mode is"):
            call()


def test_a_root_of_another_user_or_behind_a_link_is_refused(
    cache: BuildCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(cache.root)
    with pytest.raises(BuildError, match="not a directory of its own"):
        BuildCache(tmp_path / "link")
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with pytest.raises(BuildError, match="belongs to user"):
        BuildCache(cache.root)


@pytest.mark.parametrize("key", ["", "../x", "A" * 64, "a" * 63, "a" * 64 + "\n"])
def test_what_is_no_key_is_a_programmers_mistake(cache: BuildCache, key: str) -> None:
    with pytest.raises(AssertionError):
        cache.get(key)
    with pytest.raises(AssertionError):
        cache.put(key, {})
