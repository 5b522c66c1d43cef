"""Building and loading the C++ op library (`cpu/`).

Building needs g++ and happens once per hash of everything that can change the result; loading needs the
shared object alone. The bytes of the library depend on sources, flags, compiler, torch version and
instruction set, never on a folder, a time or a user. Knows nothing about artifacts beyond the error classes:
who may load which file is decided by the caller.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from deepinfer.errors import ArtifactCorruptError, ArtifactMismatchError, LoweringError, ResourceError
from deepinfer.kernels import OPS
from deepinfer.kernels.registry import NAMESPACE, register_fake

SOURCE_DIR = Path(__file__).parent / "cpu"
LIBRARY_NAME = "libdeepinfer_ops.so"
# Levels from best to least, with the processor flags that make them up (x86-64 psABI).
_AVX2 = ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave")
ISA_LEVELS: dict[str, tuple[str, tuple[str, ...]]] = {
    "avx512": ("x86-64-v4", (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")),
    "avx2": ("x86-64-v3", _AVX2),
}
# Contraction is off so that only what says fma is fused: bits must not depend on the optimiser's mood.
COMPILE_FLAGS = (
    "-std=c++20",
    "-O3",
    "-ffp-contract=off",
    "-fno-fast-math",
    "-fopenmp",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-ident",
    "-Wno-psabi",
)
LINK_FLAGS = (
    "-shared",
    "-fopenmp",
    "-s",
    "-Wl,--build-id=none",
    "-Wl,--as-needed",
    "-Wl,-z,relro,-z,now",
)
LONGEST_UNITS = ("linear.cpp", "torch_ops.cpp")  # started first, so that no core is idle at the end
OUTPUT_TAIL_CHARS = 4000
BUILD_TIMEOUT_SECONDS = 900

_load_lock = threading.Lock()
_loaded: list[tuple[str, Path]] = []  # at most one: (sha256, path) of the library of this process


def host_isa(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The best instruction-set level of this machine. Raises LoweringError if it has none of them."""
    for level in ISA_LEVELS:
        if supports_isa(level, cpuinfo):
            return level
    raise LoweringError(
        f"this processor has none of the levels {', '.join(ISA_LEVELS)}",
        where=str(cpuinfo),
        action="use x86-64",
    )


