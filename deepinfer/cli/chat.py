"""`deepinfer chat`: a conversation on the terminal, line by line."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer.cli.common import StrictParser, add_version_flag
from deepinfer.cli.generate import collector_paused, print_stream
from deepinfer.cli.sampling_flags import add_sampling_flags, sampling_params
from deepinfer.errors import NumericalError, RequestError
from deepinfer.settings import UNSET, load_settings

if TYPE_CHECKING:
    from deepinfer.runtime.llm import LLM

_HELP = "Lines are messages. /clear begins anew, /exit or the end of input ends it."


def add_parser(commands: "argparse._SubParsersAction[StrictParser]") -> None:
    """The flags of `deepinfer chat`."""
    parser = commands.add_parser("chat", help="talk with a model", description=f"Talk with a model. {_HELP}")
    parser.add_argument("artifact", metavar="OUT", type=Path, help="artifact to run")
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    parser.add_argument(
        "--reasoning-effort", metavar="E", type=_effort, help="1 to 100, low, high, max or none, where known"
    )
    parser.add_argument(
        "--max-tokens", metavar="N", type=int, help="most tokens of an answer (what the context leaves)"
    )
    add_sampling_flags(parser)
    parser.add_argument(
        "--num-threads", metavar="N", type=int, default=UNSET, help="threads (physical cores)"
    )
    parser.add_argument("--config", metavar="FILE", type=Path, help="settings in YAML; flags win over it")
    parser.add_argument("-q", "--quiet", action="store_true", help="no prompt on stderr")
    add_version_flag(parser)


def run(options: argparse.Namespace) -> int:
    """Answer every line until there are no more. Raises DeepInferError."""
    serve = load_settings(options.config, serve_flags={"num_threads": options.num_threads}).serve
    with collector_paused():
        from deepinfer.runtime.llm import LLM

        sampling_params(options)  # a bad value is refused before anything is loaded
        llm = LLM(options.artifact, num_threads=serve.num_threads, max_num_seqs=serve.max_num_seqs)
    system = [{"role": "system", "content": options.system}] if options.system is not None else []
    messages = list(system)
    code = 0  # of input that nobody watches: 2 if a line could not be answered
    for line in _lines(options.quiet):
        if line == "/exit":
            break
        if line == "/clear":
            messages = list(system)
            continue
        messages.append({"role": "user", "content": line})
        try:
            messages.append(_answer(llm, messages, options))
        except RequestError as error:
            messages.pop()  # it can be said in another way
            print(error, file=sys.stderr)
            code = error.exit_code if not sys.stdin.isatty() else 0
    return code


def _answer(llm: "LLM", messages: list[dict[str, str]], options: argparse.Namespace) -> dict[str, str]:
    """Prints the answer to a conversation as it comes, and returns it as a message."""
    prompt = llm.encode_chat(messages, reasoning_effort=options.reasoning_effort)
    left = llm.limits.max_model_len - len(prompt)
    if left < 1:
        raise RequestError(
            f"the conversation has {len(prompt)} tokens, the model reads {llm.limits.max_model_len}",
            where="messages",
            action="begin anew with /clear",
        )
    max_tokens = left if options.max_tokens is None else min(options.max_tokens, left)
    output = print_stream(llm.stream([prompt], sampling_params(options, max_tokens=max_tokens)))
    if output.outputs[0].finish_reason == "error":
        raise NumericalError(
            "the logits are not numbers", action="compare the artifact with its model: deepinfer-diff"
        )
    return llm.answer_message(output.outputs[0].text or "")


def _lines(quiet: bool) -> Iterator[str]:
    """Lines of stdin that hold something."""
    shows = sys.stdin.isatty() and not quiet
    if shows:
        print(_HELP, file=sys.stderr)
    while True:
        if shows:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


def _effort(text: str) -> str | int:
    return int(text) if text.isdecimal() else text
