"""Steps of the executor on a card: a captured graph per bucket against the same work done eagerly.

The model is small and made of the project's own kernels; what is checked and timed is the runner around it.
"""

import time
from collections.abc import Callable

import torch
from gpu_backend import Backend, difference, median
from torch import Tensor

from deepinfer.kernels import linear, rms_norm
from deepinfer.runtime.cuda_runner import CudaDevice, CudaModelRunner, Device
from deepinfer.runtime.limits import Limits
from deepinfer.runtime.request import Batch, Request, ScheduledRows
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


def runner_on(backend: Backend, device: Device | None = None) -> CudaModelRunner:
    """The runner with every graph captured; `device` stands in for a card."""
    sizes, step, head = limits(), _Step(backend.device), _Head(backend.device)
    graphs: dict[str, _Step | _Head] = {"prefill-16": step}
    graphs |= {f"decode-{bucket}": step for bucket in sizes.decode_buckets}
    graphs |= {f"logits-{bucket}": head for bucket in sizes.logits_buckets}
    return CudaModelRunner(sizes, graphs, {}, device or CudaDevice(backend.device), capture_all=True)


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
