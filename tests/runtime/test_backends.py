"""Backends behind one interface: a table, the eager model with caches, transformers' model without."""

import json
from pathlib import Path

import numpy as np
import pytest
from eager_runner import eager_runner
from fake_graphs import fake_limits
from scores_runner import ScoresRunner

from deepinfer.runtime.engine import Engine
from deepinfer.runtime.limits import Limits
from deepinfer.runtime.model_runner import StepRunner
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.table_runner import TableRunner

PROMPT_LENGTHS, TOKENS = (1, 6, 19, 37), 32


def answers(runner: StepRunner, **options: object) -> list[list[int]]:
    """Of four prompts together."""
    engine = Engine(runner)
    requests = [
        engine.add_request(
            np.random.default_rng(length).integers(2, runner.limits.vocab_size, length).tolist(),
            SamplingParams(max_tokens=TOKENS, seed=length, ignore_eos=True, **options),
        )
        for length in PROMPT_LENGTHS
    ]
    while engine.has_work:
        engine.step()
    return [request.output_token_ids for request in requests]


def limits(vocab_size: int = 48) -> Limits:
    return fake_limits(vocab_size=vocab_size, max_model_len=72, num_blocks=40)


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_loop_with_caches_gives_what_the_loop_without_gives(heat: float) -> None:
    """LAB-04, LAB-15: and without caches every token so far is computed for every token that is made."""
    table = TableRunner(limits(), seed=9)
    naive = ScoresRunner(limits(), table.scores)
    assert answers(naive, temperature=heat) == answers(table, temperature=heat)
    assert naive.positions == sum(TOKENS * length + TOKENS * (TOKENS - 1) // 2 for length in PROMPT_LENGTHS)


@pytest.mark.slow
def test_library_model_and_our_own_answer_alike(tmp_path: Path) -> None:
    """LAB-05: the same weights, 4 prompts x 32 greedy tokens, one of them in batches through caches."""
    pytest.importorskip("transformers.models.deepseek_v4")
    from transformers_model import TransformersModel

    golden = Path(__file__).parents[1] / "golden_data" / "v4-tiny" / "config.json"
    kinds = {0: "sliding_attention", 4: "compressed_sparse_attention", 16: "heavily_compressed_attention"}
    config = json.loads(golden.read_text()) | {
        "num_hidden_layers": 3,
        "compress_ratios": list(kinds),
        "layer_types": list(kinds.values()),
        "index_n_heads": 16,  # with few of them entries tie at zero, which the library settles by chance
    }
    library = TransformersModel.random(config, seed=4)
    ours = eager_runner(library.save(tmp_path / "model", config), "float32", junk=0xFF)
    theirs = ScoresRunner(limits(config["vocab_size"]), library.scores)
    assert answers(theirs, temperature=0) == answers(ours, temperature=0)
