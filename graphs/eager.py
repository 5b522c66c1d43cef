"""The eager model: the step functions run as they are, over caches that it owns.

It is the definition that compiled graphs are compared with. Rows are padded to a multiple of eight, because
the scalar tails of vectorised functions give other last bits, and a step runs on one thread, because matrix
products split over threads add in another order.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deepinfer.errors import RequestError
from deepinfer.graphs.cache_layout import CacheLayout, cache_layout
from deepinfer.graphs.checkpoint import Checkpoint
from deepinfer.graphs.config import ModelConfig, load_config
from deepinfer.graphs.context import Tap, unchanged
from deepinfer.graphs.records import PRECISIONS, Precision, PrecisionName
from deepinfer.graphs.rows import PhaseName, StepInputs
from deepinfer.graphs.step import forward_step, logits_step
from deepinfer.graphs.store import build_store
from deepinfer.kernels import captured_ops

ROW_MULTIPLE = 8


class EagerModel:
    """A model with its weights and caches, run step by step in plain PyTorch."""

    def __init__(
        self,
        config: ModelConfig,
        precision: Precision,
        weights: dict[str, Tensor],
        layout: CacheLayout,
        *,
        native_ops: bool = False,
    ) -> None:
        self.config, self.precision, self.weights, self.layout = config, precision, weights, layout
        self.caches = allocate_caches(layout)
        self._native = native_ops

    @classmethod
    def load(
        cls,
        model_dir: Path,
        precision: PrecisionName = "native",
        *,
        max_model_len: int,
        max_num_seqs: int = 1,
        native_ops: bool = False,
    ) -> "EagerModel":
        """Read a checkpoint and allocate caches for `max_num_seqs` requests of `max_model_len` tokens.

        With `native_ops` every operation runs in the op library, which must be loaded, instead of its
        reference: the same model, many times faster, not the definition.
        Raises ModelError (and its subclasses) when the directory is not a usable checkpoint.
        """
        config = load_config(model_dir)
        weights = build_store(Checkpoint(model_dir, config), config, max_model_len, packed=native_ops)
        layout = cache_layout(config, precision, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
        return cls(config, PRECISIONS[precision], weights, layout, native_ops=native_ops)

    def step(self, phase: PhaseName, inputs: StepInputs, tap: Tap = unchanged) -> Tensor:
        """Run one step and return the hidden rows `[T, D]` of its T rows; caches advance in place.

        A tap sees the index scores of all entries, too.
        """
        num_rows = inputs.positions.shape[0]
        if not self._native:
            inputs = pad_rows(inputs, -num_rows % ROW_MULTIPLE, pad_table=phase == "decode")
        scores = tap is not unchanged
        with self._running():
            hidden = forward_step(
                self.config, self.precision, self.weights, inputs, self.caches, tap, with_scores=scores
            )
        return hidden[:num_rows]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits `[N, vocab]` of hidden rows `[N, D]`."""
        num_rows = hidden.shape[0]
        if not self._native:
            hidden = torch.nn.functional.pad(hidden, (0, 0, 0, -num_rows % ROW_MULTIPLE))
        with self._running():
            return logits_step(self.weights, hidden.contiguous())[:num_rows]

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """References need one thread to be what they are; native operations do not care."""
        with torch.no_grad(), captured_ops() if self._native else _one_thread():
            yield


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Run the block on one thread; the former number comes back also after an exception."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def allocate_caches(layout: CacheLayout) -> dict[str, Tensor]:
    """Return zeroed cache regions `[blocks or slots, entries, *record]` by name, in layout order."""
    counts = {"paged": layout.num_blocks, "state": layout.num_slots}
    return {
        region.name: torch.zeros(
            (counts[region.kind], region.entries, *region.record_shape), dtype=getattr(torch, region.dtype)
        )
        for region in layout.regions
    }


