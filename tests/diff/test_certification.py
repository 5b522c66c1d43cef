"""A build compares the same bytes with the eager model once, and never takes over what failed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepinfer import build_key, certification
from deepinfer.artifacts import Certificate, TrustStore, open_artifact, read_certificate, write_certificate
from deepinfer.certification import certified_once
from deepinfer.errors import ArtifactMismatchError
from deepinfer.progress import Progress


class Comparison:
    """Stands for the comparison, which takes minutes: writes the certificate that it is told to."""

    def __init__(self, passed: bool = True) -> None:
        self.calls, self.passed = 0, passed

    def __call__(self, artifact: Path, model_dir: Path, **options: Any) -> SimpleNamespace:
        self.calls += 1
        with open_artifact(artifact) as opened:
            certificate = Certificate(
                artifact_id=opened.artifact_id, kind="eager", created_by="test", environment={}, graphs=()
            )
        write_certificate(artifact, certificate)
        return SimpleNamespace(passed=self.passed, explanation=f"verdict {self.passed}")


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch, float32_artifact: Path, tmp_path: Path) -> Any:
    import shutil

    def run(comparison: Any, name: str = "artifact") -> tuple[bool | None, str, Certificate | None]:
        target = tmp_path / name
        shutil.copytree(float32_artifact, target, ignore=shutil.ignore_patterns("reports"))
        monkeypatch.setattr(certification, "certify_artifact", comparison)
        with open_artifact(target) as artifact:
            artifact_id = artifact.artifact_id
        (tmp_path / "cache").mkdir(mode=0o700, exist_ok=True)
        verdict = certified_once(
            target,
            artifact_id,
            tmp_path,
            "avx2",
            tmp_path / "cache",
            trust_store=TrustStore(),
            progress=Progress(),
        )
        return *verdict, read_certificate(target, "eager")

    return run


def test_the_same_bytes_are_compared_once(once: Any) -> None:
    comparison = Comparison()
    first, second = once(comparison, "first"), once(comparison, "second")
    assert comparison.calls == 1
    assert first == second and first[:2] == (True, "verdict True") and first[2] is not None


def test_a_failure_is_compared_again(once: Any) -> None:
    comparison = Comparison(passed=False)
    assert once(comparison, "first")[0] is once(comparison, "second")[0] is False
    assert comparison.calls == 2


def test_other_sources_ask_for_another_comparison(once: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = Comparison()
    once(comparison, "first")
    monkeypatch.setattr(build_key, "sources_sha256", lambda: "0" * 64)
    once(comparison, "second")
    assert comparison.calls == 2


def test_an_artifact_of_another_processor_stays_unproven(once: Any) -> None:
    def other(*_: Any, **__: Any) -> None:
        raise ArtifactMismatchError("built for avx512", where="here")

    passed, explanation, certificate = once(other)
    assert passed is None and "built for avx512" in explanation and certificate is None
