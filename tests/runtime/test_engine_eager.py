"""The engine over the eager model in the graphs' place: the step contract holds with the real mathematics.

What a request gives in a crowd, over caches whose fresh memory holds junk, must be what the eager model gives
for it alone, prefilled at once.
"""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer.artifacts import CacheLayout
from deepinfer.graphs.eager import EagerModel, eager_logits
from deepinfer.graphs.rows import StepInputs
from deepinfer.runtime import sampler
from deepinfer.runtime.caches import CacheArenas
from deepinfer.runtime.engine import Engine
from deepinfer.runtime.limits import Limits
from deepinfer.runtime.model_runner import CpuModelRunner
from deepinfer.runtime.sampling_params import SamplingParams

NUM_INPUTS = len(StepInputs._fields)
LENGTHS = (1, 18, 33, 6, 70)
MAX_TOKENS = 6


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


def engine_over(golden_dir: Path, precision: str, junk: int) -> Engine:
    model = EagerModel.load(golden_dir, precision, max_model_len=256, max_num_seqs=4)
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
    return Engine(CpuModelRunner(limits, graphs, arenas.regions))


@pytest.mark.parametrize(("precision", "junk"), [("float32", 0xFF), ("native", 0xFF)])
def test_crowd_over_used_memory_gives_what_the_eager_model_gives_alone(
    golden_dir: Path, precision: str, junk: int
) -> None:
    engine = engine_over(golden_dir, precision, junk)
    requests = []
    for length in LENGTHS:
        prompt = np.random.default_rng(length).integers(3, 500, length).tolist()
        params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0 if length % 2 else 0.9, seed=length)
        requests.append(engine.add_request(prompt, params))
    while engine.has_work:
        engine.step()
        engine.scheduler.check_integrity()
    for request in requests:
        tokens = [*request.prompt_token_ids, *request.output_token_ids]
        logits = eager_logits(golden_dir, tokens[:-1], precision)
        made = range(len(request.prompt_token_ids), len(tokens))
        expected = sampler.sample(
            torch.from_numpy(logits[made.start - 1 :]),
            [request.params] * len(made),
            list(made),
            [request.seed] * len(made),
        )
        assert request.output_token_ids == expected.token_ids.tolist()
        assert request.finish_reason == "length"
