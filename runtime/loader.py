"""From an artifact's directory to something that runs: checked, trusted, mapped, bound, allocated.

Owns the order of loading, which is a promise: everything is verified, then compatibility, then trust, and
only then is the first native byte loaded. Compiles, traces and tunes nothing, and `LoadReport` counts what
would betray it. Knows nothing of requests.
"""

import contextlib
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from deepinfer.artifacts import (
    GraphEntry,
    Manifest,
    OpenedArtifact,
    TrustStore,
    check_compatible,
    open_artifact,
)
from deepinfer.errors import ArtifactFormatError, ResourceError
from deepinfer.kernels import native
from deepinfer.runtime.caches import CacheArenas
from deepinfer.runtime.card import card_architecture
from deepinfer.runtime.chat import CONFIG_PATH, TEMPLATE_PATH, ChatFormat, chat_format
from deepinfer.runtime.graph_loader import CompiledGraph, ExpectedTensor
from deepinfer.runtime.limits import Limits
from deepinfer.runtime.model_runner import DECODE, LOGITS, PREFILL, CpuModelRunner
from deepinfer.runtime.tokenizer import TOKENIZER_PATH, Tokenizer
from deepinfer.runtime.weights import WeightStore

OP_LIBRARY_PATH = f"native/{native.LIBRARY_NAME}"
_COMPILER_PACKAGES = (
    "torch._dynamo",
    "torch._inductor",
    "torch.export",
    "triton",
    "deepinfer.graphs",
    "deepinfer.passes",
)


class CompilerWatch:
    """Sees whether anything of a compiler is imported, or any process run, after its construction."""

    def __init__(self) -> None:
        self._modules, self._faults = _compiler_modules(), _child_page_faults()

    def counts(self) -> dict[str, int]:
        """Compiler modules imported and whether child processes have run since; all 0 is the promise."""
        return {
            "compiler_modules_imported": len(_compiler_modules() - self._modules),
            "child_processes_seen": int(_child_page_faults() > self._faults),
        }


@dataclass
class LoadReport:
    """What loading did: bytes and milliseconds of each part."""

    parts: list[tuple[str, int, float]] = field(default_factory=list)  # name, bytes, milliseconds
    counts: dict[str, int] = field(default_factory=dict)  # of CompilerWatch

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[list[int]]:
        """Times the block; what it appends to the list counts as its bytes."""
        sizes: list[int] = []
        start = time.perf_counter()
        yield sizes
        self.parts.append((name, sum(sizes), (time.perf_counter() - start) * 1000))

    @property
    def total_milliseconds(self) -> float:
        """Time of all parts."""
        return sum(milliseconds for _, _, milliseconds in self.parts)

    def summary(self) -> str:
        """One line per part, for people."""
        lines = [f"{name:<12} {size:>16,} bytes {time_ms:>9.1f} ms" for name, size, time_ms in self.parts]
        lines.append(f"{'total':<12} {'':>16}       {self.total_milliseconds:>9.1f} ms")
        lines += [f"{name}: {count}" for name, count in self.counts.items()]
        return "\n".join(lines)


@dataclass(frozen=True)
class LoadedArtifact:
    """A model that is ready to step."""

    artifact_id: str
    manifest: Manifest
    limits: Limits
    graphs: dict[str, CompiledGraph]  # by name, weights bound
    runner: CpuModelRunner  # for graphs of the CPU
    arenas: CacheArenas
    weights: WeightStore
    tokenizer: Tokenizer | None  # None: prompts must be token ids
    chat: ChatFormat | None  # None: the artifact knows no form of conversations
    report: LoadReport
    watch: CompilerWatch

    def cache_summary(self) -> str:
        """What the caches hold, for people."""
        limits, cache = self.limits, self.manifest.cache
        full_length = (limits.num_blocks - 1) // limits.blocks_for(limits.max_model_len)
        return (
            f"cache        {self.arenas.total_bytes:>16,} bytes: {limits.num_blocks - 1:,} blocks of "
            f"{limits.block_tokens} tokens ({cache.block_bytes:,} bytes), {limits.num_slots - 1:,} slots "
            f"({cache.slot_bytes:,} bytes); {limits.max_model_len:,} tokens per request, "
            f"{min(full_length, limits.num_slots - 1):,} requests of that length at once"
        )


