"""Any "ids in, scores out" as the engine's runner, without a cache: every step computes all tokens again."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.runtime.limits import Limits
from deepinfer.runtime.model_runner import sampled_rows
from deepinfer.runtime.request import Batch, CacheState, Request

Scores = Callable[[Sequence[int]], NDArray[np.float32]]  # ids -> [tokens, vocab], row i for the token after i


class ScoresRunner:
    """Slow and obvious: what any cache must agree with."""

    def __init__(self, limits: Limits, scores: Scores) -> None:
        self.limits = limits
        self._scores = scores
        self._places: list[tuple[Request, int]] = []
        self.positions = 0  # computed so far

    def run(self, batch: Batch) -> Tensor:
        """float32 logits of `sampled_rows(batch)`."""
        self._places = [(rows.request, rows.start + row) for rows in batch.rows for row in range(rows.count)]
        return self.logits_of_rows(sampled_rows(batch))

    def logits_of_rows(self, rows: NDArray[np.int64]) -> Tensor:
        """float32 logits of rows of the last batch."""
        found = [self._row(*self._places[row]) for row in rows.tolist()]
        return torch.from_numpy(np.array(found, np.float32).reshape(-1, self.limits.vocab_size))

    def read_state(self, request: Request) -> CacheState:
        """Nothing is kept of a request."""
        return CacheState(b"", b"")

    def _row(self, request: Request, position: int) -> NDArray[np.float32]:
        tokens = [*request.tokens(0, position + 1)]
        self.positions += len(tokens)
        return self._scores(tokens)[-1]
