"""`deepinfer eval`: how well an artifact predicts a text."""

import argparse
import dataclasses
from pathlib import Path

from deepinfer.cli.common import StrictParser, add_output_flags, to_json
from deepinfer.errors import UsageError
from deepinfer.settings import UNSET, load_settings

_MAX_BYTES = 64 << 20


def add_parser(commands: "argparse._SubParsersAction[StrictParser]") -> None:
    """The flags of `deepinfer eval`."""
    parser = commands.add_parser(
        "eval",
        help="perplexity and bits per byte of a text",
        description="Measure how well an artifact predicts a text: perplexity and bits per byte.",
    )
    parser.add_argument("artifact", metavar="OUT", type=Path, help="artifact to run")
    parser.add_argument("--text", metavar="FILE", type=Path, required=True, help="text in UTF-8")
    parser.add_argument(
        "--num-threads", metavar="N", type=int, default=UNSET, help="threads (physical cores)"
    )
    parser.add_argument("--config", metavar="FILE", type=Path, help="settings in YAML; flags win over it")
    add_output_flags(parser, "print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Evaluate and print. Raises DeepInferError."""
    serve = load_settings(options.config, serve_flags={"num_threads": options.num_threads}).serve
    text = _read(options.text)
    from deepinfer.evaluation import evaluate_text
    from deepinfer.runtime.llm import LLM

    llm = LLM(options.artifact, num_threads=serve.num_threads)
    found = evaluate_text(llm, text)
    if options.json:
        print(to_json({"artifact_id": llm.artifact_id, **dataclasses.asdict(found)}))
    else:
        print(
            f"perplexity {found.perplexity:.4f}, {found.bits_per_byte:.4f} bits per byte, "
            f"{found.bits_per_token:.4f} bits per token ({found.tokens:,} tokens, {found.bytes:,} bytes)"
        )
    return 0


def _read(path: Path) -> str:
    """Raises UsageError for what is no text, or too much of it."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UsageError(
                f"has more than {_MAX_BYTES:,} bytes", where=str(path), action="evaluate parts of it"
            )
        return path.read_text("utf-8")
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", where=str(path)) from error
    except UnicodeDecodeError:
        raise UsageError("is not UTF-8", where=str(path)) from None
