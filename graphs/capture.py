"""Capture: one phase at one bucket, traced by torch.export into an FX graph (design: phases and buckets).

Tracing runs on fake tensors: no weight is read, and a model of any size can be captured anywhere. Weights and
caches are lifted, so that a graph names them but holds none of their values.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from deepinfer.errors import CaptureError, UsageError
from deepinfer.graphs.cache_layout import CacheLayout
from deepinfer.graphs.config import ModelConfig
from deepinfer.graphs.context import unchanged
from deepinfer.graphs.records import Precision
from deepinfer.graphs.rows import StepInputs
from deepinfer.graphs.step import forward_step, logits_step
from deepinfer.kernels import captured_ops
from deepinfer.kernels.signature import CallSignature, recorded_calls

WeightSpecs = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class GraphSpec:
    """What to capture: a phase, its bucket, and whether the residual streams are exported as well.

    `request_rows` is the length of the request table (equal to the bucket in decode, 0 for logits).
    """

    phase: str
    bucket: int
    request_rows: int
    taps: bool = False

    @property
    def name(self) -> str:
        """The graph's name in an artifact, for example `decode-4`."""
        return f"{self.phase}-{self.bucket}"


def residual_taps(config: ModelConfig) -> list[tuple[int, str]]:
    """Return layer and part of every residual that a graph with taps exports, in the order of its outputs."""
    taps = []
    for layer in range(config.num_hidden_layers):
        if layer in config.engram_layer_ids:
            taps.append((layer, "engram"))
        taps += [(layer, "attn"), (layer, "ffn")]
    return taps


def buffer_name(weight: str) -> str:
    """Return the attribute name under which a captured module holds a weight."""
    return weight.replace(".", "__")


def weight_name(buffer: str) -> str:
    """Return the weight's name in the store for a captured module's attribute name."""
    return buffer.replace("__", ".")


class _Captured(nn.Module):
    """A step function with its weights as buffers, so that export lifts them by name."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self._names = tuple(weights)
        for name, tensor in weights.items():
            self.register_buffer(buffer_name(name), tensor)

    def weights(self) -> dict[str, Tensor]:
        return {name: getattr(self, buffer_name(name)) for name in self._names}


class CapturedStep(_Captured):
    """Prefill or decode: the eight inputs of a step, then the cache regions in layout order."""

    def __init__(
        self,
        spec: GraphSpec,
        config: ModelConfig,
        precision: Precision,
        regions: Iterable[str],
        weights: dict[str, Tensor],
    ) -> None:
        super().__init__(weights)
        self._spec, self._config, self._precision, self._regions = spec, config, precision, tuple(regions)

    def forward(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        count = len(StepInputs._fields)
        caches = dict(zip(self._regions, arguments[count:], strict=True))
        taps: dict[tuple[int, str], Tensor] = {}

        def keep(layer: int, name: str, value: Tensor) -> Tensor:
            taps[layer, name] = value
            return value

        hidden = forward_step(
            self._config,
            self._precision,
            self.weights(),
            StepInputs(*arguments[:count]),
            caches,
            keep if self._spec.taps else unchanged,
        )
        exported = residual_taps(self._config) if self._spec.taps else []
        return (hidden, *(taps[tap] for tap in exported))


class CapturedLogits(_Captured):
    """The head over selected hidden rows."""

    def forward(self, hidden: Tensor) -> tuple[Tensor]:
        return (logits_step(self.weights(), hidden),)


def capture(
    spec: GraphSpec,
    config: ModelConfig,
    precision: Precision,
    layout: CacheLayout,
    weight_specs: WeightSpecs,
    *,
    fused: bool = True,
) -> torch.export.ExportedProgram:
    """Trace one graph on fake tensors; raises CaptureError when the model cannot be traced.

    Every operation becomes one node; without `fused`, those made of others are traced through.

    Inputs of the result are those of StepInputs followed by the cache regions (`logits`: the hidden rows);
    outputs are the hidden rows and, with taps, the residual of every entry of `residual_taps`.
    """
    try:
        with FakeTensorMode(), captured_ops(fused=fused), torch.no_grad():
            module, arguments = _captured_module(spec, config, precision, layout, weight_specs)
            # a graph's text names no source lines, and finding them is a third of the time
            with mock.patch.object(torch.fx.config, "do_not_emit_stack_traces", True, create=True):
                return torch.export.export(module, arguments, strict=False)
    except (RuntimeError, ValueError, TypeError, KeyError, AssertionError, UsageError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CaptureError(
            f"tracing failed: {reason}",
            where=spec.name,
            action="report it with the config",
        ) from error


def recorded_step(
    spec: GraphSpec, config: ModelConfig, precision: Precision, layout: CacheLayout, weight_specs: WeightSpecs
) -> list[CallSignature]:
    """Run a step on fake tensors and return the signature of every op call, in order."""
    with FakeTensorMode(), recorded_calls() as calls, torch.no_grad():
        module, arguments = _captured_module(spec, config, precision, layout, weight_specs)
        module(*arguments)
    return calls


def _captured_module(
    spec: GraphSpec, config: ModelConfig, precision: Precision, layout: CacheLayout, weight_specs: WeightSpecs
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The module of a graph and example arguments, under the fake mode of the caller."""
    weights = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in weight_specs.items()}
    if spec.phase == "logits":
        hidden = torch.empty(spec.bucket, config.hidden_size, dtype=precision.dtype)
        return CapturedLogits({"head": weights["head"]}), (hidden,)
    del weights["head"]
    regions = [region.name for region in layout.regions]
    module = CapturedStep(spec, config, precision, regions, weights)
    return module, example_inputs(spec, layout) + example_regions(layout)


def example_inputs(spec: GraphSpec, layout: CacheLayout) -> tuple[Tensor, ...]:
    """Return one tensor per field of StepInputs with the shapes of a graph: all rows padding, no blocks."""
    rows = torch.zeros(spec.bucket, dtype=torch.int64)
    lines = torch.zeros(spec.request_rows, dtype=torch.int64)
    table = torch.zeros(spec.request_rows, layout.max_blocks_per_request, dtype=torch.int64)
    return tuple(
        StepInputs(
            token_ids=rows,
            positions=rows - 1,
            request_index=rows.clone(),
            block_table=table,
            slot_ids=lines,
            num_computed_tokens=lines.clone(),
            row_starts=lines.clone(),
            row_counts=lines.clone(),
        )
    )


def example_regions(layout: CacheLayout) -> tuple[Tensor, ...]:
    """Return one view per cache region with the strides it has inside its arena, each in storage of its own.

    Views that shared a storage here could not be mutated by a graph; sharing one at run time is fine.
    """
    views = []
    for region in layout.regions:
        dtype = getattr(torch, region.dtype)
        paged = region.kind == "paged"
        count = layout.num_blocks if paged else layout.num_slots
        stride = (layout.block_bytes if paged else layout.slot_bytes) // dtype.itemsize
        record = torch.empty(region.record_shape, device="meta")
        size = (count, region.entries, *region.record_shape)
        strides = (stride, record.numel(), *record.stride())
        storage = torch.zeros(count * stride, dtype=dtype)
        views.append(torch.as_strided(storage, size, strides))
    return tuple(views)
