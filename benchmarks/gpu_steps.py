"""Steps of the executor on a card: a captured graph per bucket against the same work done eagerly.

The model is small and made of the project's own kernels; what is checked and timed is the runner around it.
"""

import time
from collections.abc import Callable

import numpy as np
import torch
from gpu_backend import Backend, difference, median
from torch import Tensor

from deepinfer.artifacts.schema import CacheLayout
from deepinfer.kernels import linear, rms_norm
from deepinfer.runtime.caches import CacheArenas
from deepinfer.runtime.cuda_device import Device
from deepinfer.runtime.cuda_runner import CudaModelRunner, HostLogits
from deepinfer.runtime.limits import Limits
from deepinfer.runtime.request import Batch, CacheState, Request, ScheduledRows, StateCopy
from deepinfer.runtime.sampling_params import SamplingParams

HIDDEN, VOCABULARY, BLOCK = 64, 96, 16


class _Step:
    """Hidden rows from token ids, through a norm and a product."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        make = lambda *shape: torch.randn(*shape, generator=generator).bfloat16().to(device)  # noqa: E731
        self.embed, self.norm, self.weight = make(VOCABULARY, HIDDEN), make(HIDDEN), make(HIDDEN, HIDDEN)

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        token_ids, positions = inputs[0], inputs[1]
        rows = self.embed.index_select(0, token_ids) * (positions >= 0).unsqueeze(1)
        return [linear.triton(rms_norm.triton(rows, self.norm, 1e-6), self.weight, torch.bfloat16)]


class _Head:
    def __init__(self, device: torch.device) -> None:
        weight = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(1))
        self.weight = weight.bfloat16().to(device)

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        return [linear.triton(inputs[0], self.weight, torch.float32)]


def limits() -> Limits:
    """Sizes of the small model."""
    return Limits(
        prefill_buckets=(16,),
        decode_buckets=(1, 2, 4, 8),
        logits_buckets=(1, 8),
        prefill_table_size=8,
        max_model_len=4 * BLOCK,
        block_tokens=BLOCK,
        max_blocks_per_request=4,
        num_blocks=33,
        num_slots=9,
        vocab_size=VOCABULARY,
    )


def runner_on(backend: Backend, device: Device) -> CudaModelRunner:
    """The runner with every graph captured on `device`. No graph looks at its caches."""
    sizes, step, head = limits(), _Step(backend.device), _Head(backend.device)
    graphs: dict[str, _Step | _Head] = {"prefill-16": step}
    graphs |= {f"decode-{bucket}": step for bucket in sizes.decode_buckets}
    graphs |= {f"logits-{bucket}": head for bucket in sizes.logits_buckets}
    layout = CacheLayout(
        block_tokens=BLOCK,
        block_bytes=3 * BLOCK,
        num_blocks=sizes.num_blocks,
        slot_bytes=40,
        num_slots=sizes.num_slots,
        max_blocks_per_request=sizes.max_blocks_per_request,
        regions=(),
    )
    arenas = CacheArenas.allocate(layout, backend.device)
    return CudaModelRunner(sizes, graphs, arenas, device, capture_all=True)


def decode_batch(bucket: int, rows: int, turn: int) -> Batch:
    """One decode step of `rows` requests, other tokens at every turn."""
    scheduled = []
    for row in range(rows):
        request = Request(
            f"r{row}", tuple((3 * row + i + turn) % VOCABULARY for i in range(5)), SamplingParams(), seed=row
        )
        request.block_table, request.slot_id, request.num_computed_tokens = (1 + row,), 1 + row, 4
        scheduled.append(ScheduledRows(request, 4, 1))
    return Batch("decode", bucket, tuple(scheduled))


def replayed_steps(backend: Backend, runner: CudaModelRunner, wait: Callable[[], None]) -> str | None:
    """Every bucket, full and with padding, twice: logits have the bytes of eager calls."""
    step, head = _Step(backend.device), _Head(backend.device)
    for bucket in limits().decode_buckets:
        for rows in sorted({1, bucket}):
            for turn in range(2):
                batch = decode_batch(bucket, rows, turn)
                got = runner.run(batch)
                wait()
                tokens = [scheduled.request.token_at(4) for scheduled in batch.rows]
                ids = torch.tensor(tokens, device=backend.device)
                (hidden,) = step.run([ids, torch.full_like(ids, 4)])
                if wrong := difference(got, head.run([hidden])[0]):
                    return f"decode-{bucket} with {rows} rows: {wrong}"
    return None


def cache_contents(runner: CudaModelRunner, device: Device) -> str | None:
    """Contents loaded for one request and copied for a fork of it in one step: both hold the same bytes.

    Rows beyond those that give tokens are scored as in the step itself.
    """
    engine_runner = HostLogits(runner, device)
    parent, fork = (rows.request for rows in decode_batch(2, 2, 0).rows)
    content = bytes(range(48)), bytes(range(100, 140))
    parent.cache_state = CacheState(*content)
    loading = Batch("decode", 1, (ScheduledRows(parent, 4, 1),), loads=(parent,))
    engine_runner.run(loading)
    copy = StateCopy(parent.slot_id, fork.slot_id, parent.block_table[0], fork.block_table[0])
    both = (ScheduledRows(parent, 4, 1), ScheduledRows(fork, 4, 1))
    logits = engine_runner.run(Batch("decode", 2, both, copies=(copy,))).clone()
    for name, request in (("loaded", parent), ("copied", fork)):
        if (state := engine_runner.read_state(request)) != CacheState(*content):
            return f"what was {name} differs: {state}"
    turned = engine_runner.logits_of_rows(np.array([1, 0, 1]))
    return difference(turned, logits[[1, 0, 1]])


def host_microseconds(runner: CudaModelRunner, wait: Callable[[], None], steps: int) -> dict[str, float]:
    """Microseconds of the host from a batch to everything queued, by bucket; the device is not waited for."""
    taken = {}
    for bucket in limits().decode_buckets:
        batch, samples = decode_batch(bucket, bucket, 0), []
        for _ in range(steps):
            wait()
            started = time.perf_counter()
            runner.run(batch)
            samples.append(time.perf_counter() - started)
        taken[f"decode-{bucket}"] = median(samples) * 1e6
    return taken
