"""The n-gram baseline: it is a probability distribution, and the one that its definition gives by hand."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kneser_ney import KneserNey, discounts, main, summarise

VOCAB = 6
DOCUMENTS = st.lists(st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=30), min_size=1, max_size=4)


def stream(documents: list[list[int]]) -> np.ndarray:
    """Documents one after another, BOS (0) before each."""
    return np.array([token for document in documents for token in (0, *document)], dtype=np.uint16)


@settings(max_examples=60, deadline=None)
@given(DOCUMENTS, st.integers(1, 5), st.lists(st.integers(0, VOCAB - 1), max_size=6))
def test_every_context_has_a_distribution(documents: list[list[int]], order: int, context: list[int]) -> None:
    model = KneserNey(stream(documents), VOCAB, order)
    probabilities = model.distribution(context)
    assert probabilities.sum() == pytest.approx(1.0, abs=1e-12)
    assert probabilities.min() >= 0.0


def test_sums_to_one_on_contexts_of_a_longer_text() -> None:
    generator = np.random.default_rng(3)
    tokens = generator.zipf(1.3, size=20000) % 200 + 1
    tokens[::500] = 0
    model = KneserNey(tokens, 201)
    for at in generator.integers(4, len(tokens), size=20):
        context = tokens[at - 4 : at].tolist()
        assert model.distribution(context).sum() == pytest.approx(1.0, abs=1e-12)
    assert model.distribution([199, 3, 199, 3]).sum() == pytest.approx(1.0, abs=1e-12)


def test_bigram_by_hand() -> None:
    # One document 1 2 1 2 1 3. Bigrams: 0-1 once, 1-2 twice, 2-1 twice, 1-3 once: n_1 = n_2 = 2, no three, so
    # one discount Y = 2 / (2 + 4) = 1/3. Tokens before: of 1 two (0 and 2), of 2 one, of 3 one: n_1 = 2 and
    # n_2 = 1, so Y = 2 / (2 + 2) = 1/2; what three discounts of a half take from four goes to the uniform.
    model = KneserNey(stream([[1, 2, 1, 2, 1, 3]]), VOCAB, order=2)
    uniform = (3 / 2) / 4 / 6
    single = {1: (2 - 1 / 2) / 4 + uniform, 2: (1 - 1 / 2) / 4 + uniform, 3: (1 - 1 / 2) / 4 + uniform}
    after_one = (2 / 3) / 3  # two discounts of a third, of three occurrences
    expected = [0.0] * VOCAB
    for token in range(VOCAB):
        expected[token] = after_one * single.get(token, uniform)
    expected[2] += (2 - 1 / 3) / 3
    expected[3] += (1 - 1 / 3) / 3
    np.testing.assert_allclose(model.distribution([1]), expected, rtol=1e-12)
    lower = [single.get(token, uniform) for token in range(VOCAB)]
    np.testing.assert_allclose(model.distribution([5]), lower, rtol=1e-12)  # 5 was never a context


def by_definition(documents: list[list[int]], order: int, context: tuple[int, ...], token: int) -> float:
    """The probability, from dictionaries and recursion alone."""
    texts = [(*[0] * (order - 1), *document) for document in documents]

    def ngrams(length: int) -> list[tuple[int, ...]]:
        ends = [(text, end) for text in texts for end in range(order - 1, len(text))]
        return [text[end - length + 1 : end + 1] for text, end in ends]

    def counts(length: int) -> Counter[tuple[int, ...]]:
        occurrences = Counter(ngrams(length))
        if length == order:
            return occurrences
        before = Counter(gram[1:] for gram in set(ngrams(length + 1)))
        return Counter({gram: occurrences[gram] if gram[0] == 0 else before[gram] for gram in occurrences})

    def probability(context: tuple[int, ...]) -> float:
        counted = counts(len(context) + 1)
        after = {gram: count for gram, count in counted.items() if gram[:-1] == context}
        lower = probability(context[1:]) if context else 1 / VOCAB
        if not after:
            return lower
        lost = discounts(np.array(list(counted.values())))
        taken = sum(lost[min(count, 3)] for count in after.values())
        count = after.get((*context, token), 0)
        return float((count - lost[min(count, 3)] + taken * lower) / sum(after.values()))

    return probability(context)


@settings(max_examples=40, deadline=None)
@given(DOCUMENTS, st.integers(1, 4), st.data())
def test_probabilities_are_those_of_the_definition(
    documents: list[list[int]], order: int, data: st.DataObject
) -> None:
    model = KneserNey(stream(documents), VOCAB, order)
    words = data.draw(st.lists(st.integers(1, VOCAB - 1), max_size=order - 1))
    context = ([0] * (order - 1) + words)[len(words) :]
    token = data.draw(st.integers(0, VOCAB - 1))
    expected = by_definition(documents, order, tuple(context), token)
    assert model.distribution(context)[token] == pytest.approx(expected, rel=1e-12)


def test_discounts_by_hand() -> None:
    counts = np.repeat([1, 2, 3, 4, 9], [8, 4, 2, 1, 3])  # Y = 8 / 16
    expected = [0.0, 1 - 2 * 0.5 * 4 / 8, 2 - 3 * 0.5 * 2 / 4, 3 - 4 * 0.5 * 1 / 2]
    np.testing.assert_allclose(discounts(counts), expected)


def test_documents_do_not_see_each_other() -> None:
    # After BOS the text before it is forgotten, and order - 1 BOS tokens are the context of a first token.
    model = KneserNey(stream([[1, 2, 3], [4, 5, 1]]), VOCAB, order=3)
    alone = model.bits(stream([[4, 5, 1]]))
    together = model.bits(stream([[2, 2, 2], [4, 5, 1]]))
    np.testing.assert_array_equal(together[3:], alone)
    assert alone[0] == pytest.approx(-np.log2(model.distribution([0, 0])[4]))


def test_bits_are_those_of_the_distributions() -> None:
    generator = np.random.default_rng(5)
    train, text = generator.integers(1, VOCAB, 300), generator.integers(1, VOCAB, 12).tolist()
    model = KneserNey(stream([train.tolist()]), VOCAB)
    expected = [-np.log2(model.distribution([0, *text[:at]])[text[at]]) for at in range(len(text))]
    np.testing.assert_allclose(model.bits(stream([text])), expected, rtol=1e-12)


def test_a_key_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="64-bit"):
        KneserNey(stream([[1]]), 8192, order=5)


def test_summary_counts_bytes_and_tokens() -> None:
    assert summarise(30.0, 10, 40) == (
        "10 tokens, 40 bytes: 3.0000 bits per token, 0.7500 bits per byte, perplexity 8.00"
    )


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train, held_out = stream([[1, 2, 1, 2, 1, 3]]), stream([[1, 2], [1, 3]])
    train.astype("<u2").tofile(tmp_path / "train.bin")
    held_out.astype("<u2").tofile(tmp_path / "heldout.bin")
    documents = [{"source": name, "tokens": 3, "bytes": 4} for name in ("first", "second")]
    split = {"predicted_tokens": 4, "bytes": 8, "documents": documents}
    facts = {"vocab_size": VOCAB, "splits": {"heldout": split}}
    (tmp_path / "tokens.json").write_text(json.dumps(facts))
    assert main(["--cache", str(tmp_path), "--order", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    bits = KneserNey(train, VOCAB, 2).bits(held_out)
    assert lines[1] == f"held out: {summarise(float(bits.sum()), 4, 8)}"
    assert lines[2:] == [
        f"  first: {summarise(float(bits[:2].sum()), 2, 4)}",
        f"  second: {summarise(float(bits[2:].sum()), 2, 4)}",
    ]
