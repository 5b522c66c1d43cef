"""The engine's runner over the eager model: its step functions stand where compiled graphs would."""

from pathlib import Path

import msgspec
from torch import Tensor

from deepinfer.artifacts import CacheLayout
from deepinfer.graphs.eager import EagerModel
from deepinfer.graphs.rows import StepInputs
from deepinfer.runtime.caches import CacheArenas
from deepinfer.runtime.limits import Limits
from deepinfer.runtime.model_runner import CpuModelRunner

NUM_INPUTS = len(StepInputs._fields)


class EagerStep:
    """A step graph that is the eager step function."""

    def __init__(self, model: EagerModel, phase: str) -> None:
        self.model, self.phase = model, phase

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        self.model.caches = dict(zip(self.model.caches, inputs[NUM_INPUTS:], strict=True))
        return [self.model.step(self.phase, StepInputs(*inputs[:NUM_INPUTS]))]


class EagerLogits:
    """A logits graph that is the eager head."""

    def __init__(self, model: EagerModel) -> None:
        self.model = model

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        return [self.model.logits(*inputs)]


def eager_runner(model_dir: Path, precision: str, junk: int) -> CpuModelRunner:
    """Four requests of up to 256 tokens; fresh cache memory holds the byte `junk`."""
    model = EagerModel.load(
        model_dir,
        precision,  # type: ignore[arg-type]
        max_model_len=256,
        max_num_seqs=4,
    )
    layout = msgspec.convert(model.layout.to_dict(), CacheLayout)
    limits = Limits(
        prefill_buckets=(8, 32),
        decode_buckets=(1, 4),
        logits_buckets=(1, 4),
        prefill_table_size=2,
        max_model_len=256,
        block_tokens=layout.block_tokens,
        max_blocks_per_request=layout.max_blocks_per_request,
        num_blocks=layout.num_blocks,
        num_slots=layout.num_slots,
        vocab_size=model.config.vocab_size,
    )
    arenas = CacheArenas.allocate(layout)
    arenas.blocks.fill_(junk)
    arenas.slots.fill_(junk)
    assert list(arenas.regions) == list(model.caches)
    graphs: dict[str, EagerStep | EagerLogits] = {}
    for phase, buckets in (("prefill", limits.prefill_buckets), ("decode", limits.decode_buckets)):
        graphs |= {f"{phase}-{bucket}": EagerStep(model, phase) for bucket in buckets}
    graphs |= {f"logits-{bucket}": EagerLogits(model) for bucket in limits.logits_buckets}
    return CpuModelRunner(limits, graphs, arenas.regions)
