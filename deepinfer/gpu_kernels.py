"""The operations of a model as machine code for a graphics card that need not be there.

Every form in which the model's steps call an operation is compiled at the model's own shapes and written with
the texts it went through and with what it takes of a card. No weights are read, nothing runs: what such an
artifact shows is that the code exists and how large it is, not that it is right, which `make gpu` tests.
"""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepinfer import __version__
from deepinfer.artifacts import (
    KERNEL_TABLE,
    ArtifactWriter,
    KernelEntry,
    KernelTable,
    Limits,
    Manifest,
    ModelInfo,
    Target,
    Toolchain,
    TrustStore,
    WeightsInfo,
    canonical_bytes,
)
from deepinfer.cache_sizes import resolve_sizes
from deepinfer.compile import cache_section, graph_specs
from deepinfer.errors import SettingsError, UsageError
from deepinfer.graphs.capture import recorded_step
from deepinfer.graphs.config import ModelConfig
from deepinfer.graphs.records import PRECISIONS
from deepinfer.graphs.store import store_specs
from deepinfer.kernels import moe_gate, sample, verify_drafts
from deepinfer.kernels.cuda.choice import language_of
from deepinfer.kernels.cuda.moe_gate import SOURCE as GATE_SOURCE
from deepinfer.kernels.cuda.nvrtc import compile_source, compiler_version
from deepinfer.kernels.sample import make_arguments
from deepinfer.kernels.sampling import Arguments
from deepinfer.kernels.signature import CallSignature
from deepinfer.plan import read_model_config
from deepinfer.progress import Progress
from deepinfer.settings import CompileConfig
from deepinfer.target import parse_target

REPORT_KIND = "kernels"
_GATE_THREADS = {"moe_gate_logits": 128, "moe_gate_route": 32}


@dataclass(frozen=True)
class KernelsResult:
    """What was made."""

    artifact_id: str
    out_dir: Path
    table: KernelTable
    seconds: float


@dataclass(frozen=True)
class _Files:
    """One kernel's entry and its files below `native/`, by suffix; several entries may share files."""

    entry: KernelEntry
    files: dict[str, bytes]


def compile_kernels(
    model: str | Path,
    out_dir: str | Path,
    options: CompileConfig,
    *,
    force: bool = False,
    progress: Progress | None = None,
    trust_store: TrustStore | None = None,
) -> KernelsResult:
    """Compile the operations of `model`, a folder with config.json or that file itself, into `out_dir`.

    `options.target` names the card; rows, precision and lengths are those of a build. Equal configs, options
    and compilers give equal bytes.

    Raises SettingsError for a target that is no card, UsageError without the compilers, ModelError for a
    config that cannot be built, BuildError for a kernel that cannot be compiled, ArtifactWriteError.
    """
    started = time.perf_counter()
    progress = progress or Progress()
    architecture = parse_target(options.target).arch
    if architecture is None:
        raise SettingsError(
            "the CPU has no kernels of this kind", where="compile.target", action="name a graphics card"
        )
    _, config = read_model_config(Path(model))
    compilers = _compilers()
    options, layout = resolve_sizes(options, config)
    assert options.max_model_len is not None
    with ArtifactWriter(Path(out_dir), force=force) as writer:
        kernels = _compile(model_calls(config, options), architecture, progress)
        table = KernelTable(compilers=compilers, kernels=tuple(each.entry for each in kernels))
        written = set()
        for each in kernels:
            for suffix, data in each.files.items():
                path = f"native/{each.entry.files}.{suffix}"
                if path not in written:
                    written.add(path)
                    writer.add_file(path, data)
        data = canonical_bytes(table)
        writer.add_file(KERNEL_TABLE, data)
        manifest = Manifest(
            model=_model_info(config),
            weights=WeightsInfo(sha256=hashlib.sha256(b"").hexdigest(), tensor_count=0, total_bytes=0),
            tokenizer_sha256=None,
            toolchain=Toolchain(
                deepinfer=__version__,
                torch=str(torch.__version__),
                python=".".join(platform.python_version_tuple()[:2]),
                compiler=", ".join(f"{name} {version}" for name, version in compilers.items()),
                op_library_sha256=hashlib.sha256(data).hexdigest(),
            ),
            target=Target(device="cuda", arch=architecture, isa="none"),
            precision=options.precision,
            passes=(),
            options=options.effective(),
            cache=cache_section(layout),
            limits=Limits(max_model_len=options.max_model_len, max_num_seqs=options.max_num_seqs),
            tolerances={},
            graphs=(),
        )
        artifact_id = writer.finish(manifest, {REPORT_KIND: {"executed": False, "why": "compiled alone"}})
    (trust_store or TrustStore()).record_built(artifact_id)
    return KernelsResult(artifact_id, Path(out_dir), table, time.perf_counter() - started)


def model_calls(config: ModelConfig, options: CompileConfig) -> list[CallSignature]:
    """Every form of an operation in the largest step of each phase, and in sampling; each once."""
    calls = phase_calls(config, options, ("prefill", "decode", "logits"))
    return list(dict.fromkeys([*calls, *sampling_calls(config.vocab_size, max(options.decode_rows))]))


def phase_calls(config: ModelConfig, options: CompileConfig, phases: tuple[str, ...]) -> list[CallSignature]:
    """Every call of an operation in the largest step of each of the `phases`, in order."""
    options, layout = resolve_sizes(options, config)
    assert options.max_model_len is not None
    weights = store_specs(config, options.max_model_len)
    largest = {spec.phase: spec for spec in reversed(graph_specs(config, options))}
    calls: list[CallSignature] = []
    for phase in phases:
        calls += recorded_step(largest[phase], config, PRECISIONS[options.precision], layout, weights)
    return calls


def sampling_calls(vocab: int, rows: int) -> Iterator[CallSignature]:
    """Sampling and verification with nothing but a temperature, and with everything that they take."""
    plain = make_arguments(rows, 8, 0)._replace(
        logits=torch.empty(rows, vocab, device="meta"),
        masks=torch.empty(3, -(-vocab // 32), dtype=torch.int32, device="meta"),
    )
    offsets = torch.arange(rows + 1)
    full = plain._replace(
        penalties=torch.zeros(rows, 3),
        history_offsets=offsets,
        history_ids=torch.zeros(rows, dtype=torch.int64),
        history_counts=torch.zeros(rows, dtype=torch.int64),
        bias_offsets=offsets,
        bias_ids=torch.zeros(rows, dtype=torch.int64),
        bias=torch.zeros(rows),
        num_logprobs=20,
        raw_logprobs=True,
    )
    empty = torch.zeros(0, dtype=torch.int64)
    bare = plain._replace(
        top_k=empty, top_p=torch.zeros(0, dtype=torch.float64), min_p=torch.zeros(0, dtype=torch.float64),
        masks=torch.zeros(0, 0, dtype=torch.int32), mask_index=empty, num_logprobs=-1,
    )  # fmt: skip
    for arguments in (bare, plain, full):
        yield CallSignature.of(sample, tuple(arguments))
    proposals = torch.empty(rows, vocab, device="meta")
    drafts = (offsets, offsets[:-1], proposals, offsets[:-1])
    yield CallSignature.of(verify_drafts, _verify_arguments(plain, drafts))


def _verify_arguments(a: Arguments, drafts: tuple[torch.Tensor, ...]) -> tuple[object, ...]:
    return (a.logits, *drafts, *a[1:])


def _compilers() -> dict[str, str]:
    """Names and versions of what makes the code. Raises UsageError where one is missing."""
    if importlib.util.find_spec("triton") is None:
        raise UsageError(
            "Triton is not installed", where="compile.target", action="pip install 'deepinfer[gpu]'"
        )
    return {
        "triton": importlib.metadata.version("triton"),
        "nvrtc": compiler_version().removeprefix("NVRTC "),
    }


def _compile(calls: list[CallSignature], architecture: str, progress: Progress) -> list[_Files]:
    """Every kernel once, in the order of the calls."""
    # by name: without Triton this module is still there to say so
    triton = importlib.import_module("deepinfer.kernels.triton.cuda_target")
    launches: dict[tuple[object, ...], tuple[CallSignature, Any, bool]] = {}
    for call in calls:
        chosen = language_of(call, architecture) == "triton"
        for launch in _launches(triton, call):
            launches.setdefault((launch.name, tuple(triton.form_of(launch).items())), (call, launch, chosen))
    progress.start("kernels", len(launches))
    found: list[_Files] = []
    for call, launch, chosen in launches.values():
        name = launch.name
        code = triton.compile_launch(launch, architecture)
        number = sum(each.entry.kernel == name for each in found)
        entry = KernelEntry(
            op=call.op.name,
            kernel=name,
            language="triton",
            chosen=chosen,
            files=f"{name}-{number}",
            threads=code.resources.threads,
            registers=code.resources.registers,
            shared_bytes=code.resources.shared_bytes,
            spill_bytes=code.resources.spill_bytes,
            form=triton.form_of(launch),
        )
        texts = {"ttir": code.ttir, "ttgir": code.ttgir, "ptx": code.ptx}
        files = {"cubin": code.cubin} | {suffix: text.encode() for suffix, text in texts.items()}
        found.append(_Files(entry, files))
        progress.advance(name)
    progress.finish()
    if any(language_of(call, architecture) == "cuda" for call in calls):
        found += _gate(architecture)
    return found


def _launches(triton: Any, call: CallSignature) -> Any:
    """What `call` starts; UsageError says what of the config it needs if no kernel takes that form."""
    try:
        return triton.op_launches(call)
    except UsageError as error:
        raise UsageError(
            f"the config calls {call.op.name} in a form without a Triton kernel: {error.what}",
            where=error.where,
            action="change that in the config (quantization_config for weights), or build for the CPU",
        ) from error


def _gate(architecture: str) -> list[_Files]:
    """The router's kernels in CUDA C++, which take its widths as arguments."""
    code = compile_source(GATE_SOURCE, architecture)
    files = {"cubin": code.cubin, "ptx": code.ptx.encode()}
    return [
        _Files(
            KernelEntry(
                op=moe_gate.name,
                kernel=name,
                language="cuda",
                chosen=True,
                files=GATE_SOURCE.stem,
                threads=_GATE_THREADS[name],
                registers=registers,
                shared_bytes=shared,
                spill_bytes=spilled,
                form={},
            ),
            files,
        )
        for name, (registers, shared, spilled) in sorted(code.resources.items())
    ]


def _model_info(config: ModelConfig) -> ModelInfo:
    return ModelInfo(
        model_type=config.model_type,
        architecture=config.generation.architecture,
        vocab_size=config.vocab_size,
        num_hidden_layers=config.num_hidden_layers,
        bos_token_id=config.bos_token_id,
        eos_token_id=None,
        pad_token_id=config.pad_token_id,
        image_token_id=config.image_token_id,
        config_sha256=hashlib.sha256(canonical_bytes(config.to_canonical_dict())).hexdigest(),
    )
