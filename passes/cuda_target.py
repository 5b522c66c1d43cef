"""A graphics card that need not be there: what Inductor asks of one is answered from a table.

The one file that replaces functions of torch for the sake of a card, and the only one with knowledge of how
they look inside. It is written for one release of torch: before anything is replaced, `check_torch` compares
the source of every function that is replaced, or called although it is private, with a recorded digest.

Nothing runs on a card here. Where Inductor would start kernels to choose among settings, the first setting is
taken. Kernels of ours are compiled from the functions themselves, by the same call as single operations, and
not from the copy of their text that Inductor makes.
"""

import ast
import contextlib
import hashlib
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from deepinfer.errors import LoweringError

TORCH_RELEASE = "2.13.0"
_ACTION = f"build for graphics cards with torch {TORCH_RELEASE} and what constraints-cuda.txt pins beside it"


@dataclass(frozen=True)
class Card:
    """What there is to know of an architecture. Only block sizes follow from it, never a result.

    Figures are the vendor's: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability",
    and the data sheets of the H100 SXM and of the B200.
    """

    name: str
    capability: tuple[int, int]
    multi_processor_count: int
    L2_cache_size: int
    total_memory: int
    shared_memory_per_multiprocessor: int
    shared_memory_per_block_optin: int = 227 << 10
    shared_memory_per_block: int = 48 << 10
    regs_per_multiprocessor: int = 65536
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    warp_size: int = 32

    @property
    def major(self) -> int:
        """First part of the compute capability."""
        return self.capability[0]

    @property
    def minor(self) -> int:
        """Second part of the compute capability."""
        return self.capability[1]


CARDS: dict[str, Card] = {
    "sm_90": Card("NVIDIA H100", (9, 0), 132, 50 << 20, 80 << 30, 228 << 10),
    "sm_100": Card("NVIDIA B200", (10, 0), 148, 126 << 20, 180 << 30, 228 << 10),
}

_INDUCTOR = "torch._inductor"
_INTERFACE = "torch._dynamo.device_interface:CudaInterface"
_HEURISTICS = f"{_INDUCTOR}.runtime.triton_heuristics"
_WRAPPER = f"{_INDUCTOR}.codegen.wrapper:PythonWrapperCodegen"
# place -> first digits of SHA-256 of its source in TORCH_RELEASE
KNOWN: dict[str, str] = {
    # replaced
    "torch.cuda:get_device_properties": "cb006011f5d15cba",
    f"{_INTERFACE}.get_device_properties": "cb006011f5d15cba",
    f"{_INTERFACE}.Worker.get_device_properties": "9dc0592acd9db02b",
    f"{_INTERFACE}.is_available": "381b50b06e32cdd2",
    f"{_INTERFACE}.is_bf16_supported": "dd9ffd146f5fb3a2",
    f"{_INDUCTOR}.runtime.triton_helpers:set_driver_to_gpu": "ebdce95fb1da9550",
    f"{_WRAPPER}.generate_and_run_autotune_block": "02e49876799d9d90",
    "torch._higher_order_ops.triton_kernel_wrap:identify_accessed_tensors": "f00e0d8497deb131",
    # called, or relied upon
    f"{_INDUCTOR}.runtime.hints:DeviceProperties.create": "760dfde73f9663e6",
    f"{_HEURISTICS}:CachingAutotuner._create_compile_meta": "e17af050168fa79d",
    f"{_HEURISTICS}:CachingAutotuner.save_gpu_kernel": "82dcd271f960a3ba",
    f"{_HEURISTICS}:CompileResult._get_arg_lists": "95dd53fd1357a287",
    f"{_INDUCTOR}.codecache:_load_triton_kernel_from_source": "cdd2778d5b76e78b",
    f"{_WRAPPER}.define_user_defined_triton_kernel": "31817b1591bd0637",
    f"{_INDUCTOR}.codegen.cpp_wrapper_gpu:CppWrapperGpu.codegen_inputs": "6850e38575a13aae",
}

# One architecture per process: Inductor keeps answers about the card for good.
_used: list[str] = []


