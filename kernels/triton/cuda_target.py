"""Machine code of the Triton kernels for a graphics card that need not be there.

`op_launches` finds the kernels that one call of an operation starts, `compile_launch` compiles one of them:
Triton's compiler and the assembler in its package need no device and no driver. Owns the names of targets
and the reading of resources from machine code. Knows nothing about single operations.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from deepinfer.errors import LoweringError, UsageError
from deepinfer.kernels.signature import CallSignature, TensorLayout
from deepinfer.kernels.triton.launch import Launch, recorded_launches

TARGETS = {"sm_90": 90, "sm_100": 100}  # name -> compute capability as Triton writes it
_WARP_SIZE = 32
_ALIGNMENT = 16  # bytes; tensors and cache regions that machine code is given must start at a multiple
_TYPES = {
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")
_SPILLS = re.compile(r"(\d+) bytes spill stores")


@dataclass(frozen=True)
class Resources:
    """What one program takes: registers per thread, bytes of shared memory, spilled bytes per thread."""

    threads: int
    registers: int
    shared_bytes: int
    spill_bytes: int


@dataclass(frozen=True)
class MachineCode:
    """A compiled kernel with the texts it went through and the resources it takes."""

    kernel: str
    target: str
    cubin: bytes
    ptx: str
    ttgir: str
    ttir: str
    resources: Resources


def op_launches(call: CallSignature) -> list[Launch]:
    """Return what `call.op.triton` would start for a call of this form, in order; nothing runs.

    Raises UsageError where triton is missing or the operation has no kernel.
    """
    arguments = [_without_values(argument) for argument in call.args]
    with recorded_launches() as launches:
        call.op.triton(*arguments)
    return launches


def compile_launch(launch: Launch, target: str) -> MachineCode:
    """Compile one kernel for `target`, a name of TARGETS.

    Raises UsageError for an unknown target or an interpreted process, LoweringError if the compiler fails.
    """
    if target not in TARGETS:
        known = ", ".join(TARGETS)
        raise UsageError(f"unknown target {target!r}", where="target", action=f"choose one of {known}")
    if triton.knobs.runtime.interpret:
        raise UsageError(
            "kernels of this process are interpreted",
            where=launch.name,
            action="compile in a process without TRITON_INTERPRET",
        )
    constants, signature = launch.constants, _signature(launch)
    attributes = _attributes(launch, signature)
    compiled = compile_kernel(
        launch.kernel, signature, constants, attributes, launch.warps, launch.stages, target
    )
    texts = compiled.asm
    registers, spilled = _resource_usage(texts["cubin"], texts["ptx"], target, launch.name)
    resources = Resources(launch.warps * _WARP_SIZE, registers, int(compiled.metadata.shared), spilled)
    return MachineCode(
        launch.name, target, texts["cubin"], texts["ptx"], texts["ttgir"], texts["ttir"], resources
    )


def compile_kernel(
    kernel: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    attributes: dict[tuple[int, ...], Any],
    warps: int,
    stages: int,
    target: str,
) -> Any:
    """Compile `kernel` for `target`, a name of TARGETS; returns what Triton's compiler returns.

    `signature` gives the type of every parameter, `constants` the values of those whose type is `constexpr`,
    `attributes` what is known of the others by position. This is the one way to machine code: products and
    sums are not contracted, and equal sources give equal bytes. Raises LoweringError if the compiler fails.
    """
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
    try:
        with triton.knobs.compilation.scope():
            # the line table holds file times; without it equal sources give equal bytes
            triton.knobs.compilation.disable_line_info = True
            gpu = GPUTarget("cuda", TARGETS[target], _WARP_SIZE)
            source = ASTSource(kernel, signature, constants, attributes)
            return triton.compile(source, target=gpu, options=options)
    except (RuntimeError, ValueError, triton.TritonError, subprocess.SubprocessError) as error:
        raise LoweringError(
            f"the compiler failed: {error}",
            where=f"{str(kernel.__name__).lstrip('_')} for {target}",
            action="report it with the config",
        ) from error


def form_of(launch: Launch) -> dict[str, str]:
    """What decides a kernel's machine code besides its source and the target, by name, for people to read."""
    return {
        **{name: kind for name, kind in _signature(launch).items() if kind != "constexpr"},
        **{name: str(value) for name, value in launch.constants.items()},
        "warps": str(launch.warps),
        "stages": str(launch.stages),
    }


def compile_calls(calls: Iterable[CallSignature], target: str) -> dict[str, list[MachineCode]]:
    """Compile every kernel that `calls` start, each distinct one once; by operation, in order."""
    found: dict[str, list[MachineCode]] = {}
    seen = set()
    for call in calls:
        for launch in op_launches(call):
            key = (launch.name, tuple(form_of(launch).items()))
            if key not in seen:
                seen.add(key)
                found.setdefault(call.op.name, []).append(compile_launch(launch, target))
    return found


def resource_table(codes: Iterable[MachineCode]) -> str:
    """Return a Markdown table: one line per kernel."""
    lines = [
        "| kernel | target | threads | registers | shared bytes | spilled bytes |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for code in codes:
        used = code.resources
        lines.append(
            f"| {code.kernel} | {code.target} | {used.threads} | {used.registers} | {used.shared_bytes} "
            f"| {used.spill_bytes} |"
        )
    return "\n".join(lines) + "\n"


def _without_values(argument: object) -> object:
    if isinstance(argument, TensorLayout):
        return torch.empty_strided(argument.shape, argument.stride, dtype=argument.dtype, device="meta")
    return argument


def _attributes(launch: Launch, signature: dict[str, str]) -> dict[tuple[int, ...], Any]:
    return {
        (index,): [["tt.divisibility", _ALIGNMENT]]
        for index, parameter in enumerate(launch.kernel.params)
        if signature[parameter.name].startswith("*")
    }


def _signature(launch: Launch) -> dict[str, str]:
    """Type of every parameter by name, as Triton's compiler reads it."""
    names = [parameter.name for parameter in launch.kernel.params]
    given = dict(zip(names, launch.arguments, strict=False))
    assert given.keys() | launch.constants.keys() == set(names), (launch.name, names)
    return {name: _type_of(given[name]) if name in given else "constexpr" for name in names}


def _type_of(argument: Any) -> str:
    if isinstance(argument, torch.Tensor):
        return f"*{_TYPES[argument.dtype]}"
    if isinstance(argument, float):
        return "fp32"
    assert isinstance(argument, int) and not isinstance(argument, bool), argument
    return "i32" if -(2**31) <= argument < 2**31 else "i64"


def _resource_usage(cubin: bytes, ptx: str, target: str, name: str) -> tuple[int, int]:
    """Registers and spilled bytes per thread."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        found = _matched(_USAGE, _output(triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(path)), name)
        registers, stack = int(found.group(1)), int(found.group(2))
        if not stack:
            return registers, 0
        # a stack may hold the return address of a division's rare path alone: the assembler tells them apart
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        knobs = triton.knobs.nvidia
        assembler = knobs.ptxas_blackwell if TARGETS[target] >= 100 else knobs.ptxas
        options = ("-v", "--fmad=false", f"--gpu-name={target}a", str(source), "-o", str(path))
        return registers, int(_matched(_SPILLS, _output(assembler.path, *options), name).group(1))


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def _matched(pattern: re.Pattern[str], text: str, name: str) -> re.Match[str]:
    found = pattern.search(text)
    if found is None:
        raise LoweringError(f"the tools of the compiler gave no resources: {text.strip()[:200]}", where=name)
    return found
