"""`deepinfer`: use an artifact. `generate` and `chat` run it, `inspect` shows it, `trust` allows it."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from deepinfer.cli import bench, chat, evaluate, generate, inspect
from deepinfer.cli.common import (
    Environment,
    StrictParser,
    add_output_flags,
    add_version_flag,
    existing_folder,
    run_command,
    to_json,
)


def build_parser() -> argparse.ArgumentParser:
    """The subcommands and their flags."""
    parser = StrictParser(prog="deepinfer", description="Run and examine compiled artifacts.")
    add_version_flag(parser)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    generate.add_parser(commands)
    chat.add_parser(commands)
    inspect.add_parser(commands)
    bench.add_parser(commands)
    evaluate.add_parser(commands)
    summary = "allow an artifact's native code to run as this user"
    trust = commands.add_parser("trust", help=summary, description=summary)
    trust.add_argument("artifact", metavar="OUT", type=Path, help="artifact")
    add_output_flags(trust, "print one JSON object")
    return parser


def run(arguments: Sequence[str], environment: Environment) -> int:
    """Dispatch to the subcommand. Raises DeepInferError."""
    options = build_parser().parse_args(arguments)
    existing_folder(options.artifact, "OUT")
    commands = {
        "generate": generate.run,
        "chat": chat.run,
        "inspect": inspect.run,
        "bench": bench.run,
        "eval": evaluate.run,
        "trust": _trust,
    }
    return commands[options.command](options)


def _trust(options: argparse.Namespace) -> int:
    from deepinfer.artifacts.reader import open_artifact
    from deepinfer.artifacts.trust import TrustStore

    with open_artifact(options.artifact) as artifact:  # never trust what is damaged
        artifact_id = artifact.artifact_id
    store = TrustStore()
    store.trust(artifact_id)
    origin = store.origin(artifact_id)
    print(
        to_json({"artifact_id": artifact_id, "origin": origin})
        if options.json
        else f"{origin}    {artifact_id}"
    )
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `deepinfer`; returns the exit code."""
    return run_command(run, arguments)
