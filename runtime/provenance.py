"""What a result depends on, said by the artifact and the libraries themselves. States only what is known."""

import dataclasses
import platform
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from deepinfer.artifacts import Manifest
from deepinfer.runtime.outputs import Provenance
from deepinfer.runtime.request import Request

_PACKAGES: Final = ("deepinfer", "torch", "tokenizers", "numpy")


def provenance_of(
    artifact_id: str, manifest: Manifest, sampler: str, settings: Mapping[str, Any]
) -> Callable[[Request], Provenance]:
    """What describes the results of a loaded artifact. settings: those of this process."""
    model = {
        "type": manifest.model.model_type,
        "config_sha256": manifest.model.config_sha256,
        "weights_sha256": manifest.weights.sha256,
        "tokenizer_sha256": manifest.tokenizer_sha256,
        "precision": manifest.precision,
        "target": f"{manifest.target.device} {manifest.target.arch} {manifest.target.isa}",
    }
    versions = _versions()

    def describe(request: Request) -> Provenance:
        params = {
            field.name: getattr(request.params, field.name)
            for field in dataclasses.fields(request.params)
            if field.init
        }
        return Provenance(
            artifact_id=artifact_id,
            model=model,
            sampler=sampler,
            sampling_params={**params, "seed": request.seed},
            settings=dict(settings),
            versions=versions,
        )

    return describe


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # run from its sources
            continue
    return found
