"""Starts CUDA C++ kernels on the card of this process, through the driver's own interface.

A source is compiled for the card at its first start, unless `use_machine_code` gave its machine code before.
Everything is put on torch's current stream, so a CUDA graph captures it. Nothing here was run without a card.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from deepinfer.errors import LoweringError, UsageError
from deepinfer.kernels.cuda.launch import CudaLaunch, current_starter
from deepinfer.kernels.cuda.nvrtc import compile_source

_cubins: dict[Path, bytes] = {}
_modules: dict[tuple[Path, int], ctypes.c_void_p] = {}
_functions: dict[tuple[Path, str, int], ctypes.c_void_p] = {}


def use_machine_code(source: Path, cubin: bytes) -> None:
    """Machine code of a source for this process, instead of compiling it; before its first start."""
    assert not any(path == source for path, _ in _modules), source
    _cubins[source] = cubin


def launch(source: Path, kernel: str, grid: tuple[int, int], threads: int, *arguments: object) -> None:
    """Start a kernel on the current stream, or hand it to who asked for it; an empty grid starts nothing.

    Raises UsageError for tensors that are not on a card, LoweringError where the driver refuses.
    """
    if 0 not in grid:
        (current_starter() or start)(CudaLaunch(source, kernel, grid, threads, arguments))


def start(launched: CudaLaunch) -> None:
    """Put a launch on the current stream.

    Raises UsageError for tensors that are not on a card, LoweringError where the driver refuses.
    """
    devices = {each.device for each in launched.arguments if isinstance(each, torch.Tensor)}
    (device,) = devices if len(devices) == 1 else (None,)
    if device is None or device.type != "cuda":
        places = ", ".join(sorted(map(str, devices)))
        raise UsageError(
            f"the tensors are on {places}", where=launched.kernel, action="move them to one CUDA device"
        )
    function = _function(launched.source, launched.kernel, device.index)
    values = launched.argument_values()
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))  # type: ignore[arg-type]
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    grid, threads = launched.grid, launched.threads
    _call("cuLaunchKernel", function, *grid, 1, threads, 1, 1, 0, stream, pointers, None)


def _function(source: Path, kernel: str, device: int) -> ctypes.c_void_p:
    key = (source, kernel, device)
    if key not in _functions:
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # makes the card's context the current one
            function = ctypes.c_void_p()
            module = _module(source, device)
            _call("cuModuleGetFunction", ctypes.byref(function), module, kernel.encode())
        _functions[key] = function
    return _functions[key]


def _module(source: Path, device: int) -> ctypes.c_void_p:
    if (source, device) not in _modules:
        if source not in _cubins:
            major, minor = torch.cuda.get_device_capability(device)
            _cubins[source] = compile_source(source, f"sm_{major}{minor}").cubin
        module = ctypes.c_void_p()
        _call("cuModuleLoadData", ctypes.byref(module), _cubins[source])
        _modules[source, device] = module
    return _modules[source, device]


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise UsageError("there is no NVIDIA driver here", where="libcuda.so.1") from error


def _call(function: str, *arguments: object) -> None:
    library = _library()
    code = getattr(library, function)(*arguments)
    if code:
        text = ctypes.c_char_p()
        library.cuGetErrorString(code, ctypes.byref(text))
        reason = (text.value or b"unknown error").decode()
        raise LoweringError(f"{function}: {reason}", where="CUDA driver")
