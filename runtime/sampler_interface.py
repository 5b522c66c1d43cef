"""What an engine asks of a sampler, and what it gets: one interface, two implementations.

`sampler.CompiledSampler` calls the compiled operation; `sampler_reference.ReferenceSampler` is plain lists
and the definition to hold it against. Knows nothing of tensors.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from deepinfer.runtime.outputs import Logprobs
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.sampling_state import SamplingState

OK: Final = 0
NOT_A_NUMBER: Final = 1  # a NaN or +inf among the row's logits
NOTHING_ALLOWED: Final = 2  # every logit is -inf
NO_TOKEN: Final = -1

STATUS_NAMES: Final = {OK: "ok", NOT_A_NUMBER: "numerical_error", NOTHING_ALLOWED: "no_allowed_token"}
LOWEST_LOGPROB: Final = float(np.finfo(np.float32).min)  # reported where the true value is below it

States = Sequence[SamplingState | None]


class Sampled(NamedTuple):
    """Result of `Sampler.sample`, one entry per row."""

    token_ids: Sequence[int]  # NO_TOKEN where status is not OK
    status: Sequence[int]  # OK, NOT_A_NUMBER or NOTHING_ALLOWED
    logprobs: Sequence[Logprobs | None] = ()  # None for a row that asks for none; empty if none does


class Sampler(Protocol):
    """Draws one token per row; a row's result depends on that row's arguments alone."""

    name: str  # goes into records of what produced a result

    def sample(
        self,
        logits: Any,
        params: Sequence[SamplingParams],
        positions: Sequence[int],
        seeds: Sequence[int],
        states: States = (),
    ) -> Sampled:
        """Draws a token for every row (spec engine B.2 to B.5, B.8).

        logits: [rows, vocab] float32 on the CPU, not modified. params, positions, seeds: one per row; a
        position is the index, within prompt plus output, of the token being made. states: one per row, up to
        date, where parameters look at tokens; may be empty if none do. A row that holds a NaN or +inf, or
        only -inf, gets no token but a status; other rows are not affected.
        """
        ...
