"""DeepSeek-V4 against transformers' own implementation, live: random configs, random weights, random prompts.

Index heads are many, so that no two entries tie at a score of exactly zero: ties go to the lower entry here,
and nowhere in particular there.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers.models.deepseek_v4")

from transformers_model import TransformersModel

import deepinfer
from deepinfer.graphs.eager import eager_logits

LIMIT = 1e-4
GREEDY_TOKENS = 64


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Small models of every shape: layer kinds in any order, group and expert counts, windows, clamps."""
    base = json.loads((Path(__file__).parents[1] / "golden_data" / "v4-tiny" / "config.json").read_text())
    kinds = draw(st.lists(st.sampled_from((0, 4, 16)), min_size=2, max_size=4))
    hashed = draw(st.integers(0, min(2, len(kinds))))
    experts = draw(st.sampled_from((4, 8)))
    names = {0: "sliding_attention", 4: "compressed_sparse_attention", 16: "heavily_compressed_attention"}
    return {
        **base,
        "num_hidden_layers": len(kinds),
        "compress_ratios": kinds,
        "layer_types": [names[kind] for kind in kinds],
        "num_hash_layers": hashed,
        "n_routed_experts": experts,
        "num_experts_per_tok": draw(st.integers(2, 3)),
        "sliding_window": draw(st.sampled_from((8, 16))),
        "index_topk": draw(st.integers(2, 8)),
        "index_n_heads": 16,
        "swiglu_limit": draw(st.sampled_from((0.5, 1.0, 10.0))),
        "routed_scaling_factor": draw(st.sampled_from((1.0, 1.5, 2.5))),
        "hc_sinkhorn_iters": draw(st.sampled_from((4, 20))),
        "num_attention_heads": draw(st.sampled_from((4, 8))),
    }


def prompt(seed: int, length: int, vocab: int = 384) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(2, vocab, length).tolist()
    return tokens


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(configs(), st.integers(0, 1000), st.integers(1, 70))
def test_eager_equals_the_witness(
    tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any], seed: int, length: int
) -> None:
    witness = TransformersModel.random(config, seed)
    model_dir = witness.save(tmp_path_factory.mktemp("v4") / "model", config)
    tokens = prompt(seed, length)
    found = eager_logits(model_dir, tokens, "float32")
    assert np.abs(found - witness.scores(tokens)).max() <= LIMIT


@pytest.mark.slow
@settings(
    max_examples=2,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],  # an example takes minutes: a failure is shown as it is
)
@given(configs(), st.integers(0, 1000))
def test_compiled_equals_the_witness(
    tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any], seed: int
) -> None:
    """Logits of every graph, and 64 greedy tokens through the engine and its caches."""
    witness = TransformersModel.random(config, seed)
    folder = tmp_path_factory.mktemp("v4")
    model_dir = witness.save(folder / "model", config)
    options = deepinfer.CompileConfig(
        precision="float32", decode_rows=(2,), prefill_tokens=(16,), max_num_seqs=2, max_model_len=256
    )
    result = deepinfer.compile_model(model_dir, folder / "artifact", options)
    assert result.certified, result.explanation  # every graph within 1e-4 of eager, which is checked next
    prompts = [prompt(seed, 37), prompt(seed + 1, 5)]
    for tokens in prompts:
        assert np.abs(eager_logits(model_dir, tokens, "float32") - witness.scores(tokens)).max() <= LIMIT
    params = deepinfer.SamplingParams(max_tokens=GREEDY_TOKENS, temperature=0.0, ignore_eos=True)
    outputs = deepinfer.LLM(folder / "artifact").generate(prompts, params)
    for tokens, output in zip(prompts, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == witness.greedy(tokens, GREEDY_TOKENS)
