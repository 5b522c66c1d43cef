"""How a scheduler weighs its choices: the policy that is the user's to set. Plain data, validated once."""

import enum
import operator
from dataclasses import dataclass

from deepinfer.errors import UsageError


class EngineType(enum.Enum):
    """Which steps an engine runs (spec engine D.3)."""

    NORMAL = "normal"  # prompts and decoding
    PROMPT = "prompt"  # prompts and their first token; what is not finished by it is handed on
    COMPLETION = "completion"  # decoding of requests whose prompts another engine computed


class PreemptionMode(enum.Enum):
    """What becomes of a request whose memory another one needs (spec engine D.7)."""

    RECOMPUTE = "recompute"  # it waits and is computed again: its answer stays the same
    STOP = "stop"  # it ends with an error and the tokens it has


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The policy of one scheduler.

    max_num_batched_tokens: token rows of one prefill step, at most the largest prefill bucket, which is the
    default. watermark: while requests decode, a new prompt starts only if no more than this share of the
    blocks is in use. max_prefill_steps, min_decode_steps: after so many prefill steps in a row, while
    requests are waiting to decode, come so many decode steps; 0 lets prompts always go first.
    max_preemptions: a request that was preempted so often is spared while it holds less than half of the
    blocks. A COMPLETION engine cannot compute a prompt again, so it always stops what it preempts.

    Raises UsageError.
    """

    engine_type: EngineType = EngineType.NORMAL
    preemption_mode: PreemptionMode = PreemptionMode.RECOMPUTE
    max_num_batched_tokens: int | None = None
    watermark: float = 0.9
    max_prefill_steps: int = 2
    min_decode_steps: int = 8
    max_preemptions: int = 2

    def __post_init__(self) -> None:
        for name, low in (("max_prefill_steps", 1), ("min_decode_steps", 0), ("max_preemptions", 0)):
            _at_least(name, getattr(self, name), low)
        if self.max_num_batched_tokens is not None:
            _at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        is_number = isinstance(self.watermark, int | float) and not isinstance(self.watermark, bool)
        if not (is_number and 0.0 <= self.watermark <= 1.0):
            raise UsageError(
                f"{self.watermark!r} is out of range", where="watermark", action="allowed: 0 to 1"
            )
        for name, kind in (("engine_type", EngineType), ("preemption_mode", PreemptionMode)):
            if not isinstance(getattr(self, name), kind):
                allowed = ", ".join(str(member) for member in kind)
                raise UsageError(
                    f"{getattr(self, name)!r} is unknown", where=name, action=f"allowed: {allowed}"
                )

    @property
    def recomputes(self) -> bool:
        """Whether a preempted request is computed again."""
        normal = self.engine_type is EngineType.NORMAL
        return normal and self.preemption_mode is PreemptionMode.RECOMPUTE


def _at_least(name: str, value: object, low: int) -> None:
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < low:
        raise UsageError(f"{value!r} is not possible", where=name, action=f"allowed: an integer from {low}")
