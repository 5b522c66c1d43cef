"""The commands' flags are frozen: adding one edits this list and the documents that name it."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

import deepinfer
from deepinfer.cli import compile as compile_command
from deepinfer.cli import diff as diff_command
from deepinfer.cli import main as main_command

COMPILE = "MODEL -h --help -o --output --precision --decode-rows --prefill-tokens --max-model-len \
--max-num-seqs --jobs --kernels --kv-cache-memory-bytes \
--target --config --plan --dump --force --json -q --quiet --version"
DIFF = "OUT -h --help --model --prompts-file --report --junit --json -q --quiet --version"
GENERATE = "OUT -h --help --prompt --prompt-token-ids --prompts-file --max-tokens --temperature --seed \
--top-k --top-p --min-p --min-tokens --logprobs --presence-penalty --frequency-penalty --repetition-penalty \
--stop --stream --num-threads --config --json -q --quiet --version \
--n --prompt-logprobs"
CHAT = "OUT -h --help --system --reasoning-effort --max-tokens --temperature --seed --top-k --top-p --min-p \
--presence-penalty --frequency-penalty --repetition-penalty --stop --num-threads --config -q --quiet \
--version"
INSPECT = "OUT -h --help --graph --after --dot --json -q --quiet --version"
BENCH = "KIND OUT -h --help --concurrency --input-len --output-len --chunk-size \
--num-requests --vary --repeats --num-threads --output-json --output-markdown --plot --trace --config --json \
-q --quiet --version"
EVAL = "OUT -h --help --text --num-threads --config --json -q --quiet --version"
TRUST = "OUT -h --help --json -q --quiet --version"


def _flags(parser: argparse.ArgumentParser) -> set[str]:
    flags: set[str] = set()
    for action in parser._actions:
        flags |= set(action.option_strings) or {str(action.metavar)}
    return flags


def _subparsers() -> dict[str, argparse.ArgumentParser]:
    (action,) = (a for a in main_command.build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(action.choices)


def test_the_flags_of_compile_are_the_listed_ones() -> None:
    assert _flags(compile_command.build_parser()) == set(COMPILE.split())


def test_the_flags_of_diff_are_the_listed_ones() -> None:
    assert _flags(diff_command.build_parser()) == set(DIFF.split())


def test_the_subcommands_and_their_flags_are_the_listed_ones() -> None:
    parsers = _subparsers()
    assert {name: _flags(parser) for name, parser in parsers.items()} == {
        "generate": set(GENERATE.split()),
        "chat": set(CHAT.split()),
        "inspect": set(INSPECT.split()),
        "bench": set(BENCH.split()),
        "eval": set(EVAL.split()),
        "trust": set(TRUST.split()),
    }


@pytest.mark.parametrize("module", ["main", "compile", "diff"])
def test_help_and_version_end_with_success(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = {"main": main_command, "compile": compile_command, "diff": diff_command}[module]
    for flag, words in (("--help", "usage: deepinfer"), ("--version", f"deepinfer {deepinfer.__version__}")):
        with pytest.raises(SystemExit) as ended:
            command.main([flag])
        assert ended.value.code == 0 and words in capsys.readouterr().out


def test_flags_cannot_be_abbreviated(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert compile_command.main([str(tmp_path), "-o", "x", "--prec", "float32"]) == 2
    assert "--prec" in capsys.readouterr().err


def test_the_package_and_the_commands_start_without_torch() -> None:
    code = (
        "import sys, deepinfer, deepinfer.cli.main, deepinfer.cli.compile, deepinfer.cli.diff;"
        "assert deepinfer.CompileConfig().max_num_seqs == 8;"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0


def test_every_public_name_is_listed_and_an_unknown_one_is_an_attribute_error() -> None:
    assert set(deepinfer._HOME) | {"DeepInferError", "__version__"} == set(deepinfer.__all__)
    assert dir(deepinfer) == sorted(deepinfer.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        deepinfer.no_such_name  # noqa: B018
