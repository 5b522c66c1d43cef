"""A small step function with everything that is hard about lowering, and one lowering of it per test process.

Weights of several dtypes (two of them tiny), two regions in one arena written in place and read before and
after, one by `index_put_` and one by an operation, integer indices, a stable sort, and bf16 roundings.
"""

import atexit
import functools
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

TORCH_DIR = Path(torch.__file__).parent
HIDDEN, RECORD, BLOCKS, ENTRIES, ROWS = 64, 66, 5, 8, 4
REGION_BYTES = ENTRIES * RECORD
BLOCK_BYTES = 2 * REGION_BYTES + 64


@functools.cache
def scratch() -> Path:
    """A folder for this process, removed at its end."""
    folder = Path(tempfile.mkdtemp(prefix="toy-graph-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def compile_library(sources: list[Path], output: Path) -> Path:
    """A shared library that registers operations."""
    include = [f"-I{TORCH_DIR}/include", f"-I{TORCH_DIR}/include/torch/csrc/api/include"]
    link = [f"-L{TORCH_DIR}/lib", "-ltorch_cpu", "-lc10"]
    flags = ["-O1", "-shared", "-fPIC", "-std=c++20", "-fvisibility=hidden", "-w"]
    subprocess.run(["g++", *flags, *map(str, sources), "-o", str(output), *include, *link], check=True)
    return output


@functools.cache
def toy_library() -> Path:
    """The compiled test operations; not loaded."""
    return compile_library([Path(__file__).parent / "toy_ops.cpp"], scratch() / "libtoy.so")


def load_toy_ops() -> None:
    """Load the test operations into this process, with their shape rules; once."""
    if not hasattr(torch.ops.deepinfer, "toy_gate"):
        register_toy_ops(toy_library())


def register_toy_ops(library: Path) -> None:
    """Load a compiled library of the test operations, and add their shape rules."""
    torch.ops.load_library(str(library))
    torch.library.register_fake("deepinfer::toy_scale", lambda x, weight, factor: torch.empty_like(x))
    torch.library.register_fake("deepinfer::toy_write", lambda region, block, entry, record: None)
    torch.library.register_fake("deepinfer::toy_gate", lambda x: torch.empty_like(x))


def toy_weights(seed: int) -> dict[str, Tensor]:
    """Weights by name: bf16, float32, bytes, and two small enough to tempt a compiler to inline them."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "embedding": torch.randn(100, HIDDEN, generator=draw).bfloat16(),
        "projection": torch.randn(HIDDEN, HIDDEN, generator=draw).bfloat16(),
        "packed": torch.randint(0, 256, (HIDDEN,), generator=draw, dtype=torch.uint8),
        "norm": torch.randn(HIDDEN, generator=draw),
        "four": torch.randn(4, generator=draw),
        "scalar": torch.randn((), generator=draw),
        "unused": torch.randn(3, generator=draw),
    }


class ToyStep(nn.Module):
    """token_ids [T], positions [T], block_table [T, 3], two regions [blocks, entries, 66] -> four outputs."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        for name, value in weights.items():
            self.register_buffer(name, value)

    def forward(
        self, token_ids: Tensor, positions: Tensor, block_table: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, ...]:
        x = self.embedding[token_ids]
        y = torch.ops.deepinfer.toy_scale(x.float(), self.norm, 0.5).to(torch.bfloat16)
        y = torch.nn.functional.linear(y, self.projection) + x  # rounds twice
        z = (y.float() * self.packed.float() + self.four.repeat(HIDDEN // 4) * self.scalar).to(torch.bfloat16)
        z = torch.ops.deepinfer.toy_gate(z.float()).to(torch.bfloat16)
        position = positions.clamp(min=0)
        block = block_table.gather(1, (position // ENTRIES)[:, None])[:, 0]
        entry = position % ENTRIES
        before = keys[block, entry]
        record = torch.cat([z.view(torch.uint8)[:, :64], z.view(torch.uint8)[:, 126:]], 1)
        keys.index_put_((block, entry), record)
        torch.ops.deepinfer.toy_write(values, block, entry, record ^ 1)
        after = keys[block]  # [T, entries, 66]
        sums = after.to(torch.int64).sum(-1)
        order = torch.sort(sums, dim=-1, descending=True, stable=True).indices[:, :2]
        score = torch.gather(sums, 1, order) + values[block].to(torch.int64).sum((-1, -2))[:, None]
        return z, order.contiguous(), score, before.to(torch.bfloat16) + z[:, :1]


def regions_of(arena: Tensor) -> list[Tensor]:
    """The two regions of one arena of bytes."""
    shape, strides = (BLOCKS, ENTRIES, RECORD), (BLOCK_BYTES, RECORD, 1)
    return [torch.as_strided(arena, shape, strides, offset) for offset in (0, REGION_BYTES)]


def new_arena(seed: int) -> Tensor:
    """Random bytes."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (BLOCKS * BLOCK_BYTES,), generator=draw, dtype=torch.uint8)


def step_inputs() -> list[Tensor]:
    """Row inputs that name a different record each."""
    return [
        torch.tensor([3, 7, 99, 0]),
        torch.tensor([5, 14, 12, 23]),
        torch.tensor([[1, 2, 3], [4, 2, 3], [2, 4, 3], [2, 3, 1]]),
    ]


def capture_toy(seed: int = 0) -> torch.export.ExportedProgram:
    """The step traced with regions in separate storages."""
    load_toy_ops()
    regions = [regions_of(torch.zeros(BLOCKS * BLOCK_BYTES, dtype=torch.uint8))[0] for _ in range(2)]
    with torch.no_grad():
        return torch.export.export(ToyStep(toy_weights(seed)), (*step_inputs(), *regions), strict=False)


class Function(nn.Module):
    """A function of tensors as a module, so that it can be exported."""

    def __init__(self, function) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return self.function(*inputs)


def capture(module: nn.Module, *inputs: Tensor) -> torch.export.ExportedProgram:
    """Any module traced as the project does it."""
    with torch.no_grad():
        return torch.export.export(module, inputs, strict=False)


@functools.cache
def lowered_toy():  # type: ignore[no-untyped-def]
    """The toy step after all passes, lowered once per process."""
    from deepinfer.passes import PASSES_EXACT, PassManager, lower_graph

    program = capture_toy()
    PassManager(PASSES_EXACT, ["check_invariance"]).run(program)
    return lower_graph(program, name="decode-4", work_dir=scratch() / "lowered")


def main() -> None:
    """Lower the toy step in a process of its own: `python toy_graph.py LIBRARY WORK_DIR SEED THREADS`."""
    import sys

    from deepinfer.passes import PASSES_EXACT, PassManager, lower_graph

    library, work_dir, seed, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    register_toy_ops(Path(library))
    program = capture_toy(int(seed))
    PassManager(PASSES_EXACT, ["check_invariance"]).run(program)
    lowered = lower_graph(program, name="decode-4", work_dir=Path(work_dir))
    print(json.dumps([str(lowered.shared_object), str(lowered.extern_json)]))


if __name__ == "__main__":
    main()
