"""What a real artifact must survive: strangers, other machines, damage in every file, impossible requests.

Nothing native runs in any refused case: both places where native code enters the process are made to fail.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from end_to_end import END_TOKEN, IMAGE_TOKEN, VOCAB, greedy, make_prompt, tree_state

from deepinfer.artifacts import TrustStore, canonical_bytes, open_artifact
from deepinfer.cli import main as main_command
from deepinfer.errors import (
    ArtifactError,
    ArtifactFormatError,
    ArtifactMismatchError,
    ArtifactUntrustedError,
    DeepInferError,
    RequestError,
)
from deepinfer.runtime import loader
from deepinfer.runtime.llm import LLM
from deepinfer.runtime.prompts import PromptLike


@pytest.fixture
def nothing_native_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader.CompiledGraph, "open", lambda *_, **__: pytest.fail("a graph was opened"))
    monkeypatch.setattr(loader, "load_op_library", lambda *_: pytest.fail("the op library was loaded"))


@pytest.fixture
def own_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty trust store, also for the commands."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config"


@pytest.fixture
def copied(float32_artifact: Path, tmp_path: Path) -> Path:
    """A copy that shares no file with the original, without reports; editable."""
    shutil.copytree(
        float32_artifact,
        tmp_path / "copied",
        copy_function=shutil.copyfile,
        ignore=shutil.ignore_patterns("reports"),
    )
    return tmp_path / "copied"


@pytest.fixture(scope="module")
def llm(float32_artifact: Path) -> LLM:
    return LLM(float32_artifact, num_threads=1)


def edit_manifest(directory: Path, change: Callable[[dict[str, Any]], None], store: TrustStore) -> None:
    """Change the manifest as a builder would have written it, and trust the result."""
    path = directory / "manifest.json"
    manifest = json.loads(path.read_bytes())
    change(manifest)
    data = canonical_bytes(manifest)
    path.write_bytes(data)
    store.trust(hashlib.sha256(data).hexdigest())


def test_artifact_of_a_stranger_runs_nothing_until_it_is_trusted(
    copied: Path,
    own_config: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader.CompiledGraph, "open", lambda *_, **__: pytest.fail("a graph was opened"))
        patch.setattr(loader, "load_op_library", lambda *_: pytest.fail("the op library was loaded"))
        with pytest.raises(ArtifactUntrustedError, match=f"deepinfer trust {copied}"):
            LLM(copied)
        assert main_command.main(["generate", str(copied), "--prompt-token-ids", "3", "-q"]) == 4
        assert "[DI403]" in capsys.readouterr().err
        assert not own_config.exists(), "asking must not write"
        assert main_command.main(["trust", str(copied)]) == 0
    with open_artifact(copied) as artifact:
        assert artifact.artifact_id in capsys.readouterr().out
    assert main_command.main(["generate", str(copied), "--prompt-token-ids", "3", "-q"]) == 0
    assert capsys.readouterr().out.strip()


CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "older torch": lambda manifest: manifest["toolchain"].update(torch="2.0.0"),
    "torch for another device": lambda manifest: manifest["toolchain"].update(
        torch=manifest["toolchain"]["torch"].split("+")[0] + "+cu130"
    ),
    "instruction set": lambda manifest: manifest["target"].update(isa="avx10"),
    "processor": lambda manifest: manifest["target"].update(arch="aarch64"),
    "graphics card": lambda manifest: manifest["target"].update(device="cuda", arch="sm_90"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_artifact_for_another_machine_is_refused_with_the_way_to_rebuild_it(
    copied: Path, tmp_path: Path, nothing_native_runs: None, name: str
) -> None:
    store = TrustStore(tmp_path / "trust")
    edit_manifest(copied, CHANGES[name], store)
    with pytest.raises(ArtifactMismatchError, match=f"deepinfer-compile MODEL_DIR -o {copied} --force"):
        LLM(copied, trust_store=store)


@pytest.mark.parametrize("version", [0, 2, 99, "1", None, True])
def test_artifact_of_another_format_is_refused(
    copied: Path, tmp_path: Path, nothing_native_runs: None, version: object
) -> None:
    store = TrustStore(tmp_path / "trust")
    edit_manifest(copied, lambda manifest: manifest.update(format_version=version), store)
    with pytest.raises(ArtifactFormatError, match=r"reads version 1.*rebuild"):
        LLM(copied, trust_store=store)


def test_artifact_without_a_version_is_refused(
    copied: Path, tmp_path: Path, nothing_native_runs: None
) -> None:
    for key in ("format_version", "toolchain", "target", "kind"):
        store = TrustStore(tmp_path / "trust")
        before = (copied / "manifest.json").read_bytes()
        edit_manifest(copied, lambda manifest, key=key: manifest.pop(key), store)  # type: ignore[misc]
        with pytest.raises(ArtifactFormatError):
            LLM(copied, trust_store=store)
        (copied / "manifest.json").write_bytes(before)


def test_damage_in_any_file_is_found_before_anything_runs(
    copied: Path, tmp_path: Path, nothing_native_runs: None
) -> None:
    """One flipped bit, one missing byte, half of the file missing, and no file: for every file there is."""
    store = TrustStore(tmp_path / "trust")
    with open_artifact(copied) as artifact:
        store.trust(artifact.artifact_id)
        paths = [copied / "manifest.json", *(copied / path for path in artifact.paths)]
    assert {path for path in copied.rglob("*") if path.is_file()} == set(paths) and len(paths) >= 15
    for number, path in enumerate(paths):
        data = path.read_bytes()
        place = (number * 7919 + len(data) // 3) % len(data)
        flipped = bytearray(data)
        flipped[place] ^= 1 << (number % 8)
        for damaged in (bytes(flipped), data[:-1], data[: len(data) // 2]):
            path.write_bytes(damaged)
            with pytest.raises(DeepInferError) as caught:
                LLM(copied, trust_store=store)
            assert isinstance(caught.value, ArtifactError) and caught.value.exit_code == 4, path
            assert path.name in str(caught.value) or path.name == "manifest.json", str(caught.value)
        path.unlink()
        with pytest.raises(ArtifactError):
            LLM(copied, trust_store=store)
        path.write_bytes(data)
    extra = copied / "graphs" / "stray.so"
    extra.write_bytes(b"\x7fELF")
    with pytest.raises(ArtifactError, match=r"stray\.so"):
        LLM(copied, trust_store=store)
    extra.unlink()
    with pytest.raises(
        pytest.fail.Exception, match="op library"
    ):  # whole again, so now native code would run
        LLM(copied, trust_store=store)


def test_moved_artifact_is_the_same_artifact(
    copied: Path, tmp_path: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing inside names a place: it loads from elsewhere, by a relative path, folder changed since."""
    (tmp_path / "elsewhere").mkdir()
    shutil.move(copied, tmp_path / "elsewhere" / "with a space")
    monkeypatch.chdir(tmp_path / "elsewhere")
    moved = LLM("with a space", num_threads=1)
    monkeypatch.chdir("/")
    assert moved.artifact_id == llm.artifact_id
    assert tokens_of(moved, [make_prompt(20)]) == tokens_of(llm, [make_prompt(20)])


