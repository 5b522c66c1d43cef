"""CUDA C++ to PTX and machine code by NVRTC, NVIDIA's compiler library: no card, no driver, no headers.

The library comes with torch's own packages on a machine with a card, and as `nvidia-cuda-nvrtc` for others.
Contraction is off, as everywhere here. Owns nothing but the calls.
"""

from __future__ import annotations

import ctypes
import functools
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from deepinfer.errors import LoweringError, UsageError

TARGETS = ("sm_90", "sm_100")
_OPTIONS = ("--std=c++17", "--fmad=false")
_PLACES = ("nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib", "nvidia/cu12/lib")  # below a folder of packages
_FUNCTION = re.compile(r"Function properties for (\w+)|Compiling entry function '(\w+)'")
_USED = re.compile(r"Used (\d+) registers")
_SPILLED = re.compile(r"(\d+) bytes spill stores")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class CudaCode:
    """What one source became, and per kernel: registers, bytes of shared memory, spilled bytes per thread."""

    target: str
    compiler: str
    ptx: str
    cubin: bytes
    resources: dict[str, tuple[int, int, int]]


def compile_source(source: Path, target: str) -> CudaCode:
    """Compile a `.cu` file for `target`; equal sources and compilers give equal bytes.

    Raises UsageError for an unknown target or without the library, LoweringError if the compiler fails.
    """
    if target not in TARGETS:
        known = ", ".join(TARGETS)
        raise UsageError(f"unknown target {target!r}", where="target", action=f"choose one of {known}")
    text = source.read_text()
    ptx, _ = _compile(text, source.name, f"compute_{target[3:]}a", "PTX")
    cubin, log = _compile(text, source.name, f"{target}a", "CUBIN")
    return CudaCode(
        target, compiler_version(), ptx.rstrip(b"\0").decode(), cubin, _resources(log, source.name)
    )


def compiler_version() -> str:
    """As `NVRTC 13.0`. Raises UsageError without the library."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"NVRTC {major.value}.{minor.value}"


def is_available() -> bool:
    """Whether the library is there."""
    try:
        _library()
    except UsageError:
        return False
    return True


def _compile(text: str, name: str, architecture: str, result: str) -> tuple[bytes, str]:
    """Bytes of the result (`PTX` or `CUBIN`) and the compiler's log."""
    library, program = _library(), ctypes.c_void_p()
    _call("nvrtcCreateProgram", ctypes.byref(program), text.encode(), name.encode(), 0, None, None)
    try:
        options = [f"--gpu-architecture={architecture}", *_OPTIONS]
        if result == "CUBIN":
            options.append("--ptxas-options=--verbose")
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        failed = library.nvrtcCompileProgram(program, len(options), given)
        log = _bytes_of(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        if failed:
            raise LoweringError(
                f"the compiler failed: {log.strip()[:2000]}",
                where=f"{name} for {architecture}",
                action="report it with the compiler's version",
            )
        return _bytes_of(program, result), log
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _bytes_of(program: ctypes.c_void_p, result: str) -> bytes:
    size = ctypes.c_size_t()
    _call(f"nvrtcGet{result}Size", program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    _call(f"nvrtcGet{result}", program, buffer)
    return buffer.raw


def _call(function: str, *arguments: object) -> None:
    library = _library()
    code = getattr(library, function)(*arguments)
    if code:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        reason = library.nvrtcGetErrorString(code).decode()
        raise LoweringError(f"{function}: {reason}", where="NVRTC")


def _resources(log: str, name: str) -> dict[str, tuple[int, int, int]]:
    """Of every kernel, from what the assembler says of it."""
    found: dict[str, tuple[int, int, int]] = {}
    kernel, spilled = "", 0
    for line in log.splitlines():
        if match := _FUNCTION.search(line):
            kernel = match.group(1) or match.group(2)
        if match := _SPILLED.search(line):
            spilled = int(match.group(1))
        if match := _USED.search(line):
            shared = _SHARED.search(line)
            found[kernel] = (int(match.group(1)), int(shared.group(1)) if shared else 0, spilled)
    if not found:
        raise LoweringError(f"the compiler gave no resources: {log.strip()[:200]}", where=name)
    return found


@functools.cache
def _library() -> ctypes.CDLL:
    """The library of this machine: that of the Python packages, else one that the loader finds."""
    for folder in sys.path:
        for place in _PLACES:
            for path in sorted(Path(folder or ".", place).glob("libnvrtc.so.*")):
                return ctypes.CDLL(str(path))
    for name in ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise UsageError(
        "NVRTC is not installed", where="CUDA C++ kernels", action="pip install 'deepinfer[gpu]'"
    )
