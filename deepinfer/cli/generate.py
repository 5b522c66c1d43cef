"""`deepinfer generate`: prompts in, tokens and text out."""

import argparse
import contextlib
import gc
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer.cli.common import StrictParser, add_output_flags, integer_list, to_json
from deepinfer.cli.prompts import Prompt, check_prompt, read_prompts
from deepinfer.cli.sampling_flags import add_sampling_flags, sampling_params
from deepinfer.errors import NumericalError, UsageError
from deepinfer.settings import UNSET, load_settings

if TYPE_CHECKING:
    from deepinfer.runtime.outputs import CompletionOutput, Logprobs, RequestOutput


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
    parser.add_argument("--min-tokens", metavar="N", type=int, default=0, help="no end before N tokens (0)")
    parser.add_argument("--n", metavar="N", type=int, default=1, help="answers to each prompt (1)")
    add_sampling_flags(parser)
    parser.add_argument(
        "--prompt-logprobs",
        metavar="N",
        type=int,
        help="with --json: the same of each token of the prompt but the first",
    )
    parser.add_argument(
        "--logprobs",
        metavar="N",
        type=int,
        help="with --json: log-probabilities of each token and the N best",
    )
    parser.add_argument(
        "--stream",
        action="store_true",
        help="print text as it comes; a single prompt on a terminal always does",
    )
    parser.add_argument(
        "--num-threads", metavar="N", type=int, default=UNSET, help="threads (physical cores)"
    )
    parser.add_argument("--config", metavar="FILE", type=Path, help="settings in YAML; flags win over it")
    add_output_flags(parser, "print one JSON object per request")


def run(options: argparse.Namespace) -> int:
    """Load the artifact, generate for all prompts together, print in order. Raises DeepInferError."""
    serve = load_settings(options.config, serve_flags={"num_threads": options.num_threads}).serve
    prompts = _prompts(options)
    streams = _streams(options, len(prompts))
    with collector_paused():
        from deepinfer.runtime.llm import LLM

        params = sampling_params(
            options,
            n=options.n,
            max_tokens=options.max_tokens,
            min_tokens=options.min_tokens,
            logprobs=options.logprobs,
            prompt_logprobs=options.prompt_logprobs,
        )
        llm = LLM(options.artifact, num_threads=serve.num_threads, max_num_seqs=serve.max_num_seqs)
    if streams:
        outputs = [print_stream(llm.stream(prompts, params))]
    else:
        outputs = llm.generate(prompts, params, use_tqdm=not options.quiet)
        for index, output in enumerate(outputs):
            for answer in output.outputs:
                described = to_json(_as_dict(index, output, answer)) if options.json else None
                print(described or _as_text(index, answer, len(outputs), len(output.outputs)))
    if not options.quiet:
        added = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
        print(f"{added} tokens for {len(outputs)} request{'s' * (len(outputs) > 1)}", file=sys.stderr)
    failed = [
        index
        for index, output in enumerate(outputs)
        if any(answer.finish_reason == "error" for answer in output.outputs)
    ]
    if failed:
        raise NumericalError(
            f"the logits of {len(failed)} of {len(outputs)} requests are not numbers",
            where=f"request {failed[0]}",
            action="compare the artifact with its model: deepinfer-diff",
        )
    return 0


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Starting makes objects that live as long as the process: looking for garbage among them takes longer
    than opening the artifact, so it begins afterwards and leaves them out.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _streams(options: argparse.Namespace, num_prompts: int) -> bool:
    """Whether text is printed as it comes. Raises UsageError where that cannot be."""
    single = num_prompts == 1 and options.n == 1 and not options.json
    if options.stream and options.json:
        raise UsageError("prints text as it comes, --json a whole answer: use one of them", where="--stream")
    if options.stream and not single:
        raise UsageError("is for the text of a single answer", where="--stream")
    return options.stream or (sys.stdout.isatty() and single)


def print_stream(stream: "Iterable[RequestOutput]") -> "RequestOutput":
    """Prints one prompt's output as it comes, and a line's end; returns all of it."""
    from deepinfer.runtime.output_collector import merged

    outputs: list[RequestOutput] = []
    for output in stream:
        for piece in output.outputs:
            ids = [
                f"{',' if outputs or number else ''}{token}" for number, token in enumerate(piece.token_ids)
            ]
            print(piece.text if piece.text is not None else "".join(ids), end="", flush=True)
        outputs.append(output)
    print()
    return merged(outputs)


def _prompts(options: argparse.Namespace) -> list[Prompt]:
    if options.prompts_file:
        return read_prompts(options.prompts_file)
    if options.prompt is not None:
        return [check_prompt(options.prompt, "--prompt")]
    return [check_prompt(options.prompt_token_ids, "--prompt-token-ids")]


def _as_dict(index: int, output: "RequestOutput", completion: "CompletionOutput") -> dict[str, object]:
    described: dict[str, object] = {
        "index": index,
        **({"choice": completion.index} if len(output.outputs) > 1 else {}),
        "prompt_token_ids": list(output.prompt_token_ids),
        "token_ids": list(completion.token_ids),
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "timing_seconds": output.timing_seconds,
    }
    if completion.logprobs is not None:
        described["logprobs_mode"] = completion.logprobs_mode
        described["logprobs"] = [_entries(entry) for entry in completion.logprobs]
    if output.prompt_logprobs is not None:
        described["prompt_logprobs"] = [
            None if entry is None else _entries(entry) for entry in output.prompt_logprobs
        ]
    return described


def _entries(logprobs: "Logprobs") -> list[dict[str, object]]:
    return [{"token_id": token, "logprob": of.logprob, "rank": of.rank} for token, of in logprobs.items()]


def _as_text(index: int, completion: "CompletionOutput", prompts: int, choices: int) -> str:
    text = completion.text
    if text is None:
        text = ",".join(str(token) for token in completion.token_ids)
    names = [str(index)] * (prompts > 1) + [str(completion.index)] * (choices > 1)
    return f"[{'.'.join(names)}] {text}" if names else text
