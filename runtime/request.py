"""The nouns of a step: `Request` (one prompt on its way), `ScheduledRows` and `Batch` (one step's work).

Plain data with derived facts as properties; knows nothing of tensors, pools or policies.

A request has `num_tokens` tokens (prompt plus output), of which the first `num_computed_tokens` have been
through the model. Between steps of a running request exactly one token, the newest, has not.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from deepinfer.runtime.outputs import Logprobs
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.sampling_state import SamplingState


class RequestStatus(enum.Enum):
    """Where a request stands. Blocks and a slot are held in RUNNING only."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and its progress. Identity, not content, makes two requests equal."""

    request_id: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int  # the seed of the parameters, or the one drawn at admission
    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)  # one per output token, if asked for
    sampling_state: SamplingState | None = None  # None: the parameters look at no token
    num_computed_tokens: int = 0
    block_table: tuple[int, ...] = ()  # replaced, never changed in place: the runner compares identity
    slot_id: int = 0  # 0: none
    finish_reason: str | None = None  # "stop", "length", "error", "abort"
    stop_reason: int | str | None = None  # the stop token of the request, or the kind of error
    times: dict[str, float] = field(default_factory=dict)  # event -> seconds on a monotonic clock

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt plus output tokens: also the position of the next token to be made."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def max_num_tokens(self) -> int:
        """The most tokens this request can come to have."""
        return len(self.prompt_token_ids) + self.params.max_tokens

    @property
    def is_prefilled(self) -> bool:
        """Whether only the newest token, an output, is still to be computed."""
        return self.num_computed_tokens >= len(self.prompt_token_ids)

    @property
    def finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.status is RequestStatus.FINISHED

    def tokens(self, start: int, count: int) -> Sequence[int]:
        """Token ids at positions start .. start + count - 1, from the prompt and then the output."""
        prompt_len = len(self.prompt_token_ids)
        if start >= prompt_len:
            return self.output_token_ids[start - prompt_len : start - prompt_len + count]
        ids = self.prompt_token_ids[start : start + count]
        missing = count - len(ids)
        return ids + tuple(self.output_token_ids[:missing]) if missing else ids


@dataclass(frozen=True, slots=True)
class ScheduledRows:
    """`count` consecutive token positions of one request, from position `start`."""

    request: Request
    start: int
    count: int

    @property
    def makes_token(self) -> bool:
        """Whether the last row is the request's newest token, so that its hidden row gives a new one."""
        return self.start + self.count == self.request.num_tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: a phase, a bucket, and the rows that fill it from row 0 on."""

    phase: str  # "prefill" or "decode"
    bucket: int  # token rows of the graph, at least num_rows
    rows: tuple[ScheduledRows, ...]

    @property
    def num_rows(self) -> int:
        """Token rows that are not padding."""
        return sum(scheduled.count for scheduled in self.rows)

    @property
    def sampled_requests(self) -> list[Request]:
        """The requests that get a token from this step, in row order."""
        return [scheduled.request for scheduled in self.rows if scheduled.makes_token]
