"""Opens lowered graphs: verified bytes become a callable with weights bound.

Loads with torch's native runner only: no compiler, no Inductor, no child process. The bytes that were
verified are the bytes that are loaded, since they are written to a private folder that no other user can
change and that is gone afterwards. Decides nothing about trust: the caller has verified the bytes.
"""

import contextlib
import os
import shutil
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepinfer.errors import ArtifactCorruptError, ArtifactMismatchError, DeepInferError

_MAX_MESSAGE = 400


class ExpectedTensor(NamedTuple):
    """Layout of an input or a constant as the graph was built for it. A graph itself checks none of it."""

    name: str
    dtype: str  # "int64"
    shape: tuple[int, ...]
    stride: tuple[int, ...]


_ELF_HEADER = struct.Struct("<4sBBBBB7xHHIQQQIHHHHHH")  # 64-bit little-endian, up to e_shstrndx
_PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")
_SHARED_X86_64 = (3, 62)  # ET_DYN, EM_X86_64


def _check_elf(content: bytes, name: str) -> None:
    """Raise ArtifactCorruptError for bytes that end early: the system's loader would kill the process."""
    whole = False
    if len(content) >= _ELF_HEADER.size:
        (
            magic,
            bits,
            order,
            _,
            _,
            _,
            kind,
            machine,
            _,
            _,
            phoff,
            shoff,
            _,
            _,
            phsize,
            phnum,
            shsize,
            shnum,
            _,
        ) = _ELF_HEADER.unpack_from(content)
        ends = [phoff + phsize * phnum, shoff + shsize * shnum]
        whole = (magic, bits, order, kind, machine) == (b"\x7fELF", 2, 1, *_SHARED_X86_64)
        whole = whole and phsize == _PROGRAM_HEADER.size and max(ends) <= len(content)
        for index in range(phnum if whole else 0):
            header = _PROGRAM_HEADER.unpack_from(content, phoff + index * phsize)
            whole = whole and header[2] + header[5] <= len(content)  # p_offset + p_filesz
    if not whole:
        raise ArtifactCorruptError("not a complete x86-64 shared object", where=name)


def _first_line(error: Exception) -> str:
    """The message of a native error without its stack of addresses."""
    lines = str(error).splitlines()
    return lines[0][:_MAX_MESSAGE] if lines else type(error).__name__


@contextlib.contextmanager
def _private_files(shared_object: bytes, extern_json: bytes | None) -> Iterator[Path]:
    """Path of the shared object in a new folder of this user alone, with its JSON beside it."""
    folder = Path(tempfile.mkdtemp(prefix="deepinfer-graph-"))  # mode 0700
    try:
        files = {"model.so": shared_object, "model.json": extern_json}
        for name, content in files.items():
            if content is not None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
                with os.fdopen(os.open(folder / name, flags, 0o600), "wb") as file:
                    file.write(content)
        yield folder / "model.so"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _TorchRunner:
    """torch's own binding. It keeps the interpreter lock during a call."""

    def __init__(self, path: str, device: str) -> None:
        runners: Any = torch._C._aoti  # type: ignore[attr-defined]
        if device == "cpu":
            runner = runners.AOTIModelContainerRunnerCpu(path, 1)
        else:
            # single threaded: without the events by which it would wait for models, which no capture allows
            runner = runners.AOTIModelContainerRunnerCuda(path, 1, device, "", True)
        self._runner = runner
        self.run = runner.run

    def constant_names(self) -> list[str]:
        return list(self._runner.get_constant_names_to_original_fqns())

    def bind(self, constants: dict[str, Tensor]) -> None:
        self._runner.update_constant_buffer(
            constants, False, True, True
        )  # active set, complete, ours to keep


def _new_runner(path: str, device: str) -> Any:
    """The op library's runner where that library is loaded, since it releases the interpreter lock.

    On a graphics card a call only queues kernels, and torch's own runner does.
    """
    if device != "cpu":
        return _TorchRunner(path, device)
    try:
        runner_class = torch.classes.deepinfer.CompiledGraph
    except RuntimeError:  # the class is not registered
        return _TorchRunner(path, device)
    return runner_class(path)


