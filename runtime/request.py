"""The nouns of a step: `Request` (one prompt on its way), `ScheduledRows` and `Batch` (one step's work).

Plain data with derived facts as properties; knows nothing of tensors, pools or policies.

A request has `num_tokens` tokens (prompt plus output), of which the first `num_computed_tokens` have been
through the model. Between steps of a running request exactly one token, the newest, has not.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from deepinfer.runtime.finish import Trigger
from deepinfer.runtime.outputs import Logprobs
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.sampling_state import SamplingState
from deepinfer.runtime.text_stream import TextStream


@dataclass(frozen=True, slots=True)
class CacheState:
    """What a request has in the caches, as bytes that another engine of the same artifact can load."""

    blocks: bytes
    slot: bytes
    identity: str = ""  # of what computed them


class RequestStatus(enum.Enum):
    """Where a request stands. A slot and blocks are held in PREFILLING and RUNNING only."""

    WAITING = "waiting"  # new, or preempted and to be computed again
    PREFILLING = "prefilling"  # in or between the chunks of its prompt
    RUNNING = "running"  # only its newest token is to be computed
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and its progress. Identity, not content, makes two requests equal."""

    request_id: str  # the caller's, or made from the arrival
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int  # the seed of the parameters, or the one drawn at admission, or derived from the parent's
    arrival: int = 0  # rises from one request to the next: the order of service
    deadline: float | None = None  # on the engine's clock
    parent: "Request | None" = None  # of a fork or a further choice: the request it copies its beginning from
    index: int = 0  # place among the choices of one prompt
    choices: "tuple[Request, ...]" = ()  # of the first choice: the further ones
    num_seeds_derived: int = 0  # of its own seed, for further choices and forks
    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)  # one per output token, if asked for
    prompt_logprobs: list[Logprobs | None] = field(default_factory=list)  # one per prompt token, if asked for
    sampling_state: SamplingState | None = None  # None: the parameters look at no token
    text: TextStream | None = None  # None: without a tokenizer
    num_visible: int = 0  # characters, or tokens without a text, that had become visible by the last step
    visible_times: list[float] = field(default_factory=list)  # when more became visible
    num_computed_tokens: int = 0
    block_table: tuple[int, ...] = ()  # replaced, never changed in place: the runner compares identity
    slot_id: int = 0  # 0: none
    cache_state: "CacheState | None" = None  # contents that another engine computed, until they are loaded
    finish_reason: str | None = None  # "stop", "length", "error", "abort", "prefilled"
    stop_reason: int | str | None = None  # the stop token of the request, the kind of error, or "timeout"
    triggers: tuple[Trigger, ...] = ()  # all reasons for its end
    times: dict[str, float] = field(default_factory=dict)  # event -> seconds on a monotonic clock
    num_preemptions: int = 0
    num_positions_processed: int = 0  # rows the model computed for it, those computed again included
    num_peak_blocks: int = 0  # the most blocks it held at once, shared ones included

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

    def take_outputs(self, other: "Request") -> None:
        """Goes on from what another request has made."""
        self.output_token_ids = list(other.output_token_ids)
        self.logprobs, self.prompt_logprobs = list(other.logprobs), list(other.prompt_logprobs)

    def token_at(self, position: int) -> int:
        """Token id at a position of prompt and output."""
        prompt_len = len(self.prompt_token_ids)
        if position < prompt_len:
            return self.prompt_token_ids[position]
        return self.output_token_ids[position - prompt_len]

    def tokens(self, start: int, count: int) -> Sequence[int]:
        """Token ids at positions start .. start + count - 1, from the prompt and then the output."""
        prompt_len = len(self.prompt_token_ids)
        if start >= prompt_len:
            return self.output_token_ids[start - prompt_len : start - prompt_len + count]
        ids = self.prompt_token_ids[start : start + count]
        missing = count - len(ids)
        return ids + tuple(self.output_token_ids[:missing]) if missing else ids


@dataclass(frozen=True, slots=True)
class StateCopy:
    """Cache bytes that a fork gets from its parent before the next step: its slot, and its unfilled block."""

    source_slot: int
    slot: int
    source_block: int = 0  # 0: the parent's last block is full, so nothing but the slot is copied
    block: int = 0


class ScheduledRows(NamedTuple):
    """`count` consecutive token positions of one request, from position `start`."""

    request: Request
    start: int
    count: int  # type: ignore[assignment]  # hides a method of tuples that nobody needs
    forks: tuple[Request, ...] = ()  # further choices, which draw their first token from the same last row

    @property
    def makes_token(self) -> bool:
        """Whether the last row is the request's newest token, so that its hidden row gives a new one."""
        return self.start + self.count == self.request.num_tokens


@dataclass(frozen=True)
class Batch:
    """One step: a phase, a bucket, and the rows that fill it from row 0 on."""

    phase: str  # "prefill" or "decode"
    bucket: int  # token rows of the graph, at least num_rows
    rows: tuple[ScheduledRows, ...]
    copies: tuple[
        StateCopy, ...
    ] = ()  # made in order before the graph runs, of memory that may be free by now
    loads: tuple[Request, ...] = ()  # then their cache contents are written

    @property
    def num_rows(self) -> int:
        """Token rows that are not padding."""
        return sum(scheduled.count for scheduled in self.rows)

    @cached_property
    def sampled_requests(self) -> list[Request]:
        """The requests that get a token from this step, in row order, each with its forks behind it."""
        if self.phase == "decode":  # the newest token of each
            return [scheduled.request for scheduled in self.rows]
        return [
            request
            for scheduled in self.rows
            if scheduled.makes_token
            for request in (scheduled.request, *scheduled.forks)
        ]
