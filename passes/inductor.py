"""Inductor as a code generator: a graph module in, C++ source out.

The only file that touches Inductor, and the only one with knowledge of its internals: three functions of
torch 2.13 are replaced during a call, each for the reason given beside it; nothing of a call outlives it.
Knows nothing about compiling.
"""

import contextlib
import functools
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import fx

from deepinfer.errors import LoweringError
from deepinfer.passes.cuda_target import compile_only
from deepinfer.passes.toolchain import Isa

# what is added for a graphics card
_CARD_OPTIONS: dict[str, Any] = {
    "aot_inductor.embed_kernel_binary": True,  # machine code is in the shared object, not beside it
    "compile_threads": 1,  # what is replaced for the card is replaced in this process alone
    "max_autotune_gemm": False,
    "_use_fp64_for_unbacked_floats": False,  # else a number given to a kernel is a double there
}

OPTIONS: dict[str, Any] = {
    "aot_inductor.package": True,
    "aot_inductor.package_cpp_only": True,  # generate only: flags, linking and paths are ours
    "aot_inductor.package_constants_in_so": False,
    "aot_inductor.precompile_headers": False,
    "emulate_precision_casts": True,  # else bf16 roundings between fused operations are dropped
    "pattern_matcher": False,  # else mm + add becomes addmm, which rounds once where the model rounds twice
    "always_keep_tensor_constants": True,  # else weights of up to 8 elements become literals in the code
    "joint_graph_constant_folding": False,
    "reorder_for_locality": False,  # else reads move behind cache writes, and the cache is copied
    "cpp.threads": 1,  # sums must not depend on the number of threads; heavy operations have their own
    "max_autotune": False,
    "freezing": False,
}


@dataclass(frozen=True)
class Generated:
    """What Inductor leaves: the source, the object with its (empty) constant section, the extern calls.

    `machine_code` is that of kernels on a card, by the name that the source has for it. `copied_back` are
    positions of inputs that are computed elsewhere and copied back as a whole.
    """

    source: str
    constants_object: Path
    extern_json: Path | None
    copied_back: tuple[int, ...]
    machine_code: dict[str, bytes]


def _replaced(module: Any, name: str, value: Any) -> Any:
    """A patch of one internal function; raises LoweringError if this torch does not have it."""
    if not hasattr(module, name):
        raise LoweringError(
            f"this torch ({torch.__version__}) has no {module.__name__}.{name}",
            where="Inductor",
            action="build with torch 2.13",
        )
    return mock.patch.object(module, name, value)


def _copied_back(graph: fx.Graph) -> list[int]:
    """Positions of inputs that a graph of Inductor's last level still writes by a copy of the whole.

    A copy of an input onto itself is what a write by an operation leaves behind; no code comes from it.
    """
    inputs = {node: index for index, node in enumerate(graph.find_nodes(op="placeholder"))}
    copies = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    targets = [node.args[0] for node in copies if node.args[0] is not node.args[1]]
    return sorted({inputs[target] for target in targets if target in inputs})


@contextlib.contextmanager
def _pinned(isa: Isa, scratch: Path, copied_back: list[int]) -> Iterator[None]:
    """Generate for `isa` on any processor, from fake weights, with all caches below `scratch`.

    Fills `copied_back` when the graph has gone through Inductor's own rewrites.
    """
    import sympy
    from torch._inductor import compile_fx, cpu_vec_isa
    from torch._inductor import graph as inductor_graph

    base = {256: cpu_vec_isa.VecAVX2, 512: cpu_vec_isa.VecAVX512}[isa.vector_bits]

    class Pinned(base):  # type: ignore[valid-type, misc]
        """The level as given: neither probed by a trial compilation nor widened by what the builder has."""

        __hash__ = cpu_vec_isa.VecISA.__hash__

        def __bool__(self) -> bool:
            return True

    level = Pinned()
    rewrite = compile_fx._recursive_post_grad_passes

    def rewrite_and_look(module: fx.GraphModule, *args: Any, **kwargs: Any) -> None:
        rewrite(module, *args, **kwargs)
        copied_back.extend(_copied_back(module.graph))

    with (
        mock.patch.dict(
            os.environ, {"TORCHINDUCTOR_CACHE_DIR": str(scratch / "cache"), "TMPDIR": str(scratch)}
        ),
        _replaced(cpu_vec_isa, "valid_vec_isa_list", lambda: [level]),
        # The original compares storages to merge equal constants; fake weights have none.
        _replaced(inductor_graph, "is_same_tensor", lambda first, second: first is second),
        # A pure function that is asked the same few hundred questions: a third of the time otherwise.
        mock.patch.object(sympy, "simplify", functools.cache(sympy.simplify)),
        # Whether a cache write stayed in place is decided in there, and told nowhere else.
        _replaced(compile_fx, "_recursive_post_grad_passes", rewrite_and_look),
    ):
        yield


def _gist(error: Exception) -> str:
    """The first line of an error, and the line that names the cause where the first does not."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    causes = [line for line in lines[1:] if "error" in line.lower()]
    return "; ".join(lines[:1] + causes[:1])


def generate(
    module: fx.GraphModule,
    arguments: list[Any],
    name: str,
    scratch: Path,
    isa: Isa,
    card: tuple[str, Mapping[int, Any]] | None = None,
) -> Generated:
    """Generate C++ for a graph whose weights are attributes; all tensors fake.

    `scratch` must be an empty folder. `card` is the architecture of a graphics card, for a graph on one, with
    the Triton kernels that the graph calls. Raises LoweringError with Inductor's first line of explanation.
    """
    from torch import _inductor

    stem = re.sub(r"\W", "_", name)
    options = {
        **OPTIONS,
        **(_CARD_OPTIONS if card else {}),
        "cpp.simdlen": isa.vector_bits,
        "cpp.march": isa.march,
        "aot_inductor.model_name_for_generated_files": stem,
        "aot_inductor.output_path": str(scratch / "generated"),
    }
    copied_back: list[int] = []
    try:
        target: contextlib.AbstractContextManager[dict[str, bytes]] = contextlib.nullcontext({})
        if card is not None:
            target = compile_only(*card, scratch)
        with _pinned(isa, scratch, copied_back), target as machine_code, torch.no_grad():
            files = _inductor.aot_compile(module, tuple(arguments), options=options)
    except LoweringError:
        raise
    except Exception as error:
        raise LoweringError(f"Inductor failed: {_gist(error)}", where=name) from error
    paths = [Path(file) for file in files if isinstance(file, str)] if isinstance(files, list) else []
    by_end = {end: [path for path in paths if path.name.endswith(end)] for end in (".cpp", ".weights.o")}
    extern = [path for path in paths if path.name == f"{stem}.wrapper.json"]
    if any(len(found) != 1 for found in by_end.values()):
        raise LoweringError("Inductor left other files than expected", where=name, action="use torch 2.13")
    return Generated(
        source=by_end[".cpp"][0].read_text(encoding="utf-8"),
        constants_object=by_end[".weights.o"][0],
        extern_json=extern[0] if extern else None,
        copied_back=tuple(copied_back),
        machine_code=machine_code,
    )
