"""`deepinfer-diff`: is what was compiled equal to the eager model it came from?"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from deepinfer.cli.common import (
    EXIT_DIFFERENT,
    Environment,
    StrictParser,
    add_output_flags,
    existing_folder,
    progress_for,
    run_command,
    to_json,
    writable_report,
    write_report,
)
from deepinfer.cli.prompts import Prompt, read_prompts
from deepinfer.diff_report import to_html, to_junit
from deepinfer.errors import RequestError


def build_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = StrictParser(
        prog="deepinfer-diff",
        description="Compare every graph of an artifact with the eager model. Exit 0: equal, 1: different.",
    )
    parser.add_argument("artifact", metavar="OUT", type=Path, help="artifact to check")
    parser.add_argument("--model", metavar="MODEL", type=Path, required=True, help="checkpoint it came from")
    parser.add_argument("--prompts-file", metavar="F", type=Path, help="JSON lines to compare on")
    parser.add_argument("--report", metavar="F.html", type=Path, help="write a report for people")
    parser.add_argument("--junit", metavar="F.xml", type=Path, help="write a report for CI systems")
    add_output_flags(parser, "print the whole comparison as one JSON object")
    return parser


def run(arguments: Sequence[str], environment: Environment) -> int:
    """Compare, print, write the reports; 1 when a tolerance is exceeded. Raises DeepInferError."""
    options = build_parser().parse_args(arguments)
    artifact = existing_folder(options.artifact, "OUT")
    model = existing_folder(options.model, "MODEL")
    html, junit = (writable_report(path, options.artifact) for path in (options.report, options.junit))
    prompts = _token_ids(artifact, read_prompts(options.prompts_file)) if options.prompts_file else None
    from deepinfer.diff import diff_artifact

    with progress_for(options) as progress:
        report = diff_artifact(artifact, model, prompts, progress=progress)
    content = report.to_dict()
    print(to_json(content) if options.json else report.to_text())
    if html:
        write_report(html, to_html(content))
    if junit:
        write_report(junit, to_junit(content))
    return 0 if report.passed else EXIT_DIFFERENT


def _token_ids(artifact: Path, prompts: list[Prompt]) -> list[list[int]]:
    """All prompts as ids, text by the artifact's own tokenizer. Raises RequestError without one."""
    from deepinfer.artifacts.reader import open_artifact
    from deepinfer.runtime.tokenizer import TOKENIZER_PATH, Tokenizer

    if not any(isinstance(prompt, str) for prompt in prompts):
        return [list(prompt) for prompt in prompts if not isinstance(prompt, str)]
    with open_artifact(artifact, verify=False) as opened:
        if TOKENIZER_PATH not in opened.paths:
            raise RequestError(
                "the artifact has no tokenizer, so text cannot be used",
                where="--prompts-file",
                action="give prompt_token_ids",
            )
        tokenizer = Tokenizer(opened.read_file(TOKENIZER_PATH))
        limit = opened.manifest.limits.max_model_len
    return [tokenizer.encode(prompt, limit) if isinstance(prompt, str) else prompt for prompt in prompts]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `deepinfer-diff`; returns the exit code."""
    return run_command(run, arguments)
