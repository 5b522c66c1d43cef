"""`deepinfer eval`: the loss of a text through the engine is the eager model's, whatever the windows."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from end_to_end import make_prompt
from hypothesis import given
from hypothesis import strategies as st

from deepinfer import evaluation
from deepinfer.cli.main import main
from deepinfer.errors import RequestError
from deepinfer.evaluation import evaluate_text, evaluate_tokens, windows
from deepinfer.graphs.eager import eager_logits
from deepinfer.runtime.llm import LLM


@pytest.fixture(scope="module")
def llm(float32_artifact: Path) -> LLM:
    return LLM(float32_artifact, num_threads=1)


def eager_loss(golden_dir: Path, tokens: list[int], first: int) -> float:
    """Of the tokens from `first` on, in nats."""
    logits = eager_logits(golden_dir, tokens, "float32").astype(np.float64)
    largest = logits.max(axis=1, keepdims=True)
    logprobs = logits - largest - np.log(np.exp(logits - largest).sum(axis=1, keepdims=True))
    return -sum(logprobs[place - 1, tokens[place]] for place in range(first, len(tokens)))


@pytest.fixture
def a_token_per_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """The golden model's own tokenizer knows single words only."""
    monkeypatch.setattr(evaluation, "_encode", lambda llm, text: [3 + byte for byte in text.encode()])


@given(num_tokens=st.integers(2, 500), length=st.integers(2, 64))
def test_windows_score_every_token_once_with_half_a_window_before_it(num_tokens: int, length: int) -> None:
    scored = []
    for start, end, first in windows(num_tokens, length):
        assert 0 <= start <= first < end <= num_tokens and end - start <= length
        assert first - start >= min(length // 2 - 1, first)
        scored += range(first + 1, end)
    assert scored == list(range(1, num_tokens))


def test_loss_is_that_of_the_eager_model(llm: LLM, golden_dir: Path) -> None:
    tokens = make_prompt(90, seed=3)
    assert evaluate_tokens(llm, tokens) == pytest.approx(eager_loss(golden_dir, tokens, 1), rel=1e-5)


def test_long_text_is_read_in_windows(llm: LLM, golden_dir: Path) -> None:
    length = llm.limits.max_model_len
    tokens = make_prompt(length + length // 4, seed=4)
    expected = eager_loss(golden_dir, tokens[:length], 1)
    expected += eager_loss(golden_dir, tokens[length - length // 2 :], length // 2)
    assert evaluate_tokens(llm, tokens) == pytest.approx(expected, rel=1e-5)


def test_command_prints_measures_that_fit_together(
    float32_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], a_token_per_byte: None
) -> None:
    file = tmp_path / "text.txt"
    text = "w12 W7 w99 w3 w12 w100 ünïcödé w5"
    file.write_text(text, "utf-8")
    assert main(["eval", str(float32_artifact), "--text", str(file), "--num-threads", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bytes"] == len(text.encode())
    assert found["perplexity"] == pytest.approx(2 ** found["bits_per_token"])
    assert found["bits_per_byte"] * found["bytes"] == pytest.approx(found["bits_per_token"] * found["tokens"])


def test_the_same_text_gives_the_same_bits(llm: LLM, a_token_per_byte: None) -> None:
    text = "w12 W7 w99 w3 " * 12
    first = evaluate_text(llm, text)
    assert evaluate_text(llm, text) == first and math.isfinite(first.perplexity)


def test_what_cannot_be_evaluated_is_refused(
    llm: LLM, float32_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RequestError, match="fewer than two"):
        evaluate_tokens(llm, [5])
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    for path, fault in (
        (binary, "not UTF-8"),
        (tmp_path / "missing", "cannot be read"),
        (tmp_path, "cannot be read"),
    ):
        assert main(["eval", str(float32_artifact), "--text", str(path)]) == 2
        captured = capsys.readouterr()
        assert fault in captured.err and captured.out == ""
