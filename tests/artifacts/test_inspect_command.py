"""`deepinfer inspect` of single graphs: what it prints, what it refuses, and with which exit code."""

import json
from pathlib import Path

import artifact_factory
import pytest

from deepinfer.artifacts import ArtifactWriter, pack_texts, pass_texts_kind
from deepinfer.artifacts.canonical import parse_json
from deepinfer.cli import main as command

CAPTURED = "%0 = input x! : float32[2]\n%1 = aten.exp.default(%0) : float32[2]\nreturn [%1]\n"
FINAL = CAPTURED.replace("exp", "log")


def write_artifact(target: Path, final: str = FINAL) -> str:
    """The small artifact with graphs that can be drawn, and the texts of one of them; returns its id."""
    packed = pack_texts([("captured", CAPTURED), ("fuse_norm", final)])
    assert packed is not None
    with ArtifactWriter(target) as writer:
        artifact_factory.add_files(writer, final)
        reports = {pass_texts_kind("decode-1"): parse_json(packed, where="test")}
        return writer.finish(artifact_factory.make_manifest(), reports)


@pytest.fixture
def artifact(tmp_path: Path, fast_sync: None) -> Path:
    write_artifact(tmp_path / "a.di")
    return tmp_path / "a.di"


def inspect(artifact: Path, *flags: str, expected: int = 0) -> None:
    assert command.main(["inspect", str(artifact), *flags]) == expected


def test_a_graph_is_printed_as_compiled_and_after_each_pass(
    artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = {(): FINAL, ("--after", "captured"): CAPTURED, ("--after", "fuse_norm"): FINAL}
    for flags, text in shown.items():
        inspect(artifact, "--graph", "decode-1", *flags)
        assert capsys.readouterr() == (text, "")


def test_a_graph_is_one_object_for_machines(
    tmp_path: Path, artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inspect(artifact, "--graph", "decode-1", "--after", "captured", "--json")
    facts = json.loads(capsys.readouterr().out)
    assert set(facts) == {"artifact_id", "graph", "after", "text"}
    assert (facts["graph"], facts["after"], facts["text"]) == ("decode-1", "captured", CAPTURED)
    inspect(artifact, "--graph", "decode-1", "--dot", str(tmp_path / "x.dot"), "--json")
    facts = json.loads(capsys.readouterr().out)
    assert (facts["after"], facts["nodes"], facts["edges"]) == (None, 3, 2)


def test_a_drawing_goes_to_a_file_or_to_stdout(
    tmp_path: Path, artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "x.dot"
    inspect(artifact, "--graph", "decode-1", "--dot", str(target))
    assert capsys.readouterr().out == f"wrote       {target}: 3 nodes, 2 edges\n"
    inspect(artifact, "--graph", "decode-1", "--dot", "-")
    assert capsys.readouterr().out == target.read_text()
    assert "aten.log" in target.read_text() and "cylinder" in target.read_text()
    inspect(artifact, "--graph", "decode-1", "--after", "captured", "--dot", "-")
    drawing = capsys.readouterr().out
    assert drawing.startswith('digraph "decode-1 after captured" {') and "aten.exp" in drawing


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--graph", "decode-9"], 2, "the graphs are decode-1, decode-2, prefill-8"),
        (["--graph", "decode-1", "--after", "fuse"], 2, "there is text after captured, fuse_norm"),
        (["--graph", "decode-1", "--after", "fuse_gate"], 2, "was switched off"),
        (["--after", "captured"], 2, "needs --graph"),
        (["--dot", "-"], 2, "needs --graph"),
        (["--graph", "decode-1", "--dot", "-", "--json"], 2, "both go to stdout"),
        (["--graph", "decode-1", "--dot", "/nowhere/x.dot"], 2, "/nowhere/x.dot"),
        (["--graph", "decode-2", "--after", "captured"], 4, "build again with --force"),
    ],
)
def test_what_cannot_be_shown_is_named_in_one_line(
    flags: list[str], code: int, words: str, artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inspect(artifact, *flags, expected=code)
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1 and words in printed.err
    assert (json.loads(printed.out)["error"]["exit_code"] == code) if "--json" in flags else not printed.out


def test_no_control_character_of_a_graph_reaches_the_terminal(
    tmp_path: Path, fast_sync: None, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = FINAL.replace("input x!", "input x\x1b[2J\r\u202e!")
    write_artifact(tmp_path / "x.di", hostile)
    for flags in ([], ["--after", "fuse_norm"]):
        inspect(tmp_path / "x.di", "--graph", "decode-1", *flags)
        text = capsys.readouterr().out
        assert "x\\x1b[2J\\r\\u202e!" in text
        assert all(char.isprintable() or char == "\n" for char in text)
    inspect(tmp_path / "x.di", "--graph", "decode-1", "--dot", "-", expected=4)
    assert "line 1 is no node" in capsys.readouterr().err


def test_a_text_that_is_no_graph_is_printed_and_not_drawn(
    good_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inspect(good_artifact, "--graph", "decode-1")
    assert capsys.readouterr().out == "graph():\n    return hidden\n"
    inspect(good_artifact, "--graph", "decode-1", "--dot", str(tmp_path / "x.dot"), expected=4)
    assert "line 1 is no node" in capsys.readouterr().err and not (tmp_path / "x.dot").exists()
