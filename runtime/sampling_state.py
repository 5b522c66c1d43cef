"""What a request's own tokens mean for its next logits: counts for penalties, bias and bans, allowed ids.

A function of the prompt, the output and the parameters: nothing of a batch enters. Kept up by what is new
since the last step. Plain arrays; knows nothing of logits or tensors.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from deepinfer.runtime.sampling_params import SamplingParams

_BANNED = -np.inf


class SamplingState:
    """State of one request whose parameters look at tokens; the arrays are what the next token needs."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        end_token_ids: Sequence[int],
        vocab_size: int,
    ) -> None:
        """end_token_ids: the model's own. All ids lie in the vocabulary, and `bad_words` holds no text."""
        self._params = params
        words = [word for word in params.bad_words if not isinstance(word, str)]
        assert len(words) == len(params.bad_words), "text has become token ids"
        self._long_words = [word for word in words if len(word) > 1]
        self._base = dict(params.logit_bias) | {word[0]: _BANNED for word in words if len(word) == 1}
        self._end_ids = {*end_token_ids, *params.stop_token_ids} if params.min_tokens else set()
        self._base_bias = _bias_arrays(self._base)
        self._num_seen = 0
        prompt = np.asarray(prompt_token_ids if params.repetition_penalty != 1.0 else (), np.int64)
        self.history_ids: NDArray[np.int64] = np.unique(prompt)  # rising
        self.history_counts = np.zeros(len(self.history_ids), np.int64)  # 0: in the prompt alone
        self.bias_ids, self.bias = self._base_bias  # ids rise; -inf bans
        self.mask = (
            None if params.allowed_token_ids is None else _packed(params.allowed_token_ids, vocab_size)
        )
        self.advance(())

    def advance(self, output_token_ids: Sequence[int]) -> None:
        """Brings the arrays up to these output tokens, of which those seen before are the beginning."""
        if self._params.penalises:
            for token in output_token_ids[self._num_seen :]:
                self._count(token)
            self._num_seen = len(output_token_ids)
        banned = self._end_ids if len(output_token_ids) < self._params.min_tokens else set()
        if self._long_words:
            banned = banned | {
                word[-1] for word in self._long_words if _ends_with(output_token_ids, word[:-1])
            }
        bans = dict.fromkeys(banned, _BANNED)
        self.bias_ids, self.bias = _bias_arrays(self._base | bans) if bans else self._base_bias

    def _count(self, token: int) -> None:
        place = int(self.history_ids.searchsorted(token))
        if place == len(self.history_ids) or self.history_ids[place] != token:
            self.history_ids = np.insert(self.history_ids, place, token)
            self.history_counts = np.insert(self.history_counts, place, 0)
        self.history_counts[place] += 1


def make_state(
    params: SamplingParams, prompt_token_ids: Sequence[int], end_token_ids: Sequence[int], vocab_size: int
) -> SamplingState | None:
    """The state that a new request needs; None if its parameters look at no token."""
    if not params.looks_at_tokens:
        return None
    return SamplingState(params, prompt_token_ids, end_token_ids, vocab_size)


def _bias_arrays(bias: dict[int, float]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    ids = sorted(bias)
    return np.asarray(ids, np.int64), np.asarray([bias[token] for token in ids], np.float32)


def _ends_with(token_ids: Sequence[int], ending: Sequence[int]) -> bool:
    count = len(ending)
    return len(token_ids) >= count and tuple(token_ids[-count:]) == tuple(ending)


def _packed(allowed: Sequence[int], vocab_size: int) -> NDArray[np.int32]:
    """Bit i of word w allows id 32 w + i."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
