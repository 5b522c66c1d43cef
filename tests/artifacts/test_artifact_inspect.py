"""Certificates beside the artifact, and what `inspect` says: nothing executed, nothing written, no torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import artifact_factory
import msgspec
import pytest

from deepinfer.artifacts import (
    Certificate,
    GraphResult,
    Report,
    TrustStore,
    describe,
    list_certificates,
    open_artifact,
    read_certificate,
    read_report,
    render,
    write_certificate,
    write_report,
)
from deepinfer.errors import ArtifactCorruptError, ArtifactFormatError, ArtifactWriteError


def certificate_of(artifact: Path, kind: str = "diff", **changes: object) -> Certificate:
    """A certificate of the artifact in a directory."""
    result = {
        "graph": "decode-1",
        "rows_compared": 40,
        "max_abs_error": 1.5e-6,
        "mean_kl": 1e-9,
        "top1_agreement": 1.0,
        "excluded_share": 0.025,
        "verdict": "pass",
        "tolerances": {"max_abs_error": 1e-4},
    }
    with open_artifact(artifact) as opened:
        return Certificate(
            artifact_id=opened.artifact_id,
            kind=kind,
            created_by="deepinfer-diff good.di",
            environment={"cpu": "x86_64"},
            graphs=(GraphResult(**(result | changes)),),
        )


def snapshot(directory: Path) -> dict[str, tuple]:
    """Every path below a directory with its content and change times."""
    found = {}
    for path in sorted(directory.rglob("*")):
        info = path.lstat()
        data = path.read_bytes() if path.is_file() else b""
        found[str(path)] = (data, info.st_mtime_ns, info.st_ctime_ns, info.st_mode)
    return found


def test_a_certificate_changes_nothing_that_is_trusted(good_artifact: Path) -> None:
    before = open_artifact(good_artifact).artifact_id
    certificate = certificate_of(good_artifact)
    path = write_certificate(good_artifact, certificate)
    assert path.name == f"diff-{before[:16]}.json"
    assert read_certificate(good_artifact, "diff") == certificate
    assert certificate.passed
    assert open_artifact(good_artifact).artifact_id == before
    assert read_certificate(good_artifact, "build") is None


def test_a_certificate_can_be_replaced(good_artifact: Path) -> None:
    write_certificate(good_artifact, certificate_of(good_artifact))
    failed = certificate_of(
        good_artifact, verdict="fail", max_abs_error=None, first_differing_layer="layers.3.attn"
    )
    write_certificate(good_artifact, failed)
    assert read_certificate(good_artifact, "diff") == failed
    assert not failed.passed
    assert len(list((good_artifact / "reports").iterdir())) == 1


def test_a_certificate_of_another_artifact_is_refused(good_artifact: Path, tmp_path: Path) -> None:
    artifact_factory.build(tmp_path / "other.di", precision="float32")
    certificate = certificate_of(good_artifact)
    with pytest.raises(ArtifactFormatError, match="does not belong"):
        write_certificate(tmp_path / "other.di", certificate)
    assert not (tmp_path / "other.di" / "reports").exists()
    path = write_certificate(good_artifact, certificate)
    (tmp_path / "other.di" / "reports").mkdir()
    own = certificate_of(tmp_path / "other.di")
    forged = tmp_path / "other.di" / "reports" / f"diff-{own.artifact_id[:16]}.json"
    forged.write_bytes(path.read_bytes())
    (forged.parent / path.name).write_bytes(path.read_bytes())
    with pytest.raises(ArtifactFormatError, match="report on another artifact"):
        read_certificate(tmp_path / "other.di", "diff")
    assert list_certificates(tmp_path / "other.di") == ([], sorted([forged.name, path.name]))


@pytest.mark.parametrize(
    "changes",
    [{"max_abs_error": None}, {"rows_compared": 0}, {"max_abs_error": float("nan")}, {"verdict": "maybe"},
     {"top1_agreement": 1.5}, {"max_abs_error": -1.0}],
)  # fmt: skip
def test_a_certificate_that_claims_the_impossible_is_not_written(good_artifact: Path, changes: dict) -> None:
    with pytest.raises(ArtifactFormatError):
        write_certificate(good_artifact, certificate_of(good_artifact, **changes))
    assert not (good_artifact / "reports").exists()


def test_a_damaged_certificate_is_an_error_when_read_and_ignored_in_lists(good_artifact: Path) -> None:
    path = write_certificate(good_artifact, certificate_of(good_artifact))
    write_certificate(good_artifact, certificate_of(good_artifact, kind="build"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ArtifactCorruptError):
        read_certificate(good_artifact, "diff")
    certificates, ignored = list_certificates(good_artifact)
    assert [certificate.kind for certificate in certificates] == ["build"]
    assert ignored == [path.name]
    open_artifact(good_artifact).close()  # a damaged sidecar does not spoil the artifact


def test_a_failed_write_leaves_the_old_certificate(
    good_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = certificate_of(good_artifact)
    write_certificate(good_artifact, certificate)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(ArtifactWriteError, match="No space left"):
            write_certificate(good_artifact, certificate_of(good_artifact, rows_compared=1))
    assert read_certificate(good_artifact, "diff") == certificate
    assert len(list((good_artifact / "reports").iterdir())) == 1


def test_what_a_dead_writer_left_is_tolerated_and_removed(good_artifact: Path) -> None:
    certificate = certificate_of(good_artifact)
    left = good_artifact / "reports" / f"diff-{certificate.artifact_id[:16]}.json.{'0' * 32}.tmp"
    left.parent.mkdir()
    left.write_bytes(b'{"half')
    open_artifact(good_artifact).close()
    write_certificate(good_artifact, certificate)
    assert not left.exists()


def test_reports_directory_that_is_a_link_is_not_followed(good_artifact: Path, tmp_path: Path) -> None:
    certificate = certificate_of(good_artifact)
    (tmp_path / "elsewhere").mkdir()
    (good_artifact / "reports").symlink_to("../elsewhere")
    with pytest.raises(ArtifactWriteError):
        write_certificate(good_artifact, certificate)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_other_measurements_are_kept_alike(good_artifact: Path) -> None:
    with open_artifact(good_artifact) as artifact:
        report = Report(artifact_id=artifact.artifact_id, kind="cost", content={"decode": [[1, 0.5]]})
    write_report(good_artifact, report)
    assert read_report(good_artifact, "cost") == report
    assert list_certificates(good_artifact)[0] == []
    with pytest.raises(ArtifactFormatError):
        read_certificate(good_artifact, "cost")


def test_describe_says_what_is_inside(good_artifact: Path, tmp_path: Path) -> None:
    store = TrustStore(tmp_path / "trust")
    write_certificate(good_artifact, certificate_of(good_artifact))
    (good_artifact / "reports" / "stray.json").write_text("{}")
    facts = describe(good_artifact, trust_store=store)
    assert json.loads(json.dumps(facts)) == json.loads(json.dumps(facts, default=str))
    assert facts["buckets"] == {"decode": [1, 2], "prefill": [8]}
    assert facts["cache"]["block_bytes"] == 128
    assert facts["trust"] == "untrusted"
    assert facts["passes"][0]["rewrites"] == 9
    assert facts["total_file_bytes"] == sum(entry["bytes"] for entry in facts["files"])
    assert facts["certificates"][0]["verdict"] == "pass"
    assert facts["reports_ignored"] == ["stray.json"]
    text = render(facts)
    parts = [
        *(facts["artifact_id"], "128 B each", "fast_math, 0 rewrites, approximate", "hashes not checked"),
        *("diff: pass, 1 graphs", "decode-1: pass, 40 rows, error 1.5e-06", "trust       untrusted"),
        *("ignored     reports/stray.json", "weights/model.safetensors", "switched off  fuse_gate"),
    ]
    for part in parts:
        assert part in text
    store.record_built(facts["artifact_id"])
    text = render(describe(good_artifact, verify=True, trust_store=store))
    assert "trust       built" in text
    assert "not checked" not in text


def test_a_trust_store_that_is_refused_does_not_hinder_looking(good_artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "trust").mkdir(mode=0o755)
    facts = describe(good_artifact, trust_store=TrustStore(tmp_path / "trust"))
    assert facts["trust"].startswith("unknown: [DI403]")


def test_no_control_character_of_an_artifact_reaches_the_terminal(tmp_path: Path) -> None:
    passes = artifact_factory.make_manifest().passes
    toolchain = artifact_factory.make_manifest().toolchain
    hostile = msgspec.structs.replace(toolchain, compiler="gcc\x1b[2J\r\n\u202etrust: built")
    artifact_factory.build(tmp_path / "x.di", toolchain=hostile, passes=passes)
    text = render(describe(tmp_path / "x.di", trust_store=TrustStore(tmp_path / "t")))
    assert "gcc\\x1b[2J\\r\\n\\u202etrust: built" in text
    assert all(char.isprintable() or char == "\n" for char in text)


def test_describing_writes_nothing(good_artifact: Path, tmp_path: Path) -> None:
    write_certificate(good_artifact, certificate_of(good_artifact))
    before = snapshot(tmp_path)
    describe(good_artifact, verify=True, trust_store=TrustStore(tmp_path / "trust"))
    assert snapshot(tmp_path) == before


PROGRAM = """
import sys
banned = ("torch", "triton", "numpy", "safetensors",
          "deepinfer.graphs", "deepinfer.passes", "deepinfer.kernels")
class Refuse:
    def find_spec(self, name, path=None, target=None):
        assert name not in banned, name
sys.meta_path.insert(0, Refuse())
opened = []
def watch(event, args):
    if event in ("subprocess.Popen", "os.exec", "os.posix_spawn", "ctypes.dlopen", "socket.connect"):
        opened.append((event, args))
    if event == "open" and isinstance(args[2], int) and args[2] & 0o3:
        opened.append((event, args))
import deepinfer.artifacts
from deepinfer.artifacts import TrustStore, describe, render
from pathlib import Path
sys.addaudithook(watch)
text = render(describe(sys.argv[1], trust_store=TrustStore(Path(sys.argv[2]))))
assert not opened, opened
assert not set(banned) & set(sys.modules)
print(text)
"""


def test_inspecting_imports_no_torch_executes_nothing_and_opens_nothing_for_writing(
    good_artifact: Path, tmp_path: Path
) -> None:
    result = subprocess.run(
        [sys.executable, "-B", "-c", PROGRAM, str(good_artifact), str(tmp_path / "trust")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "deepseek_v41" in result.stdout
