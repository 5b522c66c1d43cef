"""`deepinfer`: use an artifact. `generate` runs it, `inspect` shows it, `trust` allows it to run."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from deepinfer.cli import generate
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
    for name, summary in (
        ("inspect", "show what an artifact holds, executing nothing"),
        ("trust", "allow an artifact's native code to run as this user"),
    ):
        command = commands.add_parser(name, help=summary, description=summary)
        command.add_argument("artifact", metavar="OUT", type=Path, help="artifact")
        add_output_flags(command, "print one JSON object")
    return parser


def run(arguments: Sequence[str], environment: Environment) -> int:
    """Dispatch to the subcommand. Raises DeepInferError."""
    options = build_parser().parse_args(arguments)
    existing_folder(options.artifact, "OUT")
    commands = {"generate": generate.run, "inspect": _inspect, "trust": _trust}
    return commands[options.command](options)


def _inspect(options: argparse.Namespace) -> int:
    from deepinfer.artifacts.inspect import describe

    description = describe(options.artifact)
    print(to_json(description) if options.json else "\n".join(_outline(description)))
    return 0


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


def _outline(value: object, indent: int = 0) -> list[str]:
    """Nested plain data as indented `key  value` lines."""
    pad = "  " * indent
    if isinstance(value, dict):
        lines = []
        for key, item in value.items():
            if isinstance(item, dict | list) and item:
                lines += [f"{pad}{key}", *_outline(item, indent + 1)]
            else:
                lines.append(f"{pad}{key:<{max(1, 24 - len(pad))}} {_cell(item)}")
        return lines
    if isinstance(value, list):
        if all(not isinstance(item, dict | list) for item in value):
            return [pad + ", ".join(_cell(item) for item in value)]
        return [line for item in value for line in _outline(item, indent)]
    return [pad + _cell(value)]


def _cell(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "-" if value is None or value in ([], {}) else str(value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `deepinfer`; returns the exit code."""
    return run_command(run, arguments)