def test_loading_and_running_leaves_the_artifact_as_it_is(copied: Path) -> None:
    before = tree_state(copied)
    tokens_of(LLM(copied, num_threads=1), [make_prompt(20)])
    assert tree_state(copied) == before


def tokens_of(llm: LLM, prompts: list[PromptLike]) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, greedy(6), use_tqdm=False)]


IMPOSSIBLE: dict[str, tuple[PromptLike, int, str]] = {
    "too long": ([3] * 1019, 6, r"1019 prompt tokens and max_tokens 6 exceed the model length of 1024"),
    "far too long": ([3] * 100_000, 1, r"100000 prompt tokens"),
    "no room for an answer": ([3] * 1024, 1, r"1024"),
    "too long as text": (" " * 1_000_000, 1, r"1000000 bytes has more than 1024 tokens"),
    "id at the end": ([3, VOCAB], 1, rf"token id {VOCAB} is outside the vocabulary of {VOCAB}"),
    "id below": ([3, -1], 1, r"token id -1 is outside"),
    "id far out": ([2**40], 1, rf"token id {2**40}"),
    "id beyond 64 bits": ([2**70], 1, rf"token id {2**70}"),
    "no tokens": ({"prompt_token_ids": []}, 1, r"the prompt has no tokens"),
    "no text": ("", 1, r"no tokens"),
    "an image": ([3, IMAGE_TOKEN], 1, rf"token id {IMAGE_TOKEN} stands for an image"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_request_is_named_and_harms_nobody(llm: LLM, name: str) -> None:
    """Alone and beside a good one; the engine serves the next request as before."""
    prompt, max_tokens, message = IMPOSSIBLE[name]
    expected = tokens_of(llm, [[5, 6]])
    before = llm.counters
    for prompts in ([prompt], [[5, 6], prompt]):
        with pytest.raises(RequestError, match=message) as caught:
            llm.generate(prompts, greedy(max_tokens), use_tqdm=False)
        assert len(prompts) == 1 or f"prompts[{len(prompts) - 1}]" in str(caught.value)
    assert llm.counters == before
    assert tokens_of(llm, [[5, 6]]) == expected


def test_longest_possible_request_is_served(llm: LLM) -> None:
    (output,) = llm.generate([make_prompt(1020)], greedy(4), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4 and output.outputs[0].finish_reason == "length"
    (output,) = llm.generate([make_prompt(1023)], greedy(1), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 1


@pytest.mark.parametrize(
    "flags",
    [
        ["--prompt-token-ids", f"3,{VOCAB}"],
        ["--prompt-token-ids", f"3,{IMAGE_TOKEN}"],
        ["--prompt-token-ids", ",".join(["3"] * 1020)],
        ["--prompt-token-ids", "-1"],
        ["--prompt", ""],
        ["--prompt-token-ids", ""],
        ["--prompt-token-ids", "3", "--max-tokens", "0"],
        ["--prompt-token-ids", "3", "--temperature", "-1"],
        ["--prompt-token-ids", "3", "--temperature", "nan"],
        ["--prompt-token-ids", "3", "--seed", "-5"],
        ["--prompt-token-ids", "3", "--seed", str(2**64)],
    ],
)
def test_command_refuses_impossible_requests_in_one_line(
    float32_artifact: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    assert main_command.main(["generate", str(float32_artifact), "-q", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1 and captured.err.startswith("[DI1")


def test_ordinary_tokens_are_all_served(llm: LLM) -> None:
    """Every id of the vocabulary except the image's, the end token included, may stand in a prompt."""
    ids = [token for token in range(VOCAB) if token != IMAGE_TOKEN]
    assert END_TOKEN in ids
    (tokens,) = tokens_of(llm, [ids])
    assert len(tokens) == 6 and all(0 <= token < VOCAB for token in tokens)
