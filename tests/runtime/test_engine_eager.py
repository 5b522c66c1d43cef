"""The engine over the eager model in the graphs' place: the step contract holds with the real mathematics.

What a request gives in a crowd, over caches whose fresh memory holds junk, must be what the eager model gives
for it alone, prefilled at once.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from eager_runner import eager_runner

from deepinfer.graphs.eager import eager_logits
from deepinfer.runtime import sampler
from deepinfer.runtime.engine import Engine
from deepinfer.runtime.sampling_params import SamplingParams

LENGTHS = (1, 18, 33, 6, 70)
MAX_TOKENS = 6


@pytest.mark.parametrize(("precision", "junk"), [("float32", 0xFF), ("native", 0xFF)])
def test_crowd_over_used_memory_gives_what_the_eager_model_gives_alone(
    golden_dir: Path, precision: str, junk: int
) -> None:
    engine = Engine(eager_runner(golden_dir, precision, junk))
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
        assert request.output_token_ids == expected.token_ids
        assert request.finish_reason == "length"
