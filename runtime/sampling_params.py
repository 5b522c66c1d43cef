"""What a request asks of the sampler and of the stop rules: validated once, never changed afterwards.

Owns the user-facing parameter names (those of vLLM, as far as they are supported) and their ranges. Knows
nothing of the model: whether a token id lies in the vocabulary is checked when the request is admitted.
"""

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass

from deepinfer.errors import RequestError

MIN_TEMPERATURE = 1e-5  # below it, logits divided by the temperature leave the range of float32
MAX_SEED = 2**64 - 1


@dataclass(frozen=True, init=False, slots=True)
class SamplingParams:
    """Sampling parameters of one request.

    max_tokens: the most tokens to generate, at least 1.
    temperature: 0 is greedy (lowest id among equal logits); a value between 0 and 1e-5 counts as 1e-5.
    seed: 0 to 2**64 - 1; None draws one at admission, which the result then names. The seed alone, not the
        place in a list or a batch, decides the draws: two prompts with one seed use the same random stream.
    ignore_eos: go on after the model's own end tokens; `stop_token_ids` still stop.
    stop_token_ids: further ids that end the request; the id that stopped it is kept in `token_ids`.

    Any other parameter is refused by name. Raises RequestError.
    """

    max_tokens: int
    temperature: float
    seed: int | None
    ignore_eos: bool
    stop_token_ids: tuple[int, ...]

    def __init__(
        self,
        *,
        max_tokens: int = 16,
        temperature: float = 1.0,
        seed: int | None = None,
        ignore_eos: bool = False,
        stop_token_ids: Iterable[int] | None = None,
        **unsupported: object,
    ) -> None:
        if unsupported:
            names = ", ".join(sorted(unsupported))
            raise RequestError(
                f"sampling parameter not supported: {names}",
                where="SamplingParams",
                action="supported: max_tokens, temperature, seed, ignore_eos, stop_token_ids",
            )
        if not isinstance(ignore_eos, bool):
            raise RequestError(f"{ignore_eos!r} is neither True nor False", where="ignore_eos")
        if seed is not None:
            seed = _integer("seed", seed, low=0, high=MAX_SEED)
        object.__setattr__(self, "max_tokens", _integer("max_tokens", max_tokens, low=1))
        object.__setattr__(self, "temperature", _temperature(temperature))
        object.__setattr__(self, "seed", seed)
        object.__setattr__(self, "ignore_eos", ignore_eos)
        object.__setattr__(self, "stop_token_ids", _token_ids(stop_token_ids))

    @property
    def greedy(self) -> bool:
        """Whether no random number is used."""
        return self.temperature == 0.0


def _integer(name: str, value: object, *, low: int, high: int | None = None) -> int:
    """`value` as a Python int in [low, high]; NumPy integers count, booleans and floats do not."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise RequestError(f"{value!r} is not an integer", where=name)
    if number < low or (high is not None and number > high):
        allowed = f"at least {low}" if high is None else f"{low} to {high}"
        raise RequestError(f"{number} is out of range", where=name, action=f"allowed: {allowed}")
    return number


def _temperature(value: object) -> float:
    if isinstance(value, bool):
        raise RequestError(f"{value!r} is not a number", where="temperature")
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise RequestError(f"{value!r} is not a number", where="temperature") from None
    if isinstance(value, (str, bytes)) or not math.isfinite(number) or number < 0:
        raise RequestError(f"{value!r} is out of range", where="temperature", action="allowed: finite, >= 0")
    return max(number, MIN_TEMPERATURE) if number > 0 else 0.0


def _token_ids(values: Iterable[int] | None) -> tuple[int, ...]:
    if values is None:
        return ()
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise RequestError(f"{values!r} is not a list of token ids", where="stop_token_ids")
    return tuple(sorted({_integer("stop_token_ids", value, low=0) for value in values}))
