"""The flags of sampling that `generate` and `chat` share, and the parameters they make."""

import argparse
from typing import TYPE_CHECKING, Any, Final

from deepinfer.cli.common import StrictParser

if TYPE_CHECKING:
    from deepinfer.runtime.sampling_params import SamplingParams

_FLAGS: Final = (
    ("temperature", float, 0.0, "0 is greedy (0)"),
    ("seed", int, None, "makes sampling repeatable"),
    ("top-k", int, 0, "keep what reaches the N-th largest logit (0: all)"),
    ("top-p", float, 1.0, "keep the most probable tokens of mass X (1: all)"),
    ("min-p", float, 0.0, "keep what is X times as probable as the best (0: all)"),
    ("presence-penalty", float, 0.0, "taken once from logits of generated tokens (0)"),
    ("frequency-penalty", float, 0.0, "taken per occurrence from logits of generated tokens (0)"),
    ("repetition-penalty", float, 1.0, "divides logits of tokens in prompt and output (1)"),
)


def add_sampling_flags(parser: StrictParser) -> None:
    """The shared flags."""
    for name, kind, default, text in _FLAGS:
        metavar = "N" if kind is int else "X"
        parser.add_argument(f"--{name}", metavar=metavar, type=kind, default=default, help=text)
    parser.add_argument(
        "--stop", metavar="TEXT", action="append", help="end where this text appears; may be repeated"
    )


def sampling_params(options: argparse.Namespace, **others: Any) -> "SamplingParams":
    """The parameters that the shared flags ask for, and others. Raises RequestError."""
    from deepinfer.runtime.sampling_params import SamplingParams

    names = [name.replace("-", "_") for name, *_ in _FLAGS] + ["stop"]
    return SamplingParams(**{name: getattr(options, name) for name in names}, **others)