def source_digest(place: str) -> str | None:
    """Digest of the source of `module:name.name`, 16 hex digits; None if there is no such function."""
    module, _, path = place.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = inspect.getattr_static(found, part)
        source = inspect.getsource(inspect.unwrap(getattr(found, "__func__", found)))
    except (ImportError, AttributeError, TypeError, OSError):
        return None
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def check_torch(known: Mapping[str, str] = KNOWN) -> None:
    """Raise LoweringError, naming the first place, if this torch is not the one this file was written for."""
    for place, digest in known.items():
        found = source_digest(place)
        if found != digest:
            state = "does not have" if found is None else "has another form of"
            raise LoweringError(
                f"this torch ({torch.__version__}) {state} {place}",
                where="compile-only target",
                action=_ACTION,
            )


def check_builder() -> None:
    """Raise LoweringError unless this environment can build for a card: torch, its release, and Triton."""
    if torch.version.cuda is None:
        raise LoweringError(
            f"torch {torch.__version__} is built without CUDA", where="compile-only target", action=_ACTION
        )
    if importlib.util.find_spec("triton") is None:
        raise LoweringError("Triton is not installed", where="compile-only target", action=_ACTION)
    check_torch()


@contextlib.contextmanager
def compile_only(arch: str, kernels: Mapping[int, Any], scratch: Path) -> Iterator[dict[str, bytes]]:
    """Within the block Inductor generates code for `arch`, a name of CARDS, which need not be there.

    Gives a dictionary that is filled with machine code, by the name that the generated code has for it.

    `kernels` are the Triton kernels that the graph calls, by `id` of their Python functions; Triton's cache
    goes below `scratch`. What was replaced comes back on exit. Raises LoweringError as `check_builder` does.
    """
    check_builder()
    assert not _used or _used == [arch], f"this process has built for {_used}, not {arch}"
    _used[:] = [arch]
    import triton
    from torch._inductor.runtime.hints import DeviceProperties

    card = CARDS[arch]
    codes: dict[str, bytes] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(triton.knobs.cache.scope())
        triton.knobs.cache.dir = str(scratch / "triton")
        for place, replacement in _replacements(card, arch, kernels, codes).items():
            stack.enter_context(_replaced(place, replacement))
        DeviceProperties.create.__func__.cache_clear()  # type: ignore[attr-defined]
        stack.callback(DeviceProperties.create.__func__.cache_clear)  # type: ignore[attr-defined]
        # its own way back, `reset_active`, wants a card
        stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", _driver(card)))
        yield codes


def _replacements(
    card: Card, arch: str, kernels: Mapping[int, Any], codes: dict[str, bytes]
) -> dict[str, Any]:
    def properties(device: object = None) -> Card:
        return card

    def yes(*_: object, **__: object) -> bool:
        return True

    def nothing(*_: object, **__: object) -> None:
        return None

    def compile_and_choose(wrapper: Any) -> None:
        codes.update(_compile_and_choose(wrapper, arch, kernels))

    return {
        "torch.cuda:get_device_properties": properties,
        f"{_INTERFACE}.get_device_properties": staticmethod(properties),
        f"{_INTERFACE}.Worker.get_device_properties": staticmethod(properties),
        f"{_INTERFACE}.is_available": staticmethod(yes),
        f"{_INTERFACE}.is_bf16_supported": staticmethod(yes),
        f"{_INDUCTOR}.runtime.triton_helpers:set_driver_to_gpu": nothing,
        f"{_WRAPPER}.generate_and_run_autotune_block": compile_and_choose,
        "torch._higher_order_ops.triton_kernel_wrap:identify_accessed_tensors": _remembered_accesses(),
    }


def _replaced(place: str, replacement: Any) -> Any:
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    return mock.patch.object(owner, name, replacement)


