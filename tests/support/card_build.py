"""What tests for graphics cards build, and the machine code inside it."""

import struct
from collections.abc import Iterator

from deepinfer.settings import CompileConfig

OPTIONS = CompileConfig(
    target="cuda:sm_90", precision="native", decode_rows=(4,), prefill_tokens=(16,), max_num_seqs=4, jobs=1
)
_ELF_CUDA = 190  # EM_CUDA
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")


def architecture(code: bytes) -> tuple[int, bool]:
    """Compute capability that machine code is for, as 90, and whether it is for that one alone (`sm_90a`)."""
    flags = _HEADER.unpack_from(code)[7]
    return flags & 0xFF, bool(flags & 0x800)  # EF_CUDA_SM, EF_CUDA_ACCELERATORS


def machine_codes(content: bytes) -> Iterator[bytes]:
    """The ELF files of a card's machine code inside a shared object."""
    start = content.find(b"\x7fELF", 1)
    while start >= 0:
        header = _HEADER.unpack_from(content, start)
        sections, size, count = header[6], header[11], header[12]
        if header[2] == _ELF_CUDA:
            yield content[start : start + sections + size * count]
        start = content.find(b"\x7fELF", start + 4)
