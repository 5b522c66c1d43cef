"""The runner of captured graphs over the recording device and the suspicious graphs of `fake_graphs`."""

from contextlib import nullcontext

import numpy as np
from fake_graphs import FakeLogitsGraph, FakeStepGraph, fake_cache_layout, fake_limits
from recording_device import RecordingDevice, Watched
from torch import Tensor

from deepinfer.runtime.caches import CacheArenas
from deepinfer.runtime.cuda_runner import CudaModelRunner, HostLogits
from deepinfer.runtime.limits import Limits
from deepinfer.runtime.model_runner import Graph
from deepinfer.runtime.request import Batch


class WatchedRunner(CudaModelRunner):
    """Every call is watched by the device, unless graphs may still be captured in it."""

    recording: RecordingDevice
    is_watched = True

    def run(self, batch: Batch) -> Tensor:
        with self.recording.watched() if self.is_watched else nullcontext():
            return super().run(batch)

    def logits_of_rows(self, rows: np.ndarray) -> Tensor:
        with self.recording.watched() if self.is_watched else nullcontext():
            return super().logits_of_rows(rows)


class FakeCard(HostLogits):
    """What the engine takes, with its parts at hand."""

    def __init__(self, limits: Limits, *, capture_all: bool, staged_bytes: int | None) -> None:
        self.device, self.arenas = RecordingDevice(), CacheArenas.allocate(fake_cache_layout(limits))
        self.arenas.blocks.fill_(0x5A)
        self.arenas.slots.fill_(0x5A)
        graphs: dict[str, Graph] = {}
        for phase, buckets in (("prefill", limits.prefill_buckets), ("decode", limits.decode_buckets)):
            graphs |= {f"{phase}-{b}": Watched(FakeStepGraph(phase, b, limits, None)) for b in buckets}
        graphs |= {f"logits-{bucket}": Watched(FakeLogitsGraph(bucket)) for bucket in limits.logits_buckets}
        self.runner = WatchedRunner(
            limits, graphs, self.arenas, self.device, capture_all=capture_all, staged_bytes=staged_bytes
        )
        self.runner.recording, self.runner.is_watched = self.device, capture_all
        super().__init__(self.runner, self.device)


def fake_card(
    limits: Limits | None = None, *, capture_all: bool = True, staged_bytes: int | None = None
) -> FakeCard:
    """Fresh memory is filled with junk; calls are watched if everything is captured before."""
    return FakeCard(limits or fake_limits(), capture_all=capture_all, staged_bytes=staged_bytes)
