"""What a request asks of the sampler and of the stop rules: validated once, never changed afterwards.

Owns the user-facing parameter names (those of vLLM, as far as they are supported) and their ranges. Knows
nothing of the model: whether a token id lies in the vocabulary is checked when the request is admitted.
"""

import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Final

from deepinfer.errors import RequestError

MIN_TEMPERATURE = 1e-5  # below it, logits divided by the temperature leave the range of float32
MAX_SEED = 2**64 - 1
MAX_TOP_K = 2**31 - 1
MAX_LOGPROBS = 20
MAX_CHOICES = 64
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256  # of one stop string
MAX_BIAS = 100.0
MAX_PENALTY = 2.0
MIN_REPETITION, MAX_REPETITION = 1e-6, 1e6  # what float32 logits stand
LOGPROBS_MODES: Final = ("processed", "raw")


@dataclass(frozen=True, init=False, slots=True)
class SamplingParams:
    """Sampling parameters of one request.

    n: how many answers to give, 1 to 64. The first uses the seed itself, the others seeds made of it.
    max_tokens: the most tokens to generate, at least 1; with prompt_logprobs also 0.
    min_tokens: before so many tokens the model's end tokens and `stop_token_ids` are not generated.
    temperature: 0 is greedy (lowest id among equal logits); a value between 0 and 1e-5 counts as 1e-5.
    top_k: keep what reaches the k-th largest logit, equal ones included; 0 or -1 keeps all.
    top_p: keep the most probable tokens whose mass reaches top_p, and all as probable as the last; above 0,
        at most 1.
    min_p: keep what is at least min_p times as probable as the most probable; 0 to 1. A greedy request
        ignores these three.
    repetition_penalty: logits of ids in prompt or output are divided by it if above 0, else multiplied; 1e-6
        to 1e6, 1 is none.
    presence_penalty, frequency_penalty: taken from logits of generated ids, once and per occurrence; -2 to 2.
    logit_bias: token id -> what is added to its logit, -100 to 100; after the penalties.
    allowed_token_ids: if given, no other id is generated.
    bad_words: texts, or lists of token ids, that are not generated; text needs the artifact's tokenizer.
    logprobs: 0 to 20; report the log-probability of each token and of so many of the best. None: of none.
    prompt_logprobs: 0 to 20; the same for each token of the prompt but the first, of the model with the
        request's temperature, top_k, top_p and min_p. None: of none.
    golden_token_ids: a continuation to follow whatever is drawn, for as long as it goes; stop rules apply.
    logprobs_mode: "processed" (of what the token was drawn from) or "raw" (of the model's own logits).
    seed: 0 to 2**64 - 1; None draws one at admission, which the result then names. The seed alone, not the
        place in a list or a batch, decides the draws: two prompts with one seed use the same random stream.
    ignore_eos: go on after the model's own end tokens; `stop_token_ids` still stop.
    stop_token_ids: further ids that end the request; the id that stopped it is kept in `token_ids`.
    stop: up to 16 texts of up to 256 characters, or one, that end the request where one first appears in the
        output; `token_ids` keeps its tokens. One that ends within the first `min_tokens` does not count.
    include_stop_str_in_output: keep what stopped the request, a stop string or a stop token, in the text.
    skip_special_tokens: special tokens add nothing to the text, and so to no stop string.

    They apply in this order: penalties, bias, bans (min_tokens, bad_words), allowed_token_ids, the 4,096
    largest logits, temperature, top_k, top_p, min_p. Any other parameter is refused by name. Raises
    RequestError.
    """

    n: int
    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    allowed_token_ids: tuple[int, ...] | None
    bad_words: tuple[str | tuple[int, ...], ...]
    logprobs: int | None
    prompt_logprobs: int | None
    golden_token_ids: tuple[int, ...]
    logprobs_mode: str
    seed: int | None
    ignore_eos: bool
    stop_token_ids: tuple[int, ...]
    stop: tuple[str, ...]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    plain: bool = field(init=False, repr=False, compare=False)  # only the temperature decides on a token

    def __init__(
        self,
        *,
        n: int = 1,
        max_tokens: int = 16,
        min_tokens: int = 0,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] | None = None,
        allowed_token_ids: Iterable[int] | None = None,
        bad_words: Iterable[str | Iterable[int]] | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        golden_token_ids: Iterable[int] | None = None,
        logprobs_mode: str = "processed",
        seed: int | None = None,
        ignore_eos: bool = False,
        stop_token_ids: Iterable[int] | None = None,
        stop: str | Iterable[str] | None = None,
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        **unsupported: object,
    ) -> None:
        if unsupported:
            names = ", ".join(sorted(unsupported))
            raise RequestError(
                f"sampling parameter not supported: {names}",
                where="SamplingParams",
                action=f"supported: {', '.join(entry.name for entry in fields(self) if entry.init)}",
            )
        if not isinstance(logprobs_mode, str) or logprobs_mode not in LOGPROBS_MODES:
            allowed = " or ".join(LOGPROBS_MODES)
            raise RequestError(
                f"{logprobs_mode!r} is no mode", where="logprobs_mode", action=f"allowed: {allowed}"
            )
        repetition = _number("repetition_penalty", repetition_penalty, MIN_REPETITION, MAX_REPETITION)
        limit = _integer("max_tokens", max_tokens, low=1 if prompt_logprobs is None else 0)
        checked = {
            "n": _integer("n", n, low=1, high=MAX_CHOICES),
            "max_tokens": limit,
            "min_tokens": _integer("min_tokens", min_tokens, low=0, high=limit),
            "temperature": _temperature(temperature),
            "top_k": max(_integer("top_k", top_k, low=-1, high=MAX_TOP_K), 0),
            "top_p": _number("top_p", top_p, 0.0, 1.0, above_low=True),
            "min_p": _number("min_p", min_p, 0.0, 1.0),
            "repetition_penalty": repetition,
            "presence_penalty": _number("presence_penalty", presence_penalty, -MAX_PENALTY, MAX_PENALTY),
            "frequency_penalty": _number("frequency_penalty", frequency_penalty, -MAX_PENALTY, MAX_PENALTY),
            "logit_bias": _logit_bias(logit_bias),
            "allowed_token_ids": _allowed(allowed_token_ids),
            "bad_words": _bad_words(bad_words),
            "logprobs": _count("logprobs", logprobs),
            "prompt_logprobs": _count("prompt_logprobs", prompt_logprobs),
            "golden_token_ids": ()
            if golden_token_ids is None
            else _sequence("golden_token_ids", golden_token_ids),
            "logprobs_mode": logprobs_mode,
            "seed": None if seed is None else _integer("seed", seed, low=0, high=MAX_SEED),
            "ignore_eos": _boolean("ignore_eos", ignore_eos),
            "stop_token_ids": _token_ids("stop_token_ids", stop_token_ids),
            "stop": _stop(stop),
            "include_stop_str_in_output": _boolean("include_stop_str_in_output", include_stop_str_in_output),
            "skip_special_tokens": _boolean("skip_special_tokens", skip_special_tokens),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        filters = self.top_k != 0 or self.top_p != 1.0 or self.min_p != 0.0
        plain = not (filters or self.looks_at_tokens or self.logprobs is not None)
        object.__setattr__(self, "plain", plain)

    @property
    def greedy(self) -> bool:
        """Whether no random number is used."""
        return self.temperature == 0.0

    @property
    def penalises(self) -> bool:
        """Whether what a request already holds changes its logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def looks_at_tokens(self) -> bool:
        """Whether single tokens are treated in some way of their own."""
        bans = self.bad_words or self.min_tokens or self.allowed_token_ids is not None
        return bool(self.penalises or self.logit_bias or bans)

    def largest_token_ids(self) -> Iterator[tuple[str, int]]:
        """Parameters that name token ids, each with its largest; text among `bad_words` has none."""
        sequences = {
            "stop_token_ids": self.stop_token_ids,
            "golden_token_ids": self.golden_token_ids,
            "logit_bias": [token for token, _ in self.logit_bias],
            "allowed_token_ids": self.allowed_token_ids or (),
            "bad_words": [token for word in self.bad_words if not isinstance(word, str) for token in word],
        }
        return ((name, max(ids)) for name, ids in sequences.items() if ids)


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


def _boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise RequestError(f"{value!r} is neither True nor False", where=name)
    return value


def _count(name: str, value: object) -> int | None:
    return None if value is None else _integer(name, value, low=0, high=MAX_LOGPROBS)


def _float(name: str, value: object) -> float:
    """`value` as a Python float; booleans and text do not count."""
    if isinstance(value, (bool, str, bytes)):
        raise RequestError(f"{value!r} is not a number", where=name)
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise RequestError(f"{value!r} is not a number", where=name) from None


def _number(name: str, value: object, low: float, high: float, *, above_low: bool = False) -> float:
    """`value` as a float in [low, high], or in (low, high]."""
    number = _float(name, value)
    if not low <= number <= high or (above_low and number == low):  # false for a NaN too
        allowed = f"above {low:g}, at most {high:g}" if above_low else f"{low:g} to {high:g}"
        raise RequestError(f"{value!r} is out of range", where=name, action=f"allowed: {allowed}")
    return number + 0.0  # -0.0 counts as 0.0


def _temperature(value: object) -> float:
    number = _float("temperature", value)
    if not math.isfinite(number) or number < 0:
        raise RequestError(f"{value!r} is out of range", where="temperature", action="allowed: finite, >= 0")
    return max(number, MIN_TEMPERATURE) if number > 0 else 0.0


def _token_ids(name: str, values: Iterable[int] | None) -> tuple[int, ...]:
    """Ids in rising order, each once."""
    return tuple(sorted(set(_sequence(name, values)))) if values is not None else ()


def _sequence(name: str, values: object) -> tuple[int, ...]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise RequestError(f"{values!r} is not a list of token ids", where=name)
    return tuple(_integer(name, value, low=0) for value in values)


def _allowed(values: Iterable[int] | None) -> tuple[int, ...] | None:
    if values is None:
        return None
    ids = _token_ids("allowed_token_ids", values)
    if not ids:
        raise RequestError(
            "an empty list allows no token", where="allowed_token_ids", action="None allows all"
        )
    return ids


def _logit_bias(values: object) -> tuple[tuple[int, float], ...]:
    """Pairs in rising order of the id; of two for one id the later counts."""
    if values is None:
        return ()
    try:
        items = dict(values).items()  # type: ignore[call-overload]
    except (TypeError, ValueError):
        raise RequestError(f"{values!r} is no mapping of token ids to numbers", where="logit_bias") from None
    pairs = {
        _integer("logit_bias", token, low=0): _number("logit_bias", bias, -MAX_BIAS, MAX_BIAS)
        for token, bias in items
    }
    return tuple(sorted(pairs.items()))


def _bad_words(values: Iterable[str | Iterable[int]] | None) -> tuple[str | tuple[int, ...], ...]:
    if values is None:
        return ()
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise RequestError(f"{values!r} is not a list of words", where="bad_words")
    words = [word if isinstance(word, str) else _sequence("bad_words", word) for word in values]
    if any(not word or (isinstance(word, str) and word.isspace()) for word in words):
        raise RequestError("an empty word", where="bad_words", action="allowed: at least one token each")
    return tuple(words)


def _stop(values: str | Iterable[str] | None) -> tuple[str, ...]:
    """Stop strings in their order, each once."""
    if values is None:
        return ()
    stops = (values,) if isinstance(values, str) else tuple(values) if isinstance(values, Iterable) else None
    if (
        stops is None
        or isinstance(values, (bytes, Mapping))
        or not all(isinstance(one, str) for one in stops)
    ):
        raise RequestError(f"{values!r} is no text or list of texts", where="stop")
    if len(stops) > MAX_STOP_STRINGS:
        raise RequestError(f"{len(stops)} texts, more than {MAX_STOP_STRINGS}", where="stop")
    for one in stops:
        if not 1 <= len(one) <= MAX_STOP_CHARACTERS:
            raise RequestError(
                f"a text of {len(one)} characters",
                where="stop",
                action=f"allowed: 1 to {MAX_STOP_CHARACTERS}",
            )
        if any("\ud800" <= character <= "\udfff" for character in one):
            raise RequestError("a text that is not valid Unicode", where="stop")
    return tuple(dict.fromkeys(stops))
