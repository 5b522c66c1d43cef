"""What tests for graphics cards build, and the machine code inside it."""

import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from deepinfer.errors import LoweringError
from deepinfer.passes import toolchain
from deepinfer.passes.cuda_target import check_builder
from deepinfer.settings import CompileConfig

OPTIONS = CompileConfig(
    target="cuda:sm_90", precision="native", decode_rows=(4,), prefill_tokens=(16,), max_num_seqs=4, jobs=1
)
GRAPHS = ("decode-4", "logits-4", "prefill-16")  # of such a build
_ELF_CUDA = 190  # EM_CUDA
_ABI_VERSION = 8  # place in the header of the version that says how flags are laid out
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")


def architecture(code: bytes) -> tuple[int, bool]:
    """Compute capability that machine code is for, as 90, and whether it is for that one alone (`sm_90a`)."""
    flags = _HEADER.unpack_from(code)[7]
    if code[_ABI_VERSION] < 8:
        return flags & 0xFF, bool(flags & 0x800)  # EF_CUDA_SM, EF_CUDA_ACCELERATORS
    number = (flags >> 8) & 0xFF
    return number, b"-arch sm_%da " % number in code  # the note of how it was assembled


def machine_codes(content: bytes) -> Iterator[bytes]:
    """The ELF files of a card's machine code inside a shared object."""
    start = content.find(b"\x7fELF", 1)
    while start >= 0:
        header = _HEADER.unpack_from(content, start)
        sections, size, count = header[6], header[11], header[12]
        if header[2] == _ELF_CUDA:
            yield content[start : start + sections + size * count]
        start = content.find(b"\x7fELF", start + 4)


def _cannot_build() -> str:
    """Why this environment builds for no card; empty if it does."""
    try:
        check_builder()
        toolchain._cuda_file("include/cuda.h")
    except LoweringError as error:
        return str(error)
    return ""


def loader_environment(driver_stand_in: Path) -> dict[str, str]:
    """The environment in which the system finds the libraries of torch, and a driver that does nothing."""
    cuda = toolchain.TORCH_DIR.parent / "nvidia"
    folders = [driver_stand_in, toolchain.TORCH_DIR / "lib", *sorted(cuda.glob("*/lib"))]
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(map(str, folders))}


def open_with_every_symbol(shared_objects: Sequence[Path], environment: dict[str, str]) -> None:
    """Opens them in a process of its own, with every symbol looked up at once; fails if one is not found."""
    code = "import ctypes, os, sys, torch; [ctypes.CDLL(path, mode=os.RTLD_NOW) for path in sys.argv[1:]]"
    command = [sys.executable, "-P", "-c", code, *map(str, shared_objects)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


CROSS_BUILDS = [  # marks of tests that build for a card where there is none
    pytest.mark.slow,
    pytest.mark.skipif(bool(_cannot_build()), reason=_cannot_build() or "can build"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a card"),
]
