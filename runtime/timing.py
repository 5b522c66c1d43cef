"""When a request's output became visible. Whole nanoseconds on the engine's clock, so parts sum exactly."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """Durations of one continuation, in nanoseconds: the first four in sum are the last.

    Output counts when it may be shown, not when it was made: text that is held back is not out yet.
    """

    queue_ns: int  # from arrival to the first step
    first_output_ns: int  # from there to the first visible output; 0 if there was none
    inter_output_ns: tuple[int, ...]  # between one visible output and the next
    flush_ns: int  # from the last visible output to the end
    total_ns: int  # from arrival to the end

    @property
    def seconds(self) -> dict[str, float]:
        """The usual figures: waiting, to the first output and from there on, each with the whole."""
        first = self.queue_ns + self.first_output_ns
        parts = {
            "queue": self.queue_ns,
            "first_token": first,
            "decode": self.total_ns - first,
            "total": self.total_ns,
        }
        return {name: nanoseconds / 1e9 for name, nanoseconds in parts.items()}


def timing_of(times: Mapping[str, float], visible_times: Sequence[float]) -> RequestTiming:
    """The timing of a request that has ended.

    times: seconds on one clock at its "arrival", "start" (of its first step, if it had one) and "end".
    visible_times: when more of its output became visible, in order.
    """
    arrival = _nanoseconds(times["arrival"])
    end = _nanoseconds(times.get("end", times["arrival"]))
    outputs = [_nanoseconds(time) for time in visible_times]
    # A further choice begins with its parent's first step, so its output may come before its own.
    start = min([_nanoseconds(times["start"]) if "start" in times else end, *outputs[:1]])
    first = outputs[0] if outputs else start
    last = outputs[-1] if outputs else start
    return RequestTiming(
        queue_ns=start - arrival,
        first_output_ns=first - start,
        inter_output_ns=tuple(after - before for before, after in zip(outputs, outputs[1:], strict=False)),
        flush_ns=end - last,
        total_ns=end - arrival,
    )


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
