"""Why a request ends. Of several reasons that come true at once all are recorded; the first in order counts.

Plain data and one order of precedence; knows nothing of how a reason is found.
"""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from deepinfer.runtime.sampling_params import SamplingParams

STOP: Final = "stop"
LENGTH: Final = "length"
ABORT: Final = "abort"
ERROR: Final = "error"

# Kind of trigger -> finish_reason that a user reads. The earlier one wins.
PRECEDENCE: Final = {
    "abort": ABORT,
    "timeout": ABORT,
    "error": ERROR,
    "structured_complete": STOP,
    "stop_string": STOP,
    "eos": STOP,
    "stop_token": STOP,
    "max_tokens": LENGTH,
    "max_model_len": LENGTH,
}
_RANK: Final = {kind: rank for rank, kind in enumerate(PRECEDENCE)}
CUT_OFF: Final = frozenset({"abort", "timeout", "error"})  # the text is cut where it stands


class Trigger(NamedTuple):
    """One reason to end, with what it was: the stop string, the stop token, the kind of error."""

    kind: str
    detail: int | str | None = None


class Finish(NamedTuple):
    """How a request ended."""

    kind: str
    finish_reason: str  # "stop", "length", "abort", "error"
    stop_reason: int | str | None  # the stop string or stop token, the kind of error, "timeout"
    triggers: tuple[Trigger, ...]  # all that came true, the one that counts first


def token_triggers(
    token_id: int, num_output_tokens: int, params: SamplingParams, eos_token_ids: Sequence[int]
) -> list[Trigger]:
    """The reasons to end that a request's newest token brings by itself."""
    found: list[Trigger] = []
    if token_id in eos_token_ids and not params.ignore_eos:
        found.append(Trigger("eos"))
    if token_id in params.stop_token_ids:
        found.append(Trigger("stop_token", token_id))
    if num_output_tokens >= params.max_tokens:
        found.append(Trigger("max_tokens"))
    return found


def triggers_of_end(finish_reason: str, stop_reason: int | str | None) -> tuple[Trigger, ...]:
    """The reason of an end that no token brought: an abort, a timeout, an error, or no tokens wanted."""
    if finish_reason == ABORT:
        return (Trigger("abort" if stop_reason is None else str(stop_reason)),)
    if finish_reason == ERROR:
        return (Trigger("error", stop_reason),)
    return (Trigger("max_tokens"),) if finish_reason == LENGTH else ()


def decide(triggers: Iterable[Trigger]) -> Finish | None:
    """The end that these triggers make, or None if there are none. Their order does not matter."""
    ranked = tuple(sorted(set(triggers), key=lambda trigger: (_RANK[trigger.kind], str(trigger.detail))))
    if not ranked:
        return None
    first = ranked[0]
    stop_reason = "timeout" if first.kind == "timeout" else first.detail
    return Finish(first.kind, PRECEDENCE[first.kind], stop_reason, ranked)