def load_artifact(directory: Path | str, trust_store: TrustStore | None = None) -> LoadedArtifact:
    """Loads the artifact in `directory`.

    Raises ArtifactFormatError or ArtifactCorruptError if it is not whole, ArtifactMismatchError if it was
    built for another torch or machine, ArtifactUntrustedError if this user neither built nor trusted it; all
    of that before any native code of it runs. Raises ResourceError if memory or disk space is short.
    """
    watch, report = CompilerWatch(), LoadReport()
    with contextlib.ExitStack() as stack:
        with report.part("verify") as sizes:
            artifact = stack.enter_context(open_artifact(directory))
            sizes += [entry.bytes for entry in artifact.manifest.files]
        manifest = artifact.manifest
        check_machine(manifest, directory)
        (trust_store or TrustStore()).require(artifact.artifact_id, directory)
        limits = limits_of(artifact)
        with report.part("op library") as sizes:
            sizes.append(load_op_library(artifact))
        with report.part("weights") as sizes:
            weights = WeightStore.open(artifact)
            device = torch.device(manifest.target.device)
            weights = weights if device.type == "cpu" else weights.on(device)
            sizes.append(weights.total_bytes)
        with report.part("graphs") as sizes:
            names = [entry.name for entry in manifest.graphs]
            graphs = {name: open_graph(artifact, name, weights.tensors) for name in names}
            names = [f"graphs/{name}/model.so" for name in names]
            sizes += [entry.bytes for entry in manifest.files if entry.path in names]
        with report.part("caches") as sizes:
            arenas = CacheArenas.allocate(manifest.cache, device)
            sizes.append(arenas.total_bytes)
            runner = CpuModelRunner(
                limits, graphs, arenas.regions, arenas=arenas, identity=artifact.artifact_id
            )
            _check_inputs(artifact, graphs, runner)  # layouts are the same on every device
        with report.part("tokenizer") as sizes:
            tokenizer = None
            if TOKENIZER_PATH in artifact.paths:
                data = artifact.read_file(TOKENIZER_PATH)
                sizes.append(len(data))
                tokenizer = Tokenizer(data)
            texts = {
                path: artifact.read_file(path)
                for path in (CONFIG_PATH, TEMPLATE_PATH)
                if path in artifact.paths
            }
            chat = chat_format(texts, tokenizer, manifest.model.model_type, limits.max_model_len)
        report.counts = watch.counts()
        return LoadedArtifact(
            artifact.artifact_id,
            manifest,
            limits,
            graphs,
            runner,
            arenas,
            weights,
            tokenizer,
            chat,
            report,
            watch,
        )


def check_machine(manifest: Manifest, directory: Path | str) -> None:
    """Raises ArtifactMismatchError unless this machine and this torch can run the artifact's code.

    Code for a graphics card needs one of its very architecture.
    """
    card = card_architecture() if manifest.target.device == "cuda" else None
    check_compatible(
        manifest,
        torch_version=str(torch.__version__),  # its own type would compare as numbers, not to the last digit
        device="cpu" if card is None else "cuda",
        arch=card or platform.machine(),
        isa_supported={level for level in native.ISA_LEVELS if native.supports_isa(level)},
        directory=directory,
    )


def limits_of(artifact: OpenedArtifact) -> Limits:
    """The sizes that scheduler and runner need. Raises ArtifactFormatError where the graphs do not serve."""
    manifest = artifact.manifest
    entries = manifest.graphs
    buckets = {
        phase: tuple(sorted(entry.bucket for entry in entries if entry.phase == phase))
        for phase in (PREFILL, DECODE, LOGITS)
    }
    for phase, sizes in buckets.items():
        if not sizes:
            raise _unusable(f"it has no {phase} graph")
    for entry in entries:
        if entry.phase == DECODE and entry.request_rows != entry.bucket:
            raise _unusable(f"{entry.name} has a request table of {entry.request_rows} lines")
        _check_outputs(artifact, entry)
    tables = {entry.request_rows for entry in entries if entry.phase == PREFILL}
    cache, model = manifest.cache, manifest.model
    if len(tables) != 1 or min(tables) < 1:
        raise _unusable("its prefill graphs have no common size of the request table")
    if min(cache.num_blocks, cache.num_slots) < 2:
        raise _unusable("its pools hold no block or slot besides number 0")
    eos = model.eos_token_id
    return Limits(
        prefill_buckets=buckets[PREFILL],
        decode_buckets=buckets[DECODE],
        logits_buckets=buckets[LOGITS],
        prefill_table_size=tables.pop(),
        max_model_len=manifest.limits.max_model_len,
        block_tokens=cache.block_tokens,
        max_blocks_per_request=cache.max_blocks_per_request,
        num_blocks=cache.num_blocks,
        num_slots=min(cache.num_slots, manifest.limits.max_num_seqs + 1),
        vocab_size=model.vocab_size,
        eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else eos,
        image_token_id=model.image_token_id,
    )


