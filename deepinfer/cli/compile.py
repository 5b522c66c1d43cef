"""`deepinfer-compile`: a checkpoint in, an artifact out."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from deepinfer.artifacts.inspect import kernel_lines
from deepinfer.cli.common import (
    EXIT_DIFFERENT,
    Environment,
    StrictParser,
    add_output_flags,
    existing_folder,
    integer_list,
    join_lists,
    progress_for,
    run_command,
    size_in_bytes,
    to_json,
)
from deepinfer.errors import UsageError
from deepinfer.settings import UNSET, CompileConfig, load_settings
from deepinfer.target import TARGETS

if TYPE_CHECKING:
    from deepinfer.compile import CompileResult

_VERDICTS = {True: "equal", False: "DIFFERENT", None: "none"}
_LISTS = ("--decode-rows", "--prefill-tokens")


def build_parser(*, with_output: bool = True) -> argparse.ArgumentParser:
    """The command's flags; every setting without a flag is in docs/settings.md. Plans have no output."""
    parser = StrictParser(
        prog="deepinfer-compile",
        description="Compile a DeepSeek-V4.1-Flash checkpoint into an artifact that runs without a compiler.",
    )
    parser.add_argument("model", metavar="MODEL", type=Path, help="folder with config.json and safetensors")
    parser.add_argument(
        "-o", "--output", metavar="OUT", type=Path, required=with_output, help="artifact to write"
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="write nothing: print what a build would make of MODEL, here also a config.json without weights",
    )
    parser.add_argument(
        "--kernels",
        action="store_true",
        help="compile no graphs, but every operation for the graphics card --target; MODEL as with --plan",
    )
    parser.add_argument("--target", choices=tuple(TARGETS), default=UNSET, help="what the code is for (cpu)")
    parser.add_argument(
        "--precision", choices=("native", "float32"), default=UNSET, help="numbers to compute with (native)"
    )
    parser.add_argument(
        "--decode-rows",
        metavar="N,...",
        type=integer_list,
        default=UNSET,
        help="decode batch sizes (1,2,4,8)",
    )
    parser.add_argument(
        "--prefill-tokens",
        metavar="N,...",
        type=integer_list,
        default=UNSET,
        help="prefill chunk sizes (16,64,256)",
    )
    parser.add_argument(
        "--max-model-len", metavar="N", type=int, default=UNSET, help="longest prompt plus answer, in tokens"
    )
    parser.add_argument(
        "--max-num-seqs", metavar="N", type=int, default=UNSET, help="requests that run at once (8)"
    )
    parser.add_argument(
        "--kv-cache-memory-bytes",
        metavar="SIZE",
        type=size_in_bytes,
        default=UNSET,
        help="memory for the caches, as 2GiB: as many blocks as it holds (all requests at full length)",
    )
    parser.add_argument(
        "--jobs", metavar="N", type=int, default=UNSET, help="worker processes (physical cores)"
    )
    parser.add_argument("--config", metavar="FILE", type=Path, help="settings in YAML; flags win over it")
    parser.add_argument("--dump", metavar="DIR", type=Path, help="write every graph's text after every pass")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    add_output_flags(parser, "print the result as one JSON object")
    return parser


def run(arguments: Sequence[str], environment: Environment) -> int:
    """Build or plan, and print the result; 1 when it differs from the eager model. Raises DeepInferError."""
    parser = build_parser(with_output="--plan" not in arguments)
    options = parser.parse_args(join_lists(arguments, _LISTS))
    if options.plan and (options.output is not None or options.force or options.dump is not None):
        parser.error("--plan writes nothing: leave out -o/--output, --dump and --force")
    if options.kernels and (options.plan or options.dump is not None):
        parser.error("--kernels makes no graphs: leave out --plan and --dump")
    settings = load_settings(
        options.config,
        compile_flags={
            "target": options.target,
            "precision": options.precision,
            "decode_rows": options.decode_rows,
            "prefill_tokens": options.prefill_tokens,
            "max_model_len": options.max_model_len,
            "max_num_seqs": options.max_num_seqs,
            "kv_cache_memory_bytes": options.kv_cache_memory_bytes,
            "jobs": options.jobs,
        },
    )
    if options.kernels:
        return _kernels(options, settings.compile)
    if options.plan:
        return _plan(options, settings.compile, environment)
    model = existing_folder(options.model, "MODEL")
    dump_dir = _dump_folder(environment.dump_dir if options.dump is None else options.dump)
    from deepinfer.compile import compile_model

    with progress_for(options) as progress:
        result = compile_model(
            model,
            options.output,
            settings.compile,
            force=options.force,
            progress=progress,
            cache_dir=environment.cache_dir,
            dump_dir=dump_dir,
        )
    print(to_json(_as_dict(result)) if options.json else _as_text(result))
    return EXIT_DIFFERENT if result.certified is False else 0


def _plan(options: argparse.Namespace, config: CompileConfig, environment: Environment) -> int:
    from deepinfer.plan import plan_model
    from deepinfer.plan_report import plan_text

    with progress_for(options) as progress:
        plan = plan_model(options.model, config, cache_dir=environment.cache_dir, progress=progress)
    print(to_json(plan.to_dict()) if options.json else plan_text(plan))
    return 0


def _kernels(options: argparse.Namespace, config: CompileConfig) -> int:
    from deepinfer.gpu_kernels import compile_kernels

    with progress_for(options) as progress:
        result = compile_kernels(
            options.model, options.output, config, force=options.force, progress=progress
        )
    table = msgspec.to_builtins(result.table)
    if options.json:
        facts = {
            "artifact_id": result.artifact_id,
            "out_dir": str(result.out_dir),
            "executed": False,
            **table,
        }
        print(to_json(facts))
    else:
        print("\n".join((*kernel_lines(table, executed=False), f"artifact    {result.artifact_id}")))
        print(f"wrote       {result.out_dir} in {result.seconds:.1f} s")
    return 0


def _dump_folder(path: Path | None) -> Path | None:
    """The folder for dumps, made if need be; raises UsageError now, not after a graph was traced."""
    if path is not None:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"cannot be a folder: {error.strerror}", where=f"dump {path}", action="name another"
            ) from error
    return path


def _as_dict(result: "CompileResult") -> dict[str, object]:
    return {
        "artifact_id": result.artifact_id,
        "out_dir": str(result.out_dir),
        "graphs": [msgspec.to_builtins(graph) for graph in result.graphs],
        "certified": result.certified,
        "explanation": result.explanation,
        "weights_bytes": result.weights_bytes,
        "seconds": result.seconds,
    }


def _as_text(result: "CompileResult") -> str:
    lines = [
        f"graph      {graph.name:<14} {graph.nodes:>7,} nodes {graph.rewrites:>6,} rewrites"
        f" {graph.seconds:8.1f} s"
        for graph in result.graphs
    ]
    lines += [
        f"weights    {result.weights_bytes / 1e6:,.1f} MB",
        f"proof      {_VERDICTS[result.certified]}: {result.explanation}",
        f"artifact   {result.artifact_id}",
        f"wrote      {result.out_dir} in {result.seconds:.1f} s",
        f"next       deepinfer generate {result.out_dir} --prompt-token-ids 1,2,3",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `deepinfer-compile`; returns the exit code."""
    return run_command(run, arguments)
