"""deepinfer: ahead-of-time compiled inference for DeepSeek-V4.1-Flash-class models.

The names below load on first use, so that `import deepinfer` is instant and needs neither torch nor the
compiler: a serving process never imports what only a build needs.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer.errors import DeepInferError

if TYPE_CHECKING:
    from deepinfer.compile import compile_model
    from deepinfer.diff import diff_artifact
    from deepinfer.graphs.eager import eager_logits
    from deepinfer.runtime.llm import LLM
    from deepinfer.runtime.llm import LLM as load
    from deepinfer.runtime.sampling_params import SamplingParams
    from deepinfer.settings import CompileConfig

__version__ = "0.1.0"

if not (Path(__file__).parent / "graphs").exists():
    # the source tree: the other packages lie beside this one, and an interpreter started there finds it first
    __path__.append(str(Path(__file__).parent.parent))

__all__ = [
    "LLM",
    "CompileConfig",
    "DeepInferError",
    "SamplingParams",
    "__version__",
    "compile_model",
    "diff_artifact",
    "eager_logits",
    "load",
]

_HOME = {
    "LLM": ("deepinfer.runtime.llm", "LLM"),
    "load": ("deepinfer.runtime.llm", "LLM"),
    "SamplingParams": ("deepinfer.runtime.sampling_params", "SamplingParams"),
    "CompileConfig": ("deepinfer.settings", "CompileConfig"),
    "compile_model": ("deepinfer.compile", "compile_model"),
    "diff_artifact": ("deepinfer.diff", "diff_artifact"),
    "eager_logits": ("deepinfer.graphs.eager", "eager_logits"),
}


def __getattr__(name: str) -> object:
    """Import a public name from its module the first time it is asked for (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'deepinfer' has no attribute {name!r}")
    module, attribute = _HOME[name]
    import_module("deepinfer.runtime")  # settles how threads wait, which must come before torch
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
