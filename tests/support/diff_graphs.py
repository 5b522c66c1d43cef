"""Graphs of the golden model as captured and rewritten, run by Python instead of compiled code.

For comparisons of many variants of a graph, each of which would take a minute to compile.
"""

import functools
import hashlib
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from deepinfer.artifacts import CacheLayout as ArtifactLayout
from deepinfer.artifacts import (
    GraphEntry,
    Limits,
    Manifest,
    ModelInfo,
    Target,
    Toolchain,
    WeightsInfo,
    canonical_bytes,
)
from deepinfer.diff import eager_model
from deepinfer.graphs.cache_layout import CacheLayout, cache_layout
from deepinfer.graphs.capture import GraphSpec, capture, weight_name
from deepinfer.graphs.checkpoint import Checkpoint
from deepinfer.graphs.config import ModelConfig, load_config
from deepinfer.graphs.context import Tap, unchanged
from deepinfer.graphs.eager import EagerModel, allocate_caches
from deepinfer.graphs.records import PRECISIONS
from deepinfer.graphs.rows import StepInputs
from deepinfer.graphs.store import build_store, store_specs
from deepinfer.kernels.native import host_isa, load_host_library
from deepinfer.passes import PASSES_EXACT, PassManager
from deepinfer.tolerances import TOLERANCES

MAX_MODEL_LEN, MAX_NUM_SEQS = 256, 3


class PythonGraph:
    """Runs a captured program as FX writes it out in Python, with the native operations."""

    def __init__(
        self, program: ExportedProgram, module: fx.GraphModule, weights: Mapping[str, Tensor]
    ) -> None:
        names = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs}
        targets = [names[node.name] for node in module.graph.find_nodes(op="placeholder")]
        self._weights = [weights[weight_name(target)] for target in targets if target is not None]
        assert all(target is None for target in targets[len(self._weights) :]), "weights come first"
        self._module = module

    def run(self, inputs: list[Tensor]) -> Sequence[Tensor]:
        """Outputs for the given inputs; cache regions among them are written in place."""
        with torch.no_grad():
            return self._module(*self._weights, *inputs)


# what two layers share must stay apart, so that one of them can be changed
CANONICAL = PASSES_EXACT[:2]


class GoldenGraphs:
    """Manifest, programs and eager model of decode-4, prefill-16 and logits-4 of one checkpoint."""

    def __init__(self, model_dir: Path, precision: str) -> None:
        load_host_library()
        config = load_config(model_dir)
        layout = cache_layout(config, precision, max_num_seqs=MAX_NUM_SEQS, max_model_len=MAX_MODEL_LEN)
        taps = precision == "native"
        specs = [
            GraphSpec("decode", 4, 4, taps),
            GraphSpec("logits", 4, 0),
            GraphSpec("prefill", 16, 3, taps),
        ]
        checkpoint = Checkpoint(model_dir, config)
        self.manifest = manifest_of(config, checkpoint, precision, layout, specs)
        self.store = build_store(checkpoint, config, MAX_MODEL_LEN)
        self.eager = RecordedEager.of(eager_model(self.manifest, model_dir))
        self.programs = {}
        for spec in specs:
            weights = store_specs(config, MAX_MODEL_LEN)
            program = capture(spec, config, PRECISIONS[precision], layout, weights, fused=False)
            PassManager(CANONICAL).run(program)
            self.programs[spec.name] = program
        self._layout = layout

    def regions(self) -> dict[str, Tensor]:
        """New caches for one comparison."""
        return allocate_caches(self._layout)

    def graphs(self, change: Callable[[fx.GraphModule], None] | None = None) -> dict[str, PythonGraph]:
        """Every graph, those of prefill and decode changed as given; the programs stay as they are."""
        graphs = {}
        for name, program in self.programs.items():
            module = copied(program)
            if change is not None and not name.startswith("logits"):
                change(module)
            graphs[name] = PythonGraph(program, module, self.store)
        return graphs


def manifest_of(
    config: ModelConfig, checkpoint: Checkpoint, precision: str, layout: CacheLayout, specs: list[GraphSpec]
) -> Manifest:
    """What a build of these graphs would say of itself, as far as a comparison reads it."""
    unread = "0" * 64
    return Manifest(
        model=ModelInfo(
            model_type="deepseek_v41",
            architecture="DeepseekV41ForCausalLM",
            vocab_size=config.vocab_size,
            num_hidden_layers=config.num_hidden_layers,
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
            pad_token_id=config.pad_token_id,
            image_token_id=config.image_token_id,
            config_sha256=hashlib.sha256(canonical_bytes(config.to_canonical_dict())).hexdigest(),
        ),
        weights=WeightsInfo(sha256=checkpoint.digest(), tensor_count=len(checkpoint.names), total_bytes=0),
        tokenizer_sha256=None,
        toolchain=Toolchain(
            deepinfer="0", torch=str(torch.__version__), python="3", compiler="none", op_library_sha256=unread
        ),
        target=Target(device="cpu", arch=platform.machine(), isa=host_isa()),
        precision=precision,  # type: ignore[arg-type]
        passes=(),
        options={},
        cache=msgspec.convert(layout.to_dict(), ArtifactLayout),
        limits=Limits(max_model_len=MAX_MODEL_LEN, max_num_seqs=MAX_NUM_SEQS),
        tolerances=TOLERANCES[precision],
        graphs=tuple(
            GraphEntry(
                name=spec.name,
                phase=spec.phase,  # type: ignore[arg-type]
                bucket=spec.bucket,
                request_rows=spec.request_rows,
                taps=spec.taps,
            )
            for spec in specs
        ),
    )


def copied(program: ExportedProgram) -> fx.GraphModule:
    """A graph of its own that may be changed."""
    graph = fx.Graph()
    output = graph.graph_copy(program.graph_module.graph, {})
    graph.output(output)
    return fx.GraphModule(torch.nn.Module(), graph)


class RecordedEager(EagerModel):
    """The eager model, computing each sequence of free-running steps once.

    The same prompts lead to the same steps whatever the graphs do, so every comparison after the first
    replays results, taps and window records.
    """

    @classmethod
    def of(cls, model: EagerModel) -> "RecordedEager":
        made = cls(model.config, model.precision, model.weights, model.layout)
        made._records: dict[tuple, Any] = {}
        made.rewind()
        return made

    def rewind(self) -> None:
        """Start another comparison."""
        self._history: tuple = ()
        for region in self.caches.values():
            region.zero_()

    def step(self, phase: Any, inputs: StepInputs, tap: Tap = unchanged) -> Tensor:
        """As `EagerModel.step`."""
        self._history = (hash((self._history, phase, *(tuple(x.flatten().tolist()) for x in inputs))),)
        if self._history not in self._records:
            seen: list[tuple[int, str, Tensor]] = []

            def keep(layer: int, name: str, value: Tensor) -> Tensor:
                if name in ("index_score", "router_logits"):
                    seen.append((layer, name, value))
                return value

            hidden = super().step(phase, inputs, keep)
            self._records[self._history] = hidden, seen, {n: r.clone() for n, r in self.caches.items()}
        hidden, seen, caches = self._records[self._history]
        for layer, name, value in seen:
            tap(layer, name, value)
        for name, region in self.caches.items():
            region.copy_(caches[name])
        return hidden


@functools.cache
def golden_graphs(model_dir: Path, precision: str) -> GoldenGraphs:
    """The graphs of the golden model, captured once per process; in native precision with taps."""
    return GoldenGraphs(model_dir, precision)
