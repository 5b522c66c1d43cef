"""Keys of the build cache: digests of everything that decides a graph's files.

There are two. The key of a graph is known before any work: the sources of the packages that make a graph are
part of it, so nothing is ever taken from the cache that this version would build otherwise. The key of a
lowering is known after the passes: a changed source that left the graph as it was needs no compiler.
"""

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import deepinfer.graphs
import deepinfer.kernels
import deepinfer.passes
from deepinfer.artifacts import canonical_bytes
from deepinfer.passes.toolchain import toolchain_identity

# model, ops and passes; the drivers around them (eager runs, settings) do not reach a graph
_PACKAGES = (deepinfer.graphs, deepinfer.kernels, deepinfer.passes)
_BUILDER_FILES = ("build_worker.py", "build_key.py")


@cache
def sources_sha256() -> str:
    """Digest over the names and bytes of every source file that takes part in building a graph."""
    digest = hashlib.sha256()
    for package in _PACKAGES:
        _update_from_package(digest, package)
    for name in _BUILDER_FILES:
        _update(digest, name, Path(__file__).parent / name)
    return digest.hexdigest()


def _update_from_package(digest: "hashlib._Hash", package: ModuleType) -> None:
    root = Path(package.__path__[0])
    files = [path for pattern in ("*.py", "*.cpp", "*.h") for path in root.rglob(pattern)]
    for path in sorted(files, key=lambda path: path.relative_to(root).as_posix()):
        _update(digest, f"{package.__name__}/{path.relative_to(root).as_posix()}", path)


def _update(digest: "hashlib._Hash", name: str, path: Path) -> None:
    digest.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())


def graph_key(job: dict[str, Any]) -> str:
    """Return the key of one graph; `job` holds what the build depends on, without paths."""
    return _key(job["isa"], job["arch"], job=job, sources=sources_sha256())


def lowering_key(
    text: str,
    node_names: Sequence[str],
    name: str,
    isa: str,
    arch: str | None = None,
    unaligned: Sequence[int] = (),
) -> str:
    """Return the key of what one graph is lowered to.

    `text` and `node_names` are those of the graph after all passes; names reach the generated code. For a
    graphics card's `arch` kernels become part of it, and so do the inputs that start anywhere, `unaligned`.
    """
    digest = hashlib.sha256()
    _update_from_package(digest, deepinfer.passes)
    if arch is not None:
        _update_from_package(digest, deepinfer.kernels)
    parts = {"nodes": list(node_names), "unaligned": list(unaligned), "sources": digest.hexdigest()}
    return _key(isa, arch, text=text, name=name, isa=isa, arch=arch, **parts)


def comparison_key(artifact_id: str, isa: str, arch: str | None = None) -> str:
    """Return the key of an artifact's comparison with the eager model.

    The artifact's id covers its files and the checkpoint; the eager model and the comparison are our sources.
    """
    digest = hashlib.sha256(sources_sha256().encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        _update(digest, path.name, path)
    return _key(isa, arch, artifact_id=artifact_id, sources=digest.hexdigest())


def _key(target_isa: str, target_arch: str | None, **identity: Any) -> str:
    """Digest of an identity together with the tools that make native code for a target."""
    toolchain = toolchain_identity(target_isa, target_arch)
    tools = {
        "toolchain": {name: str(value) for name, value in toolchain.items()},
        "torch": [str(torch.__version__), str(torch.version.git_version)],
    }
    return hashlib.sha256(canonical_bytes(identity | tools)).hexdigest()
