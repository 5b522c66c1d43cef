"""The C++ compiler: flags per instruction set, and one shared object from generated sources.

The result depends on sources, flags, compiler and torch headers only: paths are mapped away, symbols and
build ids are stripped, and nothing is asked of the builder's processor. Knows nothing about graphs.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from deepinfer.errors import LoweringError

TORCH_DIR = Path(torch.__file__).parent
_TAIL_LINES = 12


@dataclass(frozen=True)
class Isa:
    """An instruction set level: what the compiler may use and how wide generated vectors are."""

    name: str
    march: str
    vector_bits: int
    capability: str


ISA_LEVELS: dict[str, Isa] = {
    isa.name: isa
    for isa in (
        Isa("avx2", "x86-64-v3", 256, "CPU_CAPABILITY_AVX2"),
        Isa("avx512", "x86-64-v4", 512, "CPU_CAPABILITY_AVX512"),
    )
}

# Strict IEEE arithmetic: no contraction, no reassociation, signed zeros and NaN kept. Trapping is nobody's
# business here, and without the flag no select is vectorised.
_NUMERICS = ("-ffp-contract=off", "-fno-trapping-math", "-fno-tree-loop-vectorize")
_DEFINES = (
    "-DTORCH_INDUCTOR_CPP_WRAPPER",
    "-DSTANDALONE_TORCH_HEADER",
    "-DC10_USING_CUSTOM_GENERATED_MACROS",
    "-DNDEBUG",
)
# of the CUDA driver, by the code that Inductor generates
DRIVER_CALLS = (
    "cuModuleLoad",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuModuleGetFunction",
    "cuFuncSetAttribute",
    "cuLaunchKernel",
    "cuGetErrorString",
)
_LINK = ("-shared", "-Wl,--build-id=none", "-Wl,-z,noexecstack", "-Wl,--as-needed", "-s")


def isa_level(name: str) -> Isa:
    """The level called `name`; raises LoweringError for another name."""
    if name not in ISA_LEVELS:
        raise LoweringError(
            f"unknown instruction set {name!r}", where="isa", action=f"use one of {', '.join(ISA_LEVELS)}"
        )
    return ISA_LEVELS[name]


def compiler() -> str:
    """Path of the C++ compiler (`CXX`, else g++); raises LoweringError when there is none."""
    name = os.environ.get("CXX", "g++")
    path = shutil.which(name)
    if path is None:
        raise LoweringError(
            f"no C++ compiler {name!r}", where="PATH", action="install g++ or set CXX; only building needs it"
        )
    return path


def compile_flags(isa: Isa) -> tuple[str, ...]:
    """Flags that decide the code, without include paths: part of a toolchain's identity."""
    machine = (f"-march={isa.march}", f"-D{isa.capability}")
    return ("-std=c++20", "-fPIC", "-w", *_NUMERICS, *machine, *_DEFINES)


def toolchain_identity(isa: str, arch: str | None = None) -> dict[str, str]:
    """What besides the graph decides a shared object's bytes: compiler, flags, torch. No paths.

    For a graphics card's `arch`, Triton as well, whose package holds the assembler. Raises LoweringError
    where a compiler is missing.
    """
    version = subprocess.run(
        [compiler(), "--version"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "LC_ALL": "C"},
    )
    identity = {
        "compiler": version.stdout.partition("\n")[0],
        "flags": " ".join((*compile_flags(isa_level(isa)), *_LINK)),
        "torch": torch.__version__,
    }
    if arch is not None:
        try:
            identity["compiler"] += f", triton {metadata.version('triton')}"
        except metadata.PackageNotFoundError as error:
            raise LoweringError(
                "Triton is not installed", where="toolchain", action="install what constraints-cuda.txt names"
            ) from error
    return identity


def _failure(name: str, returncode: int, output: bytes) -> LoweringError:
    lines = output.decode("utf-8", "replace").replace(str(TORCH_DIR), "torch").splitlines()
    errors = [line for line in lines if "error" in line][:1]
    tail = "\n".join(errors + lines[-_TAIL_LINES:])
    return LoweringError(f"the C++ compiler failed with status {returncode}:\n{tail}", where=name)


def _start(arguments: Sequence[str], work_dir: Path) -> subprocess.Popen[bytes]:
    command = [compiler(), *arguments]
    return subprocess.Popen(command, cwd=work_dir, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def _finish(process: subprocess.Popen[bytes], name: str) -> None:
    output, _ = process.communicate()
    if process.returncode:
        raise _failure(name, process.returncode, output)


def build_shared_object(
    sources: Sequence[tuple[str, str]],
    objects: Sequence[Path],
    isa: Isa,
    work_dir: Path,
    output: str,
    *,
    cuda: bool = False,
) -> Path:
    """Compile `(file name, optimisation level)` sources side by side, link them with `objects`, strip.

    With `cuda` they may use CUDA; every symbol is then looked for, in torch's libraries and the driver's.

    File names are relative to `work_dir`, where the result is written as `output`. Raises LoweringError with
    the end of the compiler's output.
    """
    mapped = [f"-ffile-prefix-map={TORCH_DIR}=torch", f"-ffile-prefix-map={work_dir}=."]
    include = [f"-I{TORCH_DIR}/include", f"-I{TORCH_DIR}/include/torch/csrc/api/include"]
    libraries = [f"-L{TORCH_DIR}/lib", "-ltorch_cpu"]
    if cuda:
        include += ["-DUSE_CUDA", f"-I{_cuda_file('include/cuda.h').parent}"]
        runtime = _cuda_file("lib/libcudart.so.13")
        libraries += ["-ltorch_cuda", "-lc10_cuda", "-lc10", str(runtime), *_driver_stub(work_dir)]
        libraries += ["-Wl,-z,defs"]
    common = [*compile_flags(isa), *mapped, *include]
    running = [
        (name, _start([level, *common, "-c", name, "-o", f"{name}.o"], work_dir)) for name, level in sources
    ]
    try:
        for name, process in running:
            _finish(process, name)
    finally:
        for _, process in running:
            if process.poll() is None:
                process.kill()
                process.wait()
    inputs = [f"{name}.o" for name, _ in sources] + [str(path) for path in objects]
    link = [*_LINK, "-o", output, *inputs, *libraries]
    _finish(_start(link, work_dir), output)
    return work_dir / output


def _cuda_file(name: str) -> Path:
    """A file of CUDA in the packages beside torch; raises LoweringError where one of them is missing."""
    root = TORCH_DIR.parent / "nvidia" / "cu13"
    for each in (name, "include/crt/host_defines.h"):  # of a package of its own
        if not (root / each).exists():
            raise LoweringError(
                f"the packages of CUDA beside torch lack {each}",
                where="toolchain",
                action="install what constraints-cuda.txt names",
            )
    return root / name


def _driver_stub(work_dir: Path) -> list[str]:
    """Link flags for the driver's library, which is part of no package: a stand-in has its name and symbols.

    It is there for the linker alone. What is linked finds the real one, by the name inside, where it runs.
    """
    (work_dir / "driver").mkdir()
    calls = "".join(f'extern "C" void {name}() {{}}\n' for name in DRIVER_CALLS)
    (work_dir / "driver" / "stub.cpp").write_text(calls)
    soname = "-Wl,-soname,libcuda.so.1"
    _finish(
        _start(["-shared", "-fPIC", soname, "driver/stub.cpp", "-o", "driver/libcuda.so"], work_dir),
        "driver stub",
    )
    return [f"-L{work_dir}/driver", "-lcuda"]