def _driver(card: Card) -> Any:
    """Triton's driver for a card that is not there: it knows the target and loads nothing."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver

    class CompileOnlyDriver(CudaDriver):
        def __init__(self) -> None:
            """Loads nothing."""

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", card.major * 10 + card.minor, card.warp_size)

        def get_current_device(self) -> int:
            return 0

    return CompileOnlyDriver()


def _remembered_accesses() -> Callable[..., Any]:
    """What arguments a kernel reads and writes: asked many times per call, answered once per form.

    Where torch cannot find out, it takes every tensor for written, weights too: here that is an error.
    """
    from torch._higher_order_ops import triton_kernel_wrap

    original = triton_kernel_wrap.identify_accessed_tensors
    remembered: dict[object, Any] = {}

    def fail(*_: object, **__: object) -> None:
        raise LoweringError("torch cannot tell what a kernel writes", where="compile-only target")

    def accesses(kernel: Any, kwargs: dict[str, Any], tma_descriptor_metadata: Any) -> Any:
        function = getattr(kernel, "fn", kernel)
        function = getattr(function, "fn", function)
        key = (id(function), tuple((name, _form(value)) for name, value in sorted(kwargs.items())))
        if key not in remembered:
            with mock.patch.object(triton_kernel_wrap.log, "warning", fail):
                remembered[key] = original(kernel, kwargs, tma_descriptor_metadata)
        return remembered[key]

    return accesses


def _form(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return "tensor", value.dtype
    if hasattr(value, "get_dtype"):  # Inductor's own tensors
        return "tensor", value.get_dtype()
    return type(value).__name__, str(value)


def _compile_and_choose(wrapper: Any, arch: str, kernels: Mapping[int, Any]) -> dict[str, bytes]:
    """Compile every kernel of the graph with its first setting and note it down for the code generator.

    Stands in for a block of code that would run all settings of all kernels on the card. Returns the machine
    code by the name that it has in the generated code. The files that Inductor makes of it are of no use: it
    names them by kernel, so that of several forms of one kernel the last is left.
    """
    from torch._inductor.codecache import _load_triton_kernel_from_source

    ours = {entry[0]: kernels[key[0]] for key, entry in wrapper.user_defined_kernel_cache.items()}
    codes = {}
    for name, definition in wrapper._kernel_name_to_body.items():
        # async_compile.triton('kernel', ''' its text ''', device_str='cuda')
        call = ast.parse(definition.strip(), mode="eval").body
        assert isinstance(call, ast.Call), definition[:200]
        kernel = _load_triton_kernel_from_source(*map(ast.literal_eval, call.args))
        chosen = _chosen(kernel, ours.get(name, kernel.fn), arch)
        kernel.save_gpu_kernel(0, chosen)
        codes[kernel.inductor_meta["kernel_name"]] = chosen.bin.asm["cubin"]
    return codes


def _chosen(kernel: Any, function: Any, arch: str) -> SimpleNamespace:
    """The compiled first setting of an Inductor kernel, in the form that its `save_gpu_kernel` reads.

    `function` is the kernel in Triton's terms.
    """
    from torch._inductor.runtime import triton_heuristics

    from deepinfer.kernels.triton.cuda_target import compile_kernel

    setting = kernel.configs[0]
    meta = kernel._create_compile_meta(setting)
    signature, constants = meta["signature"], meta["constants"]
    if "fp64" in signature.values():
        raise LoweringError("a number would reach it as a double", where=f"{function.__name__} for {arch}")
    # what is known of numbers is left out: a kernel must not depend on how many rows there are
    attributes = {
        place: known
        for place, known in meta["configs"][0].items()
        if signature[function.arg_names[place[0]]].startswith("*")
    }
    compiled = compile_kernel(
        function, signature, constants, attributes, setting.num_warps, setting.num_stages, arch
    )
    result = triton_heuristics.TritonCompileResult(compiled, setting, meta, kernel.inductor_meta)
    constexprs = triton_heuristics.get_constexprs(function)
    call_args, def_args, none_args = result._get_arg_lists(function.arg_names, constexprs)
    given = triton_heuristics.config_to_dict(setting)
    return SimpleNamespace(
        config=setting,
        bin=compiled,
        fn=function,
        def_args=[name for name in def_args if name not in given],
        call_args=[
            name
            for name in call_args
            if signature.get(name, "constexpr") != "constexpr" and name not in none_args
        ],
        global_scratch=compiled.metadata.global_scratch_size,
        profile_scratch=compiled.metadata.profile_scratch_size,
    )
