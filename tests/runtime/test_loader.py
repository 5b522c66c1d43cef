"""Loading: the order of the checks, what is refused, and that weights are the file itself."""

import subprocess
import sys
from pathlib import Path

import fake_artifact
import pytest
import torch
from fake_artifact import WEIGHTS, OpenedFakes, write_artifact

from deepinfer.artifacts import GraphEntry, Target, Toolchain, TrustStore, open_artifact
from deepinfer.errors import (
    ArtifactCorruptError,
    ArtifactFormatError,
    ArtifactMismatchError,
    ArtifactUntrustedError,
    DeepInferError,
    TokenizerError,
)
from deepinfer.kernels import native
from deepinfer.runtime import loader
from deepinfer.runtime.weights import WeightStore


@pytest.fixture
def store(tmp_path: Path) -> TrustStore:
    return TrustStore(tmp_path / "trust")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> OpenedFakes:
    fakes = OpenedFakes()
    monkeypatch.setattr(loader.CompiledGraph, "open", fakes.open)
    return fakes


@pytest.fixture
def nothing_native_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader.CompiledGraph, "open", lambda *_, **__: pytest.fail("a graph was opened"))
    monkeypatch.setattr(loader, "load_op_library", lambda *_: pytest.fail("the op library was loaded"))


def test_trusted_artifact_is_loaded_whole(tmp_path: Path, store: TrustStore, opened: OpenedFakes) -> None:
    artifact_id = write_artifact(tmp_path / "out")
    store.trust(artifact_id)
    loaded = loader.load_artifact(tmp_path / "out", store)
    assert loaded.artifact_id == artifact_id
    limits = loaded.limits
    assert (limits.prefill_buckets, limits.decode_buckets, limits.logits_buckets) == ((4, 16), (1, 4), (1, 2))
    assert (limits.eos_token_ids, limits.image_token_id) == ((1,), 49)
    assert (limits.num_slots, limits.num_blocks, limits.max_blocks_per_request) == (5, 33, 8)
    assert sorted(opened.bound) == ["decode-1", "decode-4", "logits-1", "logits-2", "prefill-16", "prefill-4"]
    assert sorted(opened.checked) == ["decode-1", "decode-4", "prefill-16", "prefill-4"]
    for constants in opened.bound.values():
        assert constants["c0"] is loaded.weights.tensors["embed"]
        assert constants["c1"] is loaded.weights.tensors["scale"]
    names = [name for name, _, _ in loaded.report.parts]
    assert names == ["verify", "op library", "weights", "graphs", "caches", "tokenizer"]
    assert dict((name, size) for name, size, _ in loaded.report.parts)["weights"] == 12 * 4 + 3 + 4
    assert loaded.report.counts == {"compiler_modules_imported": 0, "child_processes_seen": 0}
    assert "total" in loaded.report.summary()


def test_artifact_nobody_trusts_runs_nothing(
    tmp_path: Path, store: TrustStore, nothing_native_runs: None
) -> None:
    write_artifact(tmp_path / "out")
    with pytest.raises(ArtifactUntrustedError, match="deepinfer trust"):
        loader.load_artifact(tmp_path / "out", store)


@pytest.mark.parametrize(
    "changes",
    [
        {
            "toolchain": Toolchain(
                deepinfer="0", torch="1.0", python="3", compiler="x", op_library_sha256="0" * 64
            )
        },
        {"target": Target(device="cpu", arch="s390x", isa="avx2")},
        {"target": Target(device="cuda", arch="sm_90", isa="sm_90")},
        {"target": Target(device="cpu", arch="x86_64", isa="avx99")},
    ],
)
def test_artifact_for_another_machine_runs_nothing(
    tmp_path: Path, store: TrustStore, nothing_native_runs: None, changes: dict
) -> None:
    store.trust(write_artifact(tmp_path / "out", changes=changes))
    with pytest.raises(ArtifactMismatchError, match="deepinfer-compile"):
        loader.load_artifact(tmp_path / "out", store)