def load_op_library(artifact: OpenedArtifact) -> int:
    """Registers the artifact's operations; returns the size of their library, 0 if it has none.

    The verified bytes are loaded from a private folder: the library's own path could be given other contents
    between the check and the loading. Raises ArtifactMismatchError if this process holds another library.
    """
    if OP_LIBRARY_PATH not in artifact.paths:
        return 0
    data = artifact.read_file(OP_LIBRARY_PATH)
    try:
        with tempfile.TemporaryDirectory(prefix="deepinfer-ops-") as folder:  # mode 0700
            path = Path(folder) / native.LIBRARY_NAME
            path.write_bytes(data)
            native.load_op_library(path)
    except OSError as error:
        raise ResourceError(
            f"no room to load the op library: {error.strerror}",
            where=tempfile.gettempdir(),
            action="free some space there or set TMPDIR",
        ) from error
    return len(data)


def open_graph(artifact: OpenedArtifact, name: str, weights: Mapping[str, Tensor]) -> CompiledGraph:
    """Loads one graph from verified bytes and binds its weights. The op library must be loaded."""
    extern_path = f"graphs/{name}/model.json"
    graph = CompiledGraph.open(
        artifact.read_file(f"graphs/{name}/model.so"),
        artifact.read_file(extern_path) if extern_path in artifact.paths else None,
        name=name,
        device=artifact.manifest.target.device,
    )
    graph.bind({constant.name: weights[constant.weight] for constant in artifact.signatures[name].constants})
    return graph


def _check_inputs(
    artifact: OpenedArtifact, graphs: Mapping[str, CompiledGraph], runner: CpuModelRunner
) -> None:
    """Compares what the runner will pass with what each step graph takes: a graph itself checks nothing."""
    for entry in artifact.manifest.graphs:
        if entry.name not in graphs or entry.phase not in (PREFILL, DECODE):
            continue
        expected = [
            ExpectedTensor(spec.name, spec.dtype, spec.shape, spec.strides)
            for spec in artifact.signatures[entry.name].inputs
        ]
        graphs[entry.name].check(runner.inputs(entry.phase, entry.bucket), expected)


def _check_outputs(artifact: OpenedArtifact, entry: GraphEntry) -> None:
    """Refuses a signature whose results the runner would misread."""
    signature, vocab = artifact.signatures[entry.name], artifact.manifest.model.vocab_size
    first = signature.outputs[0] if signature.outputs else None
    if first is None or len(first.shape) != 2 or first.shape[0] != entry.bucket:
        raise _unusable(f"the first output of {entry.name} does not have {entry.bucket} rows")
    if entry.phase == LOGITS:
        (hidden,) = signature.inputs if len(signature.inputs) == 1 else (None,)
        if hidden is None or (first.shape[1], first.dtype) != (vocab, "float32"):
            raise _unusable(f"{entry.name} does not map hidden rows to {vocab} float32 logits")
        for step in artifact.manifest.graphs:
            if step.phase in (PREFILL, DECODE):
                made = artifact.signatures[step.name].outputs[:1]
                if not made or (made[0].shape[1:], made[0].dtype) != (hidden.shape[1:], hidden.dtype):
                    raise _unusable(f"{entry.name} does not take the hidden rows of {step.name}")


def _unusable(what: str) -> ArtifactFormatError:
    return ArtifactFormatError(what, where="manifest.json", action="rebuild the artifact")


def _compiler_modules() -> set[str]:
    prefixes = tuple(f"{package}." for package in _COMPILER_PACKAGES)
    return {name for name in tuple(sys.modules) if name in _COMPILER_PACKAGES or name.startswith(prefixes)}


def _child_page_faults() -> int:
    """Grows with every child process that has ended: none starts without a page fault."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt
