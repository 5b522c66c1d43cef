"""`deepinfer generate`: prompts in, tokens and text out."""

import argparse
import contextlib
import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from deepinfer.cli.common import StrictParser, add_output_flags, integer_list, to_json
from deepinfer.cli.prompts import Prompt, check_prompt, read_prompts
from deepinfer.errors import NumericalError
from deepinfer.settings import UNSET, load_settings

if TYPE_CHECKING:
    from deepinfer.runtime.outputs import RequestOutput


_SAMPLING_FLAGS: Final = (
    ("top-k", int, 0, "keep what reaches the N-th largest logit (0: all)"),
    ("top-p", float, 1.0, "keep the most probable tokens of mass X (1: all)"),
    ("min-p", float, 0.0, "keep what is X times as probable as the best (0: all)"),
    ("min-tokens", int, 0, "no end token before N tokens (0)"),
    ("logprobs", int, None, "with --json: log-probabilities of each token and the N best"),
    ("presence-penalty", float, 0.0, "taken once from logits of generated tokens (0)"),
    ("frequency-penalty", float, 0.0, "taken per occurrence from logits of generated tokens (0)"),
    ("repetition-penalty", float, 1.0, "divides logits of tokens in prompt and output (1)"),
)


def add_parser(commands: "argparse._SubParsersAction[StrictParser]") -> None:
    """The flags of `deepinfer generate`."""
    parser = commands.add_parser(
        "generate",
        help="generate tokens from prompts",
        description="Generate tokens; greedy unless --temperature is above 0.",
    )
    parser.add_argument("artifact", metavar="OUT", type=Path, help="artifact to run")
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", metavar="TEXT", help="one prompt as text")
    prompts.add_argument("--prompt-token-ids", metavar="N,...", type=integer_list, help="one prompt as ids")
    prompts.add_argument("--prompts-file", metavar="F", type=Path, help="JSON lines, one prompt each")
    parser.add_argument("--max-tokens", metavar="N", type=int, default=16, help="most tokens to add (16)")
    parser.add_argument("--temperature", metavar="T", type=float, default=0.0, help="0 is greedy (0)")
    parser.add_argument("--seed", metavar="S", type=int, help="makes sampling repeatable")
    _add_sampling_flags(parser)
    parser.add_argument(
        "--num-threads", metavar="N", type=int, default=UNSET, help="threads (physical cores)"
    )
    parser.add_argument("--config", metavar="FILE", type=Path, help="settings in YAML; flags win over it")
    add_output_flags(parser, "print one JSON object per request")


def _add_sampling_flags(parser: StrictParser) -> None:
    """Parameters of sampling that most calls leave alone."""
    for name, kind, default, text in _SAMPLING_FLAGS:
        metavar = "N" if kind is int else "X"
        parser.add_argument(f"--{name}", metavar=metavar, type=kind, default=default, help=text)


def run(options: argparse.Namespace) -> int:
    """Load the artifact, generate for all prompts together, print in order. Raises DeepInferError."""
    serve = load_settings(options.config, serve_flags={"num_threads": options.num_threads}).serve
    prompts = _prompts(options)
    with _collector_paused():
        from deepinfer.runtime.llm import LLM
        from deepinfer.runtime.sampling_params import SamplingParams

        names = [name.replace("-", "_") for name, *_ in _SAMPLING_FLAGS]
        params = SamplingParams(
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            seed=options.seed,
            **{name: getattr(options, name) for name in names},
        )
        llm = LLM(options.artifact, num_threads=serve.num_threads, max_num_seqs=serve.max_num_seqs)
    outputs = llm.generate(prompts, params, use_tqdm=not options.quiet)
    for index, output in enumerate(outputs):
        print(to_json(_as_dict(index, output)) if options.json else _as_text(index, output, len(outputs)))
    if not options.quiet:
        added = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(f"{added} tokens for {len(outputs)} request{'s' * (len(outputs) > 1)}", file=sys.stderr)
    failed = [index for index, output in enumerate(outputs) if output.outputs[0].finish_reason == "error"]
    if failed:
        raise NumericalError(
            f"the logits of {len(failed)} of {len(outputs)} requests are not numbers",
            where=f"request {failed[0]}",
            action="compare the artifact with its model: deepinfer-diff",
        )
    return 0


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Starting makes objects that live as long as the process: looking for garbage among them takes longer
    than opening the artifact, so it begins afterwards and leaves them out.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _prompts(options: argparse.Namespace) -> list[Prompt]:
    if options.prompts_file:
        return read_prompts(options.prompts_file)
    if options.prompt is not None:
        return [check_prompt(options.prompt, "--prompt")]
    return [check_prompt(options.prompt_token_ids, "--prompt-token-ids")]


def _as_dict(index: int, output: "RequestOutput") -> dict[str, object]:
    completion = output.outputs[0]
    described: dict[str, object] = {
        "index": index,
        "prompt_token_ids": list(output.prompt_token_ids),
        "token_ids": list(completion.token_ids),
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "timing_seconds": output.timing_seconds,
    }
    if completion.logprobs is not None:
        described["logprobs_mode"] = completion.logprobs_mode
        described["logprobs"] = [
            [{"token_id": token, "logprob": of.logprob, "rank": of.rank} for token, of in entry.items()]
            for entry in completion.logprobs
        ]
    return described


def _as_text(index: int, output: "RequestOutput", total: int) -> str:
    completion = output.outputs[0]
    text = completion.text
    if text is None:
        text = ",".join(str(token) for token in completion.token_ids)
    return text if total == 1 else f"[{index}] {text}"
