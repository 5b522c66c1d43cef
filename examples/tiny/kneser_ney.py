"""The baseline of the tiny model: an interpolated modified Kneser-Ney n-gram model over the same tokens.

    python examples/tiny/kneser_ney.py --cache DIR

counts the training tokens that make_tokenizer.py wrote into DIR and prints bits per token, bits per byte and
perplexity on the held-out ones, in all and by source.

The model (Chen and Goodman 1999): an n-gram of the highest order counts its occurrences; one of a lower order
counts the different tokens seen before it, unless it begins with BOS, which nothing precedes. Three discounts
per order, for counts of one, two, and more, follow from how many n-grams have counts one to four. What they
take away goes to the next lower order, and below single tokens to the uniform distribution. BOS is never
predicted; before the first token of a document stand order - 1 of them.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ORDER = 5


@dataclass(frozen=True)
class _Level:
    """Discounted counts of one order, sorted by key; a key is the tokens as digits in base vocab_size.

    grams uint64 [n]; shares float64 [n] = (count - discount) / total of the context; contexts uint64 [c];
    backoff float64 [c] = mass that the discounts took from the context.
    """

    grams: np.ndarray
    shares: np.ndarray
    contexts: np.ndarray
    backoff: np.ndarray


def _find(keys: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where `wanted` lie in the sorted `keys`, and whether they are there."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return at, keys[at] == wanted


def discounts(counts: np.ndarray) -> np.ndarray:
    """What counts of 0, 1, 2, and 3 or more lose: float64 [4].

    D_k = k - (k + 1) Y n_(k+1) / n_k with Y = n_1 / (n_1 + 2 n_2), n_k = number of n-grams that count k.
    Where an n_k is zero, as in a small text, the one discount Y stands for all; where Y is unknown, a half.
    """
    n = [int(np.count_nonzero(counts == k)) for k in range(5)]
    if n[1] == 0 or n[2] == 0:
        return np.array([0.0, 0.5, 0.5, 0.5])
    y = n[1] / (n[1] + 2 * n[2])
    if n[3] == 0 or n[4] == 0:
        return np.array([0.0, y, y, y])
    values = [k - (k + 1) * y * n[k + 1] / n[k] for k in (1, 2, 3)]
    return np.array([0.0, *np.clip(values, 0.0, (1.0, 2.0, 3.0))])


class KneserNey:
    """An n-gram model of one training text."""

    def __init__(self, tokens: np.ndarray, vocab_size: int, order: int = ORDER, bos_id: int = 0) -> None:
        """tokens: integers [n], each document beginning with `bos_id`. Raises ValueError if keys overflow."""
        if vocab_size**order >= 2**64:
            raise ValueError(f"{order}-grams of {vocab_size} tokens do not fit a 64-bit key")
        self.vocab_size, self.order, self.bos_id = vocab_size, order, bos_id
        windows = self._windows(tokens)
        self._levels = [self._level(windows, length) for length in range(1, order + 1)]

    def _windows(self, tokens: np.ndarray) -> np.ndarray:
        """Every predicted token with the order - 1 tokens before it: uint64 [predicted, order].

        Tokens of an earlier document, and places before the first one, read as BOS.
        """
        tokens = np.asarray(tokens)
        predicted = np.flatnonzero(tokens != self.bos_id)
        starts = np.flatnonzero(tokens == self.bos_id)
        document = np.searchsorted(starts, predicted, side="right") - 1
        start = np.where(document >= 0, starts[document], 0) if len(starts) else np.zeros_like(predicted)
        windows = np.full((len(predicted), self.order), self.bos_id, dtype=np.uint64)
        for column in range(self.order):
            at = predicted - (self.order - 1 - column)
            inside = at >= start
            windows[inside, column] = tokens[at[inside]]
        return windows

    def _keys(self, windows: np.ndarray) -> np.ndarray:
        """Tokens [..., length] as one number each."""
        keys = np.zeros(windows.shape[:-1], dtype=np.uint64)
        for column in range(windows.shape[-1]):
            keys = keys * np.uint64(self.vocab_size) + windows[..., column].astype(np.uint64)
        return keys

    def _counts(self, windows: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys of the n-grams of `length` in ascending order, and what each counts."""
        grams, counts = np.unique(self._keys(windows[:, self.order - length :]), return_counts=True)
        if length == self.order:
            return grams, counts
        longer = np.unique(self._keys(windows[:, self.order - length - 1 :]))
        power = np.uint64(self.vocab_size**length)
        _, continuations = np.unique(longer % power, return_counts=True)
        begins = grams // np.uint64(self.vocab_size ** (length - 1)) == np.uint64(self.bos_id)
        return grams, np.where(begins, counts, continuations)

    def _level(self, windows: np.ndarray, length: int) -> _Level:
        grams, counts = self._counts(windows, length)
        lost = discounts(counts)[np.minimum(counts, 3)]
        contexts, first = np.unique(grams // np.uint64(self.vocab_size), return_index=True)
        totals = np.add.reduceat(counts, first).astype(np.float64)
        sizes = np.diff(np.append(first, len(grams)))
        shares = (counts - lost) / np.repeat(totals, sizes)
        return _Level(grams, shares, contexts, np.add.reduceat(lost, first) / totals)

    def _probabilities(self, windows: np.ndarray) -> np.ndarray:
        """Probability of the last token of every window, float64 [n], from the lowest order up."""
        result = np.full(len(windows), 1.0 / self.vocab_size)
        for length, level in enumerate(self._levels, start=1):
            keys = self._keys(windows[:, self.order - length :])
            context, known = _find(level.contexts, keys // np.uint64(self.vocab_size))
            gram, seen = _find(level.grams, keys)
            mixed = np.where(seen, level.shares[gram], 0.0) + level.backoff[context] * result
            result = np.where(known, mixed, result)
        return result

    def distribution(self, context: list[int]) -> np.ndarray:
        """Probabilities of all tokens after `context`, float64 [vocab_size]; only its end matters."""
        padded = ([self.bos_id] * (self.order - 1) + context)[len(context) :]
        windows = np.empty((self.vocab_size, self.order), dtype=np.uint64)
        windows[:, :-1] = np.array(padded, dtype=np.uint64)
        windows[:, -1] = np.arange(self.vocab_size)
        return self._probabilities(windows)

    def bits(self, tokens: np.ndarray) -> np.ndarray:
        """-log2 of the probability of every token but the BOS ones, float64 [predicted], in order."""
        return -np.log2(self._probabilities(self._windows(tokens)))


def summarise(bits: float, predicted_tokens: int, num_bytes: int) -> str:
    """Bits per token, bits per byte and perplexity per token, in words."""
    per_token = bits / predicted_tokens
    return (
        f"{predicted_tokens} tokens, {num_bytes} bytes: {per_token:.4f} bits per token, "
        f"{bits / num_bytes:.4f} bits per byte, perplexity {2**per_token:.2f}"
    )


def _print_by_source(bits: np.ndarray, documents: list[dict]) -> None:
    totals: dict[str, list[float]] = {}
    first = 0
    for document in documents:
        predicted = document["tokens"] - 1
        entry = totals.setdefault(document["source"], [0.0, 0, 0])
        entry[0] += float(bits[first : first + predicted].sum())
        entry[1] += predicted
        entry[2] += document["bytes"]
        first += predicted
    for source, (total, predicted, num_bytes) in totals.items():
        print(f"  {source}: {summarise(total, int(predicted), int(num_bytes))}")


def main(arguments: list[str] | None = None) -> int:
    """Count, evaluate, print."""
    parser = argparse.ArgumentParser(description="Evaluate a Kneser-Ney n-gram model on the tiny corpus.")
    parser.add_argument("--cache", type=Path, required=True, help="folder with train.bin and heldout.bin")
    parser.add_argument("--order", type=int, default=ORDER)
    options = parser.parse_args(arguments)
    facts = json.loads((options.cache / "tokens.json").read_text(encoding="utf-8"))
    train, held_out = (
        np.fromfile(options.cache / f"{name}.bin", dtype="<u2") for name in ("train", "heldout")
    )
    model = KneserNey(train, facts["vocab_size"], options.order)
    split = facts["splits"]["heldout"]
    bits = model.bits(held_out)
    print(f"order {options.order}, trained on {len(train)} tokens")
    print(f"held out: {summarise(float(bits.sum()), split['predicted_tokens'], split['bytes'])}")
    _print_by_source(bits, split["documents"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
