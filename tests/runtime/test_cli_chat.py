"""`deepinfer chat` and streaming `deepinfer generate`, over an artifact whose graphs are fakes."""

import io
from pathlib import Path

import pytest
from fake_artifact import OpenedFakes, write_artifact
from fake_graphs import expected_tokens

from deepinfer.artifacts import TrustStore
from deepinfer.cli import main as main_command
from deepinfer.runtime import loader
from deepinfer.runtime.sampling_params import SamplingParams

TEMPLATE = (
    "{% for m in messages %}{{ m.content }} {% if m.role == 'assistant' %}w2 {% else %}w3 {% endif %}"
    "{% endfor %}{% if messages | length > 8 %}{{ raise_exception('too long') }}{% endif %}"
)


@pytest.fixture
def artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(loader.CompiledGraph, "open", OpenedFakes().open)
    TrustStore().trust(write_artifact(tmp_path / "out", chat_template=TEMPLATE))
    return tmp_path / "out"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def answer(ids: list[int], max_tokens: int) -> str:
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    return "".join(f" w{token}" for token in expected_tokens(ids, params, 0) if token != 1)


def chat(artifact: Path, monkeypatch: pytest.MonkeyPatch, lines: io.StringIO, *flags: str) -> int:
    monkeypatch.setattr("sys.stdin", lines)
    return main_command.main(["chat", str(artifact), "--num-threads", "1", *flags])


def test_every_line_is_answered_in_the_light_of_those_before(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = io.StringIO("w7\n\nw8\n/clear\nw7\n/exit\nw9\n")
    assert chat(artifact, monkeypatch, lines, "--max-tokens", "3", "--system", "w5") == 0
    first = answer([5, 3, 7, 3], 3)
    ids = [int(word[1:]) for word in first.split()]
    second = answer([5, 3, 7, 3, *ids, 2, 8, 3], 3)
    captured = capsys.readouterr()
    assert captured.out == f"{first}\n{second}\n{first}\n" and captured.err == ""


def test_what_cannot_be_answered_is_told_and_the_next_line_is_answered(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    long = " ".join(["w7"] * 70)
    assert chat(artifact, monkeypatch, io.StringIO(f"{long}\nw7\n"), "--max-tokens", "2") == 2
    captured = capsys.readouterr()
    assert captured.out == f"{answer([7, 3], 2)}\n" and "/clear" in captured.err
    assert chat(artifact, monkeypatch, Terminal(f"{long}\nw7\n"), "--max-tokens", "2") == 0
    captured = capsys.readouterr()
    assert captured.out == f"{answer([7, 3], 2)}\n" and "/clear" in captured.err and "> " in captured.err


def test_a_bad_flag_is_refused_before_anything_is_loaded(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loader.CompiledGraph, "open", None)
    for flags in (["--temperature", "-1"], ["--stop", ""], ["--top-p", "0"]):
        assert chat(artifact, monkeypatch, io.StringIO("w7\n"), *flags) == 2
        assert flags[0].lstrip("-").replace("-", "_") in capsys.readouterr().err


def test_an_artifact_without_a_form_of_conversations_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loader.CompiledGraph, "open", OpenedFakes().open)
    TrustStore().trust(write_artifact(tmp_path / "out"))
    assert chat(tmp_path / "out", monkeypatch, io.StringIO("w7\n")) == 2
    assert "chat template" in capsys.readouterr().err


def test_a_stream_prints_what_the_whole_prints(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["generate", str(artifact), "--num-threads", "1", "--max-tokens", "9", "-q"]
    free = answer([3, 4, 5], 9)
    stop = free[6:11]  # from within one word into the next
    for more, text in (([], free), (["--stop", stop, "--stop", "never"], free[: free.index(stop)])):
        for stream in ([], ["--stream"]):
            assert main_command.main([*flags, "--prompt", "w3 w4 w5", *more, *stream]) == 0
            assert capsys.readouterr().out == f"{text}\n"
    assert main_command.main([*flags, "--prompt", "w3", "--stream", "--json"]) == 2
    assert "--stream: prints text as it comes, --json a whole answer" in capsys.readouterr().err


def test_a_terminal_gets_the_text_piece_by_piece(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[str] = []

    class Screen(Terminal):
        def write(self, text: str) -> int:
            pieces.append(text)
            return len(text)

    monkeypatch.setattr("sys.stdout", Screen())
    flags = [
        "generate",
        str(artifact),
        "--num-threads",
        "1",
        "--max-tokens",
        "5",
        "--prompt",
        "w3 w4 w5",
        "-q",
    ]
    assert main_command.main(flags) == 0
    text = answer([3, 4, 5], 5)
    assert "".join(pieces) == f"{text}\n" and len([piece for piece in pieces if piece.strip()]) == 5
