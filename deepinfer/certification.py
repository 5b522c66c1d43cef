"""The proof that a build makes of itself: compiled against eager, once for the same bytes.

A build whose result is known byte for byte takes over the certificate that these bytes earned. The key is
the artifact's id with the sources of the eager model and of the comparison; what failed is compared again.
"""

from pathlib import Path

import msgspec

from deepinfer.artifacts import (
    BuildCache,
    Certificate,
    TrustStore,
    canonical_bytes,
    read_certificate,
    write_certificate,
)
from deepinfer.build_key import comparison_key
from deepinfer.diff import certify_artifact
from deepinfer.errors import ArtifactMismatchError
from deepinfer.progress import Progress

_CERTIFICATE, _EXPLANATION = "certificate.json", "explanation.txt"


def certified_once(
    out_dir: Path,
    artifact_id: str,
    model_dir: Path,
    isa: str,
    cache_dir: Path,
    *,
    trust_store: TrustStore,
    progress: Progress,
    arch: str | None = None,
) -> tuple[bool | None, str]:
    """Put a certificate beside the artifact; returns the verdict, None without one, and an explanation.

    Raises what `certify_artifact` raises, but for an artifact of another processor.
    """
    proofs, key = BuildCache(cache_dir / "certified"), comparison_key(artifact_id, isa, arch)
    known = proofs.get(key)
    if known is not None:
        write_certificate(out_dir, msgspec.json.decode(known[_CERTIFICATE], type=Certificate))
        return True, known[_EXPLANATION].decode()
    try:
        report = certify_artifact(out_dir, model_dir, progress=progress, trust_store=trust_store)
    except ArtifactMismatchError as error:
        # code for another processor cannot be run here; the proof is made where it can be
        return None, f"not compared with the eager model: {error.what}"
    certificate = read_certificate(out_dir, "eager")
    if report.passed and certificate is not None:
        explanation = report.explanation.encode()
        proofs.put(key, {_CERTIFICATE: canonical_bytes(certificate), _EXPLANATION: explanation})
    return report.passed, report.explanation
