"""A whole artifact generating through captured graphs, on a device that only queues: the CPU's bytes.

The graphs are the CPU's, since no card is here; all that stands between them and a request is the card's.
"""

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from end_to_end import PROMPTS, Recorder, greedy, make_prompt
from recording_device import RecordingDevice, Watched

from deepinfer import benchmark
from deepinfer.artifacts import Target
from deepinfer.errors import ResourceError, UsageError
from deepinfer.runtime import llm as llm_module
from deepinfer.runtime import step_runner as step_runner_module
from deepinfer.runtime.cuda_runner import HostLogits
from deepinfer.runtime.llm import LLM
from deepinfer.runtime.loader import LoadedArtifact, load_artifact
from deepinfer.runtime.sampling_params import SamplingParams


def _as_if_for_a_card(*arguments: Any) -> LoadedArtifact:
    loaded = load_artifact(*arguments)
    manifest = msgspec.structs.replace(
        loaded.manifest, target=Target(device="cuda", arch="sm_90", isa=loaded.manifest.target.isa)
    )
    graphs: Any = {name: Watched(graph) for name, graph in loaded.graphs.items()}
    return dataclasses.replace(loaded, manifest=manifest, graphs=graphs)


@pytest.fixture(scope="module")
def cpu(float32_artifact: Path) -> LLM:
    return LLM(float32_artifact, num_threads=1)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[RecordingDevice]:
    """Every device that is made while loading."""
    made: list[RecordingDevice] = []

    def make() -> RecordingDevice:
        made.append(RecordingDevice())
        return made[-1]

    monkeypatch.setattr(llm_module, "load_artifact", _as_if_for_a_card)
    monkeypatch.setattr(step_runner_module, "CudaDevice", make)
    return made


@pytest.fixture
def card(float32_artifact: Path, devices: list[RecordingDevice]) -> LLM:
    return LLM(float32_artifact, num_threads=1)


def test_an_artifact_for_a_card_runs_captured_graphs(card: LLM, devices: list[RecordingDevice]) -> None:
    assert isinstance(card._runner, HostLogits) and card._engine.runner is card._runner
    (device,) = devices
    sizes = [
        len(card.limits.prefill_buckets) + len(card.limits.decode_buckets),
        len(card.limits.logits_buckets),
    ]
    assert [len(pool) for pool in device._pools.values()] == sizes, "all are captured while loading"
    device.log.clear()
    card.generate([make_prompt(5)], greedy(3), use_tqdm=False)
    assert [len(pool) for pool in device._pools.values()] == sizes
    assert device.log.count("replay") == 2 * 3  # a step and a head for each token


def test_tokens_and_logits_are_those_of_the_cpu(card: LLM, cpu: LLM) -> None:
    params = [greedy(6 + index % 3) for index in range(len(PROMPTS))]
    pairs = zip(
        Recorder(card).generate(PROMPTS, params), Recorder(cpu).generate(PROMPTS, params), strict=True
    )
    for got, expected in pairs:
        assert got.token_ids == expected.token_ids
        assert got.logits.tobytes() == expected.logits.tobytes()


def test_choices_scores_and_filters_are_those_of_the_cpu(card: LLM, cpu: LLM) -> None:
    params = [
        SamplingParams(max_tokens=5, n=3, seed=1, temperature=0.9, logprobs=2, ignore_eos=True),
        SamplingParams(max_tokens=4, prompt_logprobs=1, temperature=0, logprobs=1, ignore_eos=True),
        SamplingParams(max_tokens=5, seed=7, top_k=20, top_p=0.9, repetition_penalty=1.2, ignore_eos=True),
    ]
    prompts = [make_prompt(length, seed=3) for length in (18, 40, 7)]
    results = [llm.generate(list(prompts), params, use_tqdm=False) for llm in (card, cpu)]
    for got, expected in zip(*results, strict=True):
        assert got.prompt_logprobs == expected.prompt_logprobs
        assert [(own.token_ids, own.logprobs) for own in got.outputs] == [
            (own.token_ids, own.logprobs) for own in expected.outputs
        ]
    scores = [llm.score([prompts[1]], use_tqdm=False)[0].logprobs for llm in (card, cpu)]
    assert scores[0] == scores[1]


def test_fewer_requests_at_a_time(float32_artifact: Path, devices: list[RecordingDevice], cpu: LLM) -> None:
    card = LLM(float32_artifact, num_threads=1, max_num_seqs=1)
    assert card.limits.num_slots == 2
    got = card.generate(PROMPTS[:3], greedy(4), use_tqdm=False)
    expected = cpu.generate(PROMPTS[:3], greedy(4), use_tqdm=False)
    assert [own.outputs[0].token_ids for own in got] == [own.outputs[0].token_ids for own in expected]
    with pytest.raises(UsageError, match="max_num_seqs"):
        LLM(float32_artifact, max_num_seqs=10**6)


def test_a_graph_alone_gives_what_it_gives_on_the_cpu(card: LLM, cpu: LLM) -> None:
    """What `deepinfer bench kernels` times, after the same step on both."""
    for llm in (card, cpu):
        llm.generate([make_prompt(9)], greedy(2), use_tqdm=False)
    bucket = cpu.limits.decode_buckets[0]
    got, expected = (llm._runner.replay("decode", bucket)[0] for llm in (card, cpu))
    np.testing.assert_array_equal(got[0].numpy(), expected[0].numpy())


def test_a_run_is_measured_and_traced(card: LLM) -> None:
    """As `deepinfer bench` does; a step on a card is one part, as nothing within it is waited for."""
    found = benchmark.latency(card, benchmark.Workload(concurrency=2, input_len=20, output_len=3), repeats=1)
    assert found["seconds"]["itl"]["count"] == 2 * 2
    assert found["step_seconds"]["step graph"] > 0 and found["step_seconds"]["fill"] == 0
    assert "run" not in vars(card._runner)
    assert set(benchmark.graphs(card, repeats=1)["seconds"]) >= {"decode-4", "prefill-16"}


def test_a_card_that_is_too_small_is_an_error_with_advice(
    float32_artifact: Path, devices: list[RecordingDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(RecordingDevice, "capture", full)
    with pytest.raises(ResourceError, match="card's memory.*prefill_tokens"):
        LLM(float32_artifact, num_threads=1)
