"""Steps built by hand for tests of the graphs: requests with own slots and blocks, ragged batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.graphs.cache_layout import BLOCK_TOKENS, CacheLayout, cache_layout
from deepinfer.graphs.caches import RegionCaches
from deepinfer.graphs.config import ModelConfig
from deepinfer.graphs.context import StepContext, Tap, unchanged
from deepinfer.graphs.eager import EagerModel
from deepinfer.graphs.records import PRECISIONS, PrecisionName
from deepinfer.graphs.rows import StepInputs


@dataclass(frozen=True)
class Request:
    """A request's tokens, the slot of its rings and the blocks of its pages, in order."""

    token_ids: Sequence[int]
    slot: int = 1
    blocks: Sequence[int] = (1, 2)


@dataclass(frozen=True)
class Chunk:
    """Rows of one step: `count` tokens of a request from position `start` on."""

    request: Request
    start: int
    count: int


def ragged_inputs(
    chunks: Sequence[Chunk | None], layout: CacheLayout, *, padding_rows: int = 0, lines: int | None = None
) -> StepInputs:
    """Return the inputs of a step over `chunks`, one table line each; None leaves a line unused.

    In decode, where line and row are one, `None` therefore is a padding row as well.
    """
    lines = len(chunks) if lines is None else lines
    table = torch.zeros(lines, layout.max_blocks_per_request, dtype=torch.int64)
    slots, computed, starts, counts = (torch.zeros(lines, dtype=torch.int64) for _ in range(4))
    tokens, positions, index = [], [], []
    for line, chunk in enumerate(chunks):
        if chunk is None:
            continue
        used = -(-(chunk.start + chunk.count) // BLOCK_TOKENS)
        table[line, :used] = torch.tensor(chunk.request.blocks[:used])
        slots[line], computed[line] = chunk.request.slot, chunk.start
        starts[line], counts[line] = len(tokens), chunk.count
        span = range(chunk.start, chunk.start + chunk.count)
        tokens += [chunk.request.token_ids[position] for position in span]
        positions += span
        index += [line] * chunk.count
    return StepInputs(
        token_ids=torch.tensor(tokens + [0] * padding_rows, dtype=torch.int64),
        positions=torch.tensor(positions + [-1] * padding_rows, dtype=torch.int64),
        request_index=torch.tensor(index + [0] * padding_rows, dtype=torch.int64),
        block_table=table,
        slot_ids=slots,
        num_computed_tokens=computed,
        row_starts=starts,
        row_counts=counts,
    )


def decode_inputs(chunks: Sequence[Chunk | None], layout: CacheLayout) -> StepInputs:
    """Return the inputs of a decode step: row i is the one token of `chunks[i]`, or padding for None."""
    used = [chunk for chunk in chunks if chunk is not None]
    assert all(chunk.count == 1 for chunk in used)
    inputs = ragged_inputs(chunks, layout)
    rows = torch.tensor([chunk is not None for chunk in chunks])
    tokens = torch.zeros(len(chunks), dtype=torch.int64)
    positions = torch.full((len(chunks),), -1)
    tokens[rows], positions[rows] = inputs.token_ids, inputs.positions
    every = torch.arange(len(chunks))
    return inputs._replace(
        token_ids=tokens,
        positions=positions,
        request_index=every,
        row_starts=torch.where(rows, every, 0),
    )


def make_model(
    config: ModelConfig,
    weights: dict[str, Tensor],
    precision: PrecisionName = "native",
    *,
    max_num_seqs: int = 1,
    max_model_len: int = 256,
) -> EagerModel:
    """Return an eager model over weights that other models share, with caches of its own."""
    layout = cache_layout(config, precision, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
    return EagerModel(config, PRECISIONS[precision], weights, layout)


def step_context(
    model: EagerModel,
    inputs: StepInputs,
    tap: Tap = unchanged,
    **weights: Tensor,
) -> StepContext:
    """Return the context of one step, to call a layer's parts by themselves; `weights` replace some."""
    merged: Mapping[str, Tensor] = {**model.weights, **weights}
    caches = RegionCaches(inputs, model.caches, model.precision.quantized)
    return StepContext(model.config, model.precision, merged, caches, inputs, tap, with_scores=True)


def records_of(model: EagerModel, request: Request, num_tokens: int) -> dict[str, Tensor]:
    """Return what the caches hold for a request's first `num_tokens` tokens, by region, in position order."""
    records = {}
    for region in model.layout.regions:
        cache = model.caches[region.name]
        if region.kind == "paged":
            entries = torch.arange(num_tokens // region.tokens_per_entry)
            blocks = torch.tensor(list(request.blocks))[entries // region.entries]
            records[region.name] = cache[blocks, entries % region.entries]
        else:
            positions = torch.arange(max(0, num_tokens - region.entries), num_tokens)
            records[region.name] = cache[request.slot, positions % region.entries]
    return records


def differing_records(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> list[str]:
    """Return the regions whose records differ in any byte."""
    assert got.keys() == want.keys()
    return [name for name in got if not same_bytes(got[name], want[name])]


def same_bytes(got: Tensor, want: Tensor) -> bool:
    """Return whether two tensors agree in shape, dtype and every byte; equal NaNs are equal."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    if not got.numel():
        return True
    return torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


def random_tokens(count: int, seed: int, vocab_size: int = 512) -> list[int]:
    """Return token ids drawn by a generator of their own."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (count,), generator=generator).tolist()


def bf16_ulps(got: Tensor, want: Tensor) -> Tensor:
    """Return how many representable bfloat16 values lie between two tensors, element by element."""

    def ordered(values: Tensor) -> Tensor:
        bits = values.contiguous().view(torch.int16).to(torch.int32)
        return torch.where(bits < 0, -32768 - bits, bits)

    return (ordered(got) - ordered(want)).abs()