class CompiledGraph:
    """One lowered graph. Not thread-safe: one call at a time."""

    def __init__(self, name: str, runner: Any) -> None:
        """Use `open`."""
        self.name = name
        self._runner = runner
        self._constants: dict[str, Tensor] = {}
        self.constant_names = tuple(sorted(runner.constant_names()))
        self._run = self._unbound if self.constant_names else runner.run

    @classmethod
    def open(
        cls,
        shared_object: bytes | Path,
        extern_json: bytes | None = None,
        *,
        name: str = "graph",
        device: str = "cpu",
    ) -> "CompiledGraph":
        """Load a graph from verified bytes (or from a file, which is read once and never opened again).

        `extern_json` must be given if the graph calls registered operations, whose library must be loaded.
        `device` is where its tensors are: `cpu`, or `cuda` for one built for the card of this process.
        Raises ArtifactCorruptError if the file is no shared object that this process can load, and
        ArtifactMismatchError if it needs an operation that is not registered.
        """
        content = shared_object.read_bytes() if isinstance(shared_object, Path) else shared_object
        _check_elf(content, name)
        try:
            with _private_files(content, extern_json) as path:
                return cls(name, _new_runner(str(path), device))
        except OSError as error:
            raise ArtifactCorruptError(f"cannot be written: {error.strerror}", where=name) from error
        except RuntimeError as error:
            raise _loading_error(error, name) from error

    def bind(self, constants: Mapping[str, Tensor], expected: Iterable[ExpectedTensor] = ()) -> None:
        """Give the graph its weights, by the names in `constant_names`; others are ignored.

        Tensors are used where they are, without a copy, and kept alive by this object. `expected` lists the
        layouts to compare with; without it, wrong dtypes and shapes go unnoticed. Raises
        ArtifactCorruptError if a weight is missing or of another layout.
        """
        layouts = {spec.name: spec for spec in expected}
        for name in self.constant_names:
            if name not in constants:
                raise ArtifactCorruptError(f"weight {name} is missing", where=self.name)
            if name in layouts and (fault := _difference(constants[name], layouts[name])):
                raise ArtifactCorruptError(f"weight {fault}", where=self.name)
        used = {name: constants[name] for name in self.constant_names}
        self._runner.bind(used)
        self._constants, self._run = used, self._runner.run

    def _unbound(self, inputs: list[Tensor]) -> Sequence[Tensor]:
        """Stands for the native call until weights are there: without them it would read address zero."""
        raise DeepInferError("has no weights yet", where=self.name, action="call bind first")

    def check(self, inputs: Sequence[Tensor], expected: Iterable[ExpectedTensor]) -> None:
        """Compare static inputs with the graph's signature, once, before the first `run`.

        Raises ArtifactMismatchError at the first difference. Needed because `run` checks nothing: a tensor of
        another dtype would be read as if it were right.
        """
        specs = list(expected)
        if len(inputs) != len(specs):
            raise ArtifactMismatchError(f"takes {len(specs)} inputs, got {len(inputs)}", where=self.name)
        for tensor, spec in zip(inputs, specs, strict=True):
            if fault := _difference(tensor, spec):
                raise ArtifactMismatchError(f"input {fault}", where=self.name)

    def run(self, inputs: list[Tensor]) -> Sequence[Tensor]:
        """Call the graph and return its outputs; inputs declared as mutated are written in place.

        Inputs must have the layout that `check` compares. Raises DeepInferError if the graph fails, for
        example on an index out of range; then mutated inputs may be written in part.
        """
        try:
            return self._run(inputs)
        except RuntimeError as error:
            raise DeepInferError(f"the graph failed: {_first_line(error)}", where=self.name) from error


def _difference(tensor: Tensor, spec: ExpectedTensor) -> str | None:
    """How a tensor's layout differs from the expected one, or None."""
    found = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tuple(tensor.stride()))
    if found == (spec.dtype, tuple(spec.shape), tuple(spec.stride)):
        return None
    return (
        f"{spec.name} must be {spec.dtype}{list(spec.shape)} with strides {list(spec.stride)}, "
        f"got {found[0]}{list(found[1])} with strides {list(found[2])}"
    )


def _loading_error(error: RuntimeError, name: str) -> DeepInferError:
    message = _first_line(error)
    if "failed to map segment" in message:
        action = "set TMPDIR to a folder that allows execution"
        return ArtifactCorruptError("cannot be mapped for execution", where=name, action=action)
    if "Could not find schema" in message or "not find any operator" in message:
        return ArtifactMismatchError(
            f"needs an operation that is not registered: {message}",
            where=name,
            action="load the artifact's op library first",
        )
    return ArtifactCorruptError(f"cannot be loaded: {message}", where=name)