@pytest.mark.parametrize("path", ["weights/model.safetensors", "graphs/decode-1/model.so", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damaged_artifact_runs_nothing(
    tmp_path: Path, store: TrustStore, nothing_native_runs: None, path: str, damage: str
) -> None:
    store.trust(write_artifact(tmp_path / "out"))
    file = tmp_path / "out" / path
    data = file.read_bytes()
    file.chmod(0o644)
    if damage == "remove":
        file.unlink()
    else:
        file.write_bytes(data[:-1] if damage == "cut" else data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises((ArtifactCorruptError, ArtifactFormatError)):
        loader.load_artifact(tmp_path / "out", store)


def entries(**replaced: dict) -> tuple[GraphEntry, ...]:
    all_entries = {
        "decode-1": {"phase": "decode", "bucket": 1, "request_rows": 1},
        "decode-4": {"phase": "decode", "bucket": 4, "request_rows": 4},
        "logits-1": {"phase": "logits", "bucket": 1, "request_rows": 0},
        "logits-2": {"phase": "logits", "bucket": 2, "request_rows": 0},
        "prefill-4": {"phase": "prefill", "bucket": 4, "request_rows": 2},
        "prefill-16": {"phase": "prefill", "bucket": 16, "request_rows": 2},
    }
    return tuple(
        GraphEntry(name=name, **(fields | replaced.get(name, {}))) for name, fields in all_entries.items()
    )


@pytest.mark.parametrize(
    ("graphs", "message"),
    [
        (entries(**{"decode-4": {"request_rows": 3}}), "table of 3"),
        (entries(**{"prefill-4": {"request_rows": 1}}), "no common size"),
    ],
)
def test_graphs_that_do_not_serve_are_refused(
    tmp_path: Path, store: TrustStore, nothing_native_runs: None, graphs: tuple, message: str
) -> None:
    store.trust(write_artifact(tmp_path / "out", changes={"graphs": graphs}))
    with pytest.raises(ArtifactFormatError, match=message):
        loader.load_artifact(tmp_path / "out", store)


def test_graphs_that_export_residuals_serve_like_others(
    tmp_path: Path, store: TrustStore, opened: OpenedFakes
) -> None:
    graphs = entries(**{"decode-1": {"taps": True}, "prefill-4": {"taps": True}})
    store.trust(write_artifact(tmp_path / "out", changes={"graphs": graphs}))
    limits = loader.load_artifact(tmp_path / "out", store).limits
    assert (limits.decode_buckets, limits.prefill_buckets) == ((1, 4), (4, 16))


@pytest.mark.parametrize("phase", ["prefill", "decode", "logits"])
def test_artifact_without_a_phase_is_refused(
    tmp_path: Path, store: TrustStore, nothing_native_runs: None, phase: str
) -> None:
    left = tuple(entry for entry in entries() if entry.phase != phase)
    store.trust(write_artifact(tmp_path / "out", changes={"graphs": left}, without_phase=phase))
    with pytest.raises(ArtifactFormatError, match=f"no {phase} graph"):
        loader.load_artifact(tmp_path / "out", store)


def test_outputs_that_would_be_misread_are_refused(
    tmp_path: Path, store: TrustStore, nothing_native_runs: None
) -> None:
    spec = fake_artifact.OutputSpec
    wrong = {
        "few": {"decode-4": {"outputs": (spec(name="o", dtype="float32", shape=(3, 3)),)}},
        "none": {"decode-4": {"outputs": ()}},
        "width": {"decode-4": {"outputs": (spec(name="o", dtype="float32", shape=(4, 5)),)}},
        "dtype": {"decode-4": {"outputs": (spec(name="o", dtype="bfloat16", shape=(4, 3)),)}},
        "vocab": {"logits-1": {"outputs": (spec(name="o", dtype="float32", shape=(1, 49)),)}},
        "half": {"logits-1": {"outputs": (spec(name="o", dtype="bfloat16", shape=(1, 50)),)}},
    }
    for name, changes in wrong.items():
        store.trust(write_artifact(tmp_path / name, signature_changes=changes))
        with pytest.raises(ArtifactFormatError):
            loader.load_artifact(tmp_path / name, store)


def test_inputs_of_another_layout_are_refused(tmp_path: Path, store: TrustStore, opened: OpenedFakes) -> None:
    spec = fake_artifact.InputSpec(name="odd", dtype="int32", shape=(1,), strides=(1,))
    store.trust(write_artifact(tmp_path / "out", signature_changes={"decode-1": {"inputs": (spec,)}}))
    with pytest.raises(ArtifactMismatchError, match="takes 1 inputs"):
        loader.load_artifact(tmp_path / "out", store)


def test_weights_are_the_mapped_file(tmp_path: Path) -> None:
    write_artifact(tmp_path / "out")
    with open_artifact(tmp_path / "out") as artifact:
        weights = WeightStore.open(artifact)
    for name, array in WEIGHTS.items():
        tensor = weights.tensors[name]
        assert torch.equal(tensor, torch.from_numpy(array)) and tensor.shape == array.shape
    addresses = [tensor.data_ptr() for tensor in weights.tensors.values()]
    maps = Path("/proc/self/maps").read_text().splitlines()
    (line,) = [line for line in maps if line.endswith(f"{tmp_path}/out/weights/model.safetensors")]
    span, mode = line.split()[:2]
    low, high = (int(end, 16) for end in span.split("-"))
    assert mode == "r--s" and all(low <= address < high for address in addresses)


def test_broken_tokenizer_is_named(tmp_path: Path, store: TrustStore, opened: OpenedFakes) -> None:
    store.trust(write_artifact(tmp_path / "out", tokenizer="{}"))
    with pytest.raises(TokenizerError, match="tokenizer.json"):
        loader.load_artifact(tmp_path / "out", store)


def test_stand_in_for_a_shared_object_is_refused_by_the_real_loader(
    tmp_path: Path, store: TrustStore
) -> None:
    store.trust(write_artifact(tmp_path / "out"))
    with pytest.raises(DeepInferError, match="shared object"):
        loader.load_artifact(tmp_path / "out", store)


def test_op_library_is_loaded_from_a_private_copy_of_the_verified_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    class Artifact:
        paths = (loader.OP_LIBRARY_PATH,)

        def read_file(self, path: str) -> bytes:
            assert path == loader.OP_LIBRARY_PATH
            return b"library"

    def load(path: Path) -> None:
        seen.append((path.read_bytes(), path.parent.stat().st_mode & 0o777, path))

    monkeypatch.setattr(native, "load_op_library", load)
    assert loader.load_op_library(Artifact()) == 7  # type: ignore[arg-type]
    data, mode, path = seen[0]
    assert (data, mode) == (b"library", 0o700)
    assert not path.exists()


def test_compiler_watch_sees_imports_and_processes() -> None:
    watch = loader.CompilerWatch()
    assert set(watch.counts().values()) == {0}
    name = "torch._inductor.a_test_of_the_watch"
    sys.modules[name] = sys
    try:
        subprocess.run(["true"], check=True)
        assert watch.counts() == {"compiler_modules_imported": 1, "child_processes_seen": 1}
    finally:
        del sys.modules[name]


def test_runtime_imports_neither_models_nor_compiler() -> None:
    code = (
        "import sys\n"
        "for package in ('graphs', 'passes'):\n"
        "    sys.modules[f'deepinfer.{package}'] = None\n"
        "for name in ('torch._inductor', 'torch._dynamo', 'triton'):\n"
        "    sys.modules[name] = None\n"
        "import deepinfer.runtime.llm\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


CARD = Target(device="cuda", arch="sm_90", isa="avx2")


def test_code_for_a_card_is_refused_where_there_is_none(
    tmp_path: Path, store: TrustStore, nothing_native_runs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    store.trust(write_artifact(tmp_path / "out", changes={"target": CARD}))
    with pytest.raises(ArtifactMismatchError, match="built for cuda sm_90, torch finds no graphics card"):
        loader.load_artifact(tmp_path / "out", store)


def test_code_for_another_card_is_refused_with_the_way_to_build_it(
    tmp_path: Path, store: TrustStore, nothing_native_runs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    store.trust(write_artifact(tmp_path / "out", changes={"target": CARD}))
    with pytest.raises(ArtifactMismatchError, match="built for cuda sm_90, this is cuda sm_100") as caught:
        loader.load_artifact(tmp_path / "out", store)
    assert "--target cuda:sm_100" in str(caught.value)


def test_code_for_the_card_that_is_there_goes_on_to_the_next_check(
    tmp_path: Path, store: TrustStore, nothing_native_runs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    write_artifact(tmp_path / "out", changes={"target": CARD})
    with pytest.raises(ArtifactUntrustedError, match="deepinfer trust"):
        loader.load_artifact(tmp_path / "out", store)