def pad_rows(inputs: StepInputs, count: int, *, pad_table: bool) -> StepInputs:
    """Append `count` padding rows, and as many unused table lines where the phase has one line per row."""
    if not count:
        return inputs
    pad = torch.nn.functional.pad
    if pad_table:
        lines = inputs.slot_ids.shape[0]
        inputs = inputs._replace(
            request_index=torch.arange(lines + count),
            block_table=pad(inputs.block_table, (0, 0, 0, count)),
            slot_ids=pad(inputs.slot_ids, (0, count)),
            num_computed_tokens=pad(inputs.num_computed_tokens, (0, count)),
            row_starts=pad(inputs.row_starts, (0, count)),
            row_counts=pad(inputs.row_counts, (0, count)),
        )
    else:
        inputs = inputs._replace(request_index=pad(inputs.request_index, (0, count)))
    return inputs._replace(
        token_ids=pad(inputs.token_ids, (0, count)), positions=pad(inputs.positions, (0, count), value=-1)
    )


def single_request_inputs(token_ids: Sequence[int], start: int, block_table: Tensor, slot: int) -> StepInputs:
    """Return the inputs of a step with one request's `token_ids` from position `start` on."""
    count = len(token_ids)
    return StepInputs(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        positions=torch.arange(start, start + count),
        request_index=torch.zeros(count, dtype=torch.int64),
        block_table=block_table.unsqueeze(0),
        slot_ids=torch.tensor([slot]),
        num_computed_tokens=torch.tensor([start]),
        row_starts=torch.tensor([0]),
        row_counts=torch.tensor([count]),
    )


def eager_logits(
    model_dir: str | Path,
    prompt_token_ids: Sequence[int],
    precision: PrecisionName = "native",
    chunk_sizes: Sequence[int] | None = None,
) -> np.ndarray:
    """Return the eager model's logits at every position of a prompt: `[tokens, vocab]` float32.

    `chunk_sizes=[5, 3]` prefills 5 tokens, then 3, and decodes the rest one by one; by default all tokens are
    prefilled at once. The result is the same to the last bit whatever the sizes.

    Raises RequestError for an empty prompt, a token id outside the vocabulary or unusable chunk sizes, and
    ModelError when the directory is not a usable checkpoint.
    """
    tokens = list(prompt_token_ids)
    steps = _plan_steps(len(tokens), chunk_sizes)
    if precision not in PRECISIONS:
        raise RequestError(f"precision must be native or float32, got {precision!r}")
    model = EagerModel.load(Path(model_dir), precision, max_model_len=len(tokens))
    check_token_ids(tokens, model.config.vocab_size)
    block_table = torch.arange(1, model.layout.max_blocks_per_request + 1)
    logits, start = [], 0
    for phase, count in steps:
        inputs = single_request_inputs(tokens[start : start + count], start, block_table, slot=1)
        logits.append(model.logits(model.step(phase, inputs)))
        start += count
    return torch.cat(logits).numpy()


def check_token_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise RequestError unless every id is an integer of the vocabulary."""
    for index, token in enumerate(token_ids):
        if isinstance(token, bool) or not isinstance(token, (int, np.integer)) or not 0 <= token < vocab_size:
            raise RequestError(f"token id {token!r} at index {index} is not in [0, {vocab_size})")


def _plan_steps(num_tokens: int, chunk_sizes: Sequence[int] | None) -> list[tuple[PhaseName, int]]:
    if num_tokens == 0:
        raise RequestError("the prompt is empty", action="give at least one token id")
    if chunk_sizes is None:
        return [("prefill", num_tokens)]
    sizes = list(chunk_sizes)
    if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise RequestError(f"chunk sizes must be positive integers, got {sizes}")
    if sum(sizes) > num_tokens:
        raise RequestError(f"chunk sizes {sizes} sum to more than the {num_tokens} tokens of the prompt")
    steps: list[tuple[PhaseName, int]] = [("prefill", size) for size in sizes]
    return steps + [("decode", 1)] * (num_tokens - sum(sizes))