def supports_isa(level: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this machine runs code of `level`; an unknown level is not supported."""
    if level not in ISA_LEVELS:
        return False
    flags: set[str] = set()
    with contextlib.suppress(FileNotFoundError):
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("flags"):
                flags = set(line.partition(":")[2].split())
                break
    return flags.issuperset(ISA_LEVELS[level][1])


def user_cache_dir() -> Path:
    """Where libraries are kept unless the caller says otherwise."""
    try:
        return Path.home() / ".cache" / "deepinfer" / "native"
    except RuntimeError as error:
        raise ResourceError(
            "this user has no home directory to keep compiled libraries in",
            where="HOME",
            action="set HOME, or DEEPINFER_CACHE to a directory of your own",
        ) from error


def build_op_library(
    isa: str, cache_dir: Path | None = None, *, compiler: str = "g++", source_dir: Path = SOURCE_DIR
) -> Path:
    """Compile the op library for `isa`, or find it in the cache, and return its path.

    Two processes may build at once: one compiles, the other waits and takes the result. An interrupted build
    leaves no library. Raises LoweringError if the level is unknown, the compiler is missing or it fails, and
    ResourceError if the cache directory is not this user's own.
    """
    if isa not in ISA_LEVELS:
        raise LoweringError(f"unknown level {isa!r}", where="isa", action=f"one of {', '.join(ISA_LEVELS)}")
    cache_dir = user_cache_dir() if cache_dir is None else cache_dir
    make_cache_dir(cache_dir)
    target = cache_dir / f"{library_key(isa, compiler=compiler, source_dir=source_dir)[:32]}-{LIBRARY_NAME}"
    if target.exists():
        return target
    with _locked(cache_dir / "build.lock"):
        if not target.exists():
            _compile(isa, target, compiler, source_dir)
    return target


def library_key(isa: str, *, compiler: str = "g++", source_dir: Path = SOURCE_DIR) -> str:
    """Hash of everything that determines the library's bytes. Raises LoweringError without a compiler."""
    files: dict[str, bytes] = {}
    for source in source_dir.glob("*.cpp"):
        files |= _with_headers(source)
    flags = [*COMPILE_FLAGS, *_include_flags(""), *LINK_FLAGS, *_library_flags("")]
    return _key(files, flags, isa, compiler_version(compiler))


def _key(files: dict[str, bytes], flags: list[str], isa: str, version: str) -> str:
    """Hash of sources, flags, level, compiler and torch."""
    inputs = {
        "sources": {name: hashlib.sha256(data).hexdigest() for name, data in sorted(files.items())},
        "flags": flags,
        "march": ISA_LEVELS[isa][0],
        "compiler": version,
        "torch": [torch.__version__, torch.version.git_version],
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def _with_headers(source: Path) -> dict[str, bytes]:
    """A source and the headers of ours that it includes, directly or not, by path relative to it."""
    found: dict[str, bytes] = {}
    waiting = [source]
    while waiting:
        path = waiting.pop()
        name = os.path.relpath(path, source.parent)
        if name not in found and path.is_file():
            found[name] = path.read_bytes()
            included = re.findall(rb'^\s*#\s*include\s+"([^"]+)"', found[name], re.MULTILINE)
            waiting += [path.parent / os.fsdecode(each) for each in included]
    return found


def compiler_version(compiler: str = "g++") -> str:
    """First line of `g++ --version` and the target machine. Raises LoweringError if there is no compiler."""
    version = _run([_find(compiler), "--version"]).splitlines()[0]
    return f"{version} {_run([_find(compiler), '-dumpmachine']).strip()}"


def load_op_library(path: Path) -> None:
    """Register the operations of the shared object `path` with torch; again with equal bytes does nothing.

    Raises ArtifactCorruptError if the file is missing, ArtifactMismatchError if it cannot be loaded here,
    lacks an operation, or if this process already holds a library with other contents.
    """
    with _load_lock:
        try:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise ArtifactCorruptError(f"cannot be read: {error.strerror}", where=str(path)) from error
        if _loaded:
            if _loaded[0][0] == digest:
                return
            raise ArtifactMismatchError(
                f"another op library is loaded in this process, from {_loaded[0][1]}",
                where=str(path),
                action="open it in a new process",
            )
        if _registered("rms_norm") is not None:
            raise ArtifactMismatchError(
                "the operations are already registered by something else",
                where=str(path),
                action="open it in a new process",
            )
        try:
            torch.ops.load_library(str(path))
        except OSError as error:
            raise ArtifactMismatchError(
                f"cannot be loaded: {error}", where=str(path), action="build it again with this torch"
            ) from error
        _loaded.append((digest, path))
        _check_schemas(path)


def load_host_library(cache_dir: Path | None = None) -> Path:
    """Build (or find) the library for this machine, load it, and return its path.

    For processes that trace or compile: the shape rules are registered as well, which serving does not need.
    """
    path = build_op_library(host_isa(), cache_dir)
    load_op_library(path)
    for op in OPS:
        register_fake(op)
    return path


def _check_schemas(path: Path) -> None:
    for op in OPS:
        packet = _registered(op.name)
        found = None if packet is None else str(packet.default._schema).removeprefix(f"{NAMESPACE}::")
        if found != op.schema:
            raise ArtifactMismatchError(
                f"operation {op.name} is {'missing' if found is None else found}, expected {op.schema}",
                where=str(path),
                action="build it again with this version",
            )


def _registered(name: str) -> torch._ops.OpOverloadPacket | None:
    return getattr(getattr(torch.ops, NAMESPACE), name, None)


def _include_flags(folder: str) -> list[str]:
    """Flags that name torch's headers; with an empty folder, their part of the key."""
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    return [abi, f"-ffile-prefix-map={folder}=torch", f"-isystem{folder}"]


def _library_flags(folder: str) -> list[str]:
    return [f"-L{folder}", "-ltorch_cpu", "-lc10"]


def _compile(isa: str, target: Path, compiler: str, source_dir: Path) -> None:
    torch_dir, command = Path(torch.__file__).parent, _find(compiler)
    flags = [*COMPILE_FLAGS, f"-march={ISA_LEVELS[isa][0]}", *_include_flags(str(torch_dir / "include"))]
    sources = _translation_units(source_dir)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as scratch:
        version, key_flags = compiler_version(compiler), [*COMPILE_FLAGS, *_include_flags("")]

        def compile_one(source: str) -> str:
            # A library with one changed source reuses the objects of the others.
            key = _key(_with_headers(source_dir / source), key_flags, isa, version)
            kept = target.parent / f"{key[:32]}.o"
            if not kept.exists():
                # Named relative to their folder, so that no path of this machine can enter the bytes.
                output = Path(scratch) / f"{source}.o"
                _run([command, *flags, "-c", source, "-o", str(output)], cwd=source_dir, scratch=scratch)
                output.replace(kept)
            return str(kept)

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            objects = list(pool.map(compile_one, sources))
        output = Path(scratch) / LIBRARY_NAME
        link = [command, *LINK_FLAGS, "-o", str(output), *objects, *_library_flags(str(torch_dir / "lib"))]
        _run(link, scratch=scratch)
        with output.open("rb+") as file:
            os.fsync(file.fileno())
        output.replace(target)


def _translation_units(source_dir: Path) -> list[str]:
    """The sources to compile, those that take longest first: all that no other source includes."""
    sources = sorted(source_dir.glob("*.cpp"))
    included = {name for path in sources for name in _with_headers(path) if name != path.name}
    units = [path.name for path in sources if path.name not in included]
    return sorted(units, key=lambda name: (name not in LONGEST_UNITS, name))


def _find(compiler: str) -> str:
    found = shutil.which(compiler)
    if found is None:
        raise LoweringError(
            f"no C++ compiler: {compiler} was not found", where="op library", action="install g++ 11 or newer"
        )
    return found


def _run(command: list[str], cwd: Path | None = None, scratch: str | None = None) -> str:
    """Run a compiler command in a clean environment and return its output; LoweringError if it fails."""
    environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "SOURCE_DATE_EPOCH": "0"}
    if scratch:
        environment["TMPDIR"] = scratch
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=BUILD_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LoweringError(f"the C++ compiler did not run: {error}", where=command[0]) from error
    if done.returncode:
        tail = done.stdout[-OUTPUT_TAIL_CHARS:]
        raise LoweringError(f"the C++ compiler failed ({done.returncode}):\n{tail}", where="op library")
    return done.stdout


def make_cache_dir(cache_dir: Path) -> None:
    """Create a cache for this user alone, if it is missing; what is compiled there will be run.

    Raises ResourceError if it cannot be used, or if others could replace what it holds.
    """
    try:
        cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = cache_dir.stat()
    except OSError as error:
        raise ResourceError(f"cannot be used as a cache: {error.strerror}", where=str(cache_dir)) from error
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise ResourceError(
            "the cache of compiled code must be this user's, writable by nobody else; here others may write",
            where=str(cache_dir),
            action="chmod go-w it, or name a folder of your own in DEEPINFER_CACHE",
        )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
