"""Checks of kernels where they run: against references, rows against batches, replays against eager.

Every check returns None, or in words what is wrong. `gpu.py` collects them.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpu_backend import Backend, copies, difference, tensors
from op_rows import take_rows

from deepinfer.kernels import OPS, Op, moe_gate
from deepinfer.kernels.cuda import moe_gate as cuda_gate

Check = tuple[str, str, Callable[[], str | None]]  # kind, subject, the check
DTYPES = (torch.bfloat16, torch.float32)
# what has no rows of its own to take out: effects alone, or rows of a request together
WITHOUT_ROWS = {"index_key", "ring_write", "verify_drafts"}


def kernel_checks(backend: Backend, names: set[str], quick: bool) -> Iterator[Check]:
    """Of every operation in `names`; `quick` takes sizes that an interpreter gets through."""
    sizes, buckets = ((2,), (2,)) if quick else ((1, 6, 33), (1, 2, 4, 8, 64))
    for op in OPS:
        if op.name not in names:
            continue
        for dtype in DTYPES:
            subject = f"{op.name} {str(dtype)[6:]}"
            for rows in sizes:
                yield "reference", f"{subject} {rows}", _bound(agrees, backend, op, op.triton, dtype, rows)
            if op.name not in WITHOUT_ROWS:
                rows = 3 if quick else 33
                yield "rows", f"{subject} {rows}", _bound(rows_alone, backend, op, op.triton, dtype, rows)
            for rows in buckets:
                yield "replay", f"{subject} {rows}", _bound(replays, backend, op, op.triton, dtype, rows)


def gate_checks(backend: Backend, quick: bool) -> Iterator[Check]:
    """The router's CUDA C++ kernels, on a card alone: elsewhere the tests emulate their source."""
    if backend.device.type != "cuda":
        return
    run, dtype = cuda_gate.moe_gate, torch.bfloat16
    for rows in (1, 6, 33):
        yield "reference", f"moe_gate cuda {rows}", _bound(agrees, backend, moe_gate, run, dtype, rows)
        yield "replay", f"moe_gate cuda {rows}", _bound(replays, backend, moe_gate, run, dtype, rows)
    yield "rows", "moe_gate cuda 33", _bound(rows_alone, backend, moe_gate, run, dtype, 33)


def agrees(backend: Backend, op: Op, run: Callable[..., Any], dtype: torch.dtype, rows: int) -> str | None:
    """Results and effects are within the operation's tolerance of its reference, for three inputs."""
    rtol, atol = op.tolerance[dtype]
    for seed in range(3 if backend.measures else 1):
        given = op.make_inputs(rows, dtype, seed)
        ours, theirs = copies(given, backend.device), copies(given, torch.device("cpu"))
        got, want = tensors(run(*ours)), tensors(op.reference(*theirs))
        backend.wait()
        pairs = zip((*got, *ours), (*want, *theirs), strict=True)
        for place, (left, right) in enumerate(pairs):
            if not isinstance(left, torch.Tensor):
                continue
            try:
                torch.testing.assert_close(left.cpu(), right, rtol=rtol, atol=atol, equal_nan=True)
            except AssertionError as error:
                what = f"result {place}" if place < len(got) else f"argument {place - len(got)}"
                return f"{what} of input {seed}: {' '.join(str(error).split())[:300]}"
    return None


def rows_alone(
    backend: Backend, op: Op, run: Callable[..., Any], dtype: torch.dtype, rows: int
) -> str | None:
    """A row alone, and rows in another order, have the bytes that they have in the batch."""
    given = op.make_inputs(rows, dtype, 3)
    whole = tensors(run(*copies(given, backend.device)))
    last = rows - 1
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(rows))
    for chosen in (torch.tensor([0]), torch.tensor([rows // 2]), torch.tensor([last]), order):
        part = tensors(run(*copies(take_rows(op, given, chosen), backend.device)))
        for got, want in zip(part, whole, strict=True):
            if wrong := difference(got, want.cpu()[chosen]):
                return f"rows {chosen.tolist()[:4]}: {wrong}"
    return None


def replays(backend: Backend, op: Op, run: Callable[..., Any], dtype: torch.dtype, rows: int) -> str | None:
    """A captured call, replayed twice on other contents than it was captured with, gives eager's bytes."""
    given = [op.make_inputs(rows, dtype, seed) for seed in (0, 3)]  # the forms of seeds may differ
    static = copies(given[0], backend.device)
    results, replay = backend.captured(lambda: run(*static))
    for contents in (given[1], given[0], given[1]):
        if not _same_form(contents, given[0]):
            contents = given[0]
        eager = copies(contents, backend.device)
        want = tensors(run(*eager))
        for target, source in zip(static, contents, strict=True):
            if isinstance(target, torch.Tensor):
                target.copy_(source)
        replay()
        backend.wait()
        changed = [(a, b) for a, b in zip(static, eager, strict=True) if isinstance(a, torch.Tensor)]
        for got, expected in (*zip(tensors(results), want, strict=True), *changed):
            if wrong := difference(got, expected):
                return wrong
    return None


def _same_form(left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    """Whether a graph captured with one may be replayed with the other."""
    return all(
        (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        if isinstance(a, torch.Tensor)
        else type(a) is type(b) and a == b
        for a, b in zip(left, right, strict=True)
    )


def _bound(check: Callable[..., str | None], *arguments: Any) -> Callable[[], str | None]:
    return lambda: check(*arguments)
