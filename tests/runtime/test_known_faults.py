"""Faults that systems of this kind have had, tried on real graphs: each test names the right behaviour."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from end_to_end import Recorder, greedy, make_prompt
from torch import Tensor

from deepinfer.artifacts import open_artifact
from deepinfer.errors import RequestError
from deepinfer.graphs.eager import eager_logits
from deepinfer.runtime.llm import LLM
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.scheduler import Scheduler

TOLERANCE = 1e-4  # of float32 graphs against the eager model


@pytest.fixture(scope="module")
def recorder(float32_artifact: Path) -> Recorder:
    return Recorder(LLM(float32_artifact, num_threads=1))


@pytest.fixture(autouse=True)
def _everything_is_given_back(recorder: Recorder) -> Iterator[None]:
    """After each: pools as at the start, and a plain request answers as before."""
    (before,) = recorder.generate([[7, 8, 9]], greedy(3))
    yield
    scheduler = recorder.llm._engine.scheduler
    scheduler.check_integrity()
    assert not scheduler.has_work
    assert scheduler.blocks.num_free == scheduler.blocks.capacity
    assert scheduler.slots.num_free == scheduler.slots.capacity
    assert recorder.generate([[7, 8, 9]], greedy(3))[0].digest == before.digest


@pytest.fixture
def cut_chunks(monkeypatch: pytest.MonkeyPatch) -> "ChunkCutter":
    return ChunkCutter(monkeypatch)


class ChunkCutter:
    """Makes every scheduler cut prompts into chunks of the given sizes, taken in turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch

    def __call__(self, sizes: Sequence[int]) -> None:
        cycle = itertools.cycle(sizes)

        def budget(scheduler: Scheduler) -> int:
            return min(next(cycle), scheduler.limits.prefill_buckets[-1])

        self._patch.setattr(Scheduler, "_prefill_budget", budget)


@pytest.mark.parametrize("lengths", [(1,), (2,), (3,), (4,), (1, 2, 3, 4), (15, 16, 17, 32)])
def test_prompts_around_a_compressed_entry_or_a_window_match_the_eager_model(
    golden_dir: Path, recorder: Recorder, lengths: tuple[int, ...]
) -> None:
    """Ratio less one, ratio, ratio and one, twice the ratio: padding rows never enter the compressor."""
    prompts = [make_prompt(length, seed=4) for length in lengths]
    for prompt, result in zip(prompts, recorder.generate(prompts, greedy(5)), strict=True):
        expected = eager_logits(golden_dir, [*prompt, *result.token_ids[:-1]], "float32")
        np.testing.assert_allclose(result.logits, expected[len(prompt) - 1 :], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("length", [31, 32, 33, 63, 64, 65])
def test_prompt_longer_than_a_chunk_is_fed_the_right_tokens(
    golden_dir: Path, recorder: Recorder, cut_chunks: ChunkCutter, length: int
) -> None:
    """The compiled result equals the eager one-shot prefill, for whole chunks and for chunks of one token."""
    prompt = make_prompt(length, seed=5)
    (whole,) = recorder.generate([prompt], greedy(1))
    expected = eager_logits(golden_dir, prompt, "float32")[-1]
    np.testing.assert_allclose(whole.logits[0], expected, rtol=0, atol=TOLERANCE)
    cut_chunks([1])
    assert recorder.generate([prompt], greedy(1))[0].digest == whole.digest


@pytest.mark.parametrize("size", [3, 5, 7, 15])
def test_chunk_that_starts_inside_a_block_and_crosses_its_end_lands_in_place(
    recorder: Recorder, cut_chunks: ChunkCutter, size: int
) -> None:
    """Blocks hold 128 positions; no chunk of these sizes starts at one, and one of them crosses its end."""
    prompt = make_prompt(139, seed=6)
    (expected,) = recorder.generate([prompt], greedy(6))
    cut_chunks([size])
    assert recorder.generate([prompt], greedy(6))[0].digest == expected.digest


def test_generated_text_scored_again_has_the_same_logits_beyond_256_tokens(recorder: Recorder) -> None:
    """Which kernel computes a token never depends on the number of tokens before it or beside it."""
    prompt = make_prompt(9, seed=7)
    (made,) = recorder.generate([prompt], greedy(300))
    for cut in (100, 200, 245, 246, 247, 248, 255, 299):
        (scored,) = recorder.generate([prompt + list(made.token_ids[:cut])], greedy(1))
        assert np.array_equal(scored.logits[0], made.logits[cut]), cut
        assert scored.token_ids[0] == made.token_ids[cut]


def test_scrap_of_a_prefill_does_not_move_the_random_stream(
    recorder: Recorder, cut_chunks: ChunkCutter
) -> None:
    """A chunk that makes no token draws no random number."""
    prompt = make_prompt(33, seed=8)
    params = SamplingParams(max_tokens=20, temperature=1, seed=1, ignore_eos=True)
    (expected,) = recorder.generate([prompt], params)
    cut_chunks([4])
    assert recorder.generate([prompt], params)[0].token_ids == expected.token_ids


def test_padding_rows_write_to_nobody(recorder: Recorder) -> None:
    """Three live rows in a bucket of four: only their own units, and number 0, change in a decode step."""
    engine, arenas = recorder.llm._engine, recorder.llm._loaded.arenas
    layout = recorder.llm._loaded.manifest.cache
    requests = [engine.add_request(make_prompt(length, seed=9), greedy(40)) for length in (5, 16, 33)]
    while engine.scheduler.waiting or engine.scheduler.prefilling:
        engine.step()
    before = arenas.blocks.clone(), arenas.slots.clone()
    assert all(len(request.output_token_ids) >= 1 for request in requests)
    engine.step()
    owned_blocks = {block for request in requests for block in request.block_table}
    owned_slots = {request.slot_id for request in requests}
    for arena, old, size, owned in (
        (arenas.blocks, before[0], layout.block_bytes, owned_blocks),
        (arenas.slots, before[1], layout.slot_bytes, owned_slots),
    ):
        changed = changed_units(arena, old, size)
        assert changed - {0} <= owned
        if owned is owned_slots:
            assert owned <= changed
    window = arenas.regions["layers.0.window"]
    old_window = torch.as_strided(
        before[1].view(window.dtype), window.shape, window.stride(), window.storage_offset()
    )
    for request in requests:
        rows = (window[request.slot_id] != old_window[request.slot_id]).flatten(1).any(dim=1)
        assert rows.nonzero().flatten().tolist() == [(request.num_computed_tokens - 1) % window.shape[1]]
    engine.abort_all()


def changed_units(arena: Tensor, old: Tensor, size: int) -> set[int]:
    differing: Tensor = (arena != old).view(-1, size).any(dim=1)
    return set(differing.nonzero().flatten().tolist())


def test_prompt_sent_again_into_another_slot_answers_as_before(recorder: Recorder) -> None:
    """Longer than the window, with an unrelated prompt between: no state of an earlier owner is read."""
    prompt, other = make_prompt(50, seed=10), make_prompt(70, seed=11)
    engine = recorder.llm._engine
    slots, digests = [], []
    for _ in range(3):
        slots.append(engine.scheduler.slots._free[0])
        digests.append(recorder.generate([prompt], greedy(8))[0].digest)
        recorder.generate([other], greedy(8))
    assert len(set(slots)) == 3 and len(set(digests)) == 1


@pytest.mark.parametrize("chunks_done", [1, 2])
def test_abort_between_prefill_chunks_gives_everything_back(recorder: Recorder, chunks_done: int) -> None:
    """Fifty times; a decoding neighbour and the next prompt do not notice."""
    engine = recorder.llm._engine
    prompt, params = make_prompt(48, seed=12), greedy(4)
    (expected,) = recorder.generate([prompt], params)
    neighbour = engine.add_request(make_prompt(5, seed=12), greedy(200))
    while not neighbour.output_token_ids:
        engine.step()
    for _ in range(50):
        request = engine.add_request(prompt, params)
        while request.num_computed_tokens < 16 * chunks_done:
            engine.step()
        assert request.num_computed_tokens == 16 * chunks_done and not request.output_token_ids
        engine.abort(request)
        engine.scheduler.check_integrity()
        assert engine.scheduler.blocks.num_used == len(neighbour.block_table)
        assert engine.scheduler.slots.num_used == (not neighbour.finished)
    while engine.has_work:
        engine.step()
    assert recorder.generate([prompt], params)[0].digest == expected.digest
    (alone,) = recorder.generate([make_prompt(5, seed=12)], greedy(200))
    assert tuple(neighbour.output_token_ids) == alone.token_ids


@pytest.mark.parametrize("factor", [1.0, 100.0])
def test_tiny_temperatures_are_greedy_and_finite(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    """Also with logits a hundred times as large: nothing overflows into junk."""
    runner = recorder.llm._engine.runner
    original = runner._graphs["logits-4"]

    class Scaled:
        def run(self, inputs: list[Tensor]) -> list[Tensor]:
            return [original.run(inputs)[0] * factor]

    monkeypatch.setitem(runner._graphs, "logits-4", Scaled())
    prompt = make_prompt(6, seed=13)
    (expected,) = recorder.generate([prompt], greedy(12))
    for temperature in (1e-12, 1e-6, 1e-5, 1e-4):
        params = SamplingParams(max_tokens=12, temperature=temperature, seed=3, ignore_eos=True)
        (result,) = recorder.generate([prompt], params)
        assert (result.finish_reason, result.token_ids) == ("length", expected.token_ids), temperature


def test_order_of_submission_does_not_mix_parameters_up(recorder: Recorder) -> None:
    """A greedy and a sampled request, each first once."""
    prompts = [make_prompt(4, seed=14), make_prompt(6, seed=14)]
    params = [greedy(10), SamplingParams(max_tokens=10, temperature=1.3, seed=5, ignore_eos=True)]
    one = recorder.generate(prompts, params)
    two = recorder.generate(prompts[::-1], params[::-1])[::-1]
    assert [result.token_ids for result in one] == [result.token_ids for result in two]


def test_results_belong_to_their_prompts_though_later_ones_end_first(recorder: Recorder) -> None:
    """Ten prompts with ten to one tokens to make; text and ids mixed; and an empty list."""
    prompts: list[object] = [make_prompt(3 + index, seed=15) for index in range(10)]
    prompts[4] = "w12"
    outputs = recorder.llm.generate(
        prompts,  # type: ignore[arg-type]
        [greedy(10 - index) for index in range(10)],
        use_tqdm=False,
    )
    for index, output in enumerate(outputs):
        assert list(output.prompt_token_ids) == ([24] if index == 4 else prompts[index])
        assert len(output.outputs[0].token_ids) == 10 - index
    assert recorder.llm.generate([], greedy(1)) == []


def test_request_that_no_pool_could_hold_is_refused_and_does_not_block_the_next(
    float32_artifact: Path,
) -> None:
    """It fits the model's length; with three cache blocks of 128 it would wait for ever."""
    llm = LLM(float32_artifact, num_threads=1)
    small = dataclasses.replace(llm.limits, num_blocks=4)
    llm._engine.runner.limits = small
    llm._engine.scheduler = Scheduler(small)
    with pytest.raises(RequestError, match="400 tokens need 4 cache blocks, the artifact has 3"):
        llm.generate([make_prompt(390)], greedy(10), use_tqdm=False)
    outputs = llm.generate([make_prompt(380), make_prompt(5)], greedy(4), use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [4, 4]


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"top_k": -2},
        {"top_p": 1.5},
        {"logprobs": 513},
        {"logit_bias": {"517": 5}},
        {"min_tokens": 17},
        {"stop": [""]},
        {"n": 0},
        {"stop_token_ids": [512]},
        {"stop_token_ids": [-1]},
        {"temperature": float("inf")},
    ],
)
def test_parameters_that_cannot_be_honoured_are_refused_by_name(
    recorder: Recorder, options: dict[str, object]
) -> None:
    """Never silently ignored, never an engine that dies of them."""
    (name,) = options
    with pytest.raises(RequestError, match=name):
        recorder.generate([[3, 4]], SamplingParams(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["a\x00b", " " * 10_000, "\u4e16\u754c", "w12 w13"])
def test_odd_text_is_encoded_or_refused(recorder: Recorder, text: str) -> None:
    """Whatever the tokenizer makes of it, the answer is of the usual kind."""
    (output,) = recorder.llm.generate([text], greedy(2), use_tqdm=False)
    assert len(output.prompt_token_ids) >= 1 and len(output.outputs[0].token_ids) == 2


def test_lone_surrogate_in_text_is_refused(recorder: Recorder) -> None:
    with pytest.raises(RequestError, match="not valid Unicode"):
        recorder.llm.generate(["a\ud800b"], greedy(2), use_tqdm=False)


def test_weights_are_stored_once_and_not_in_the_graphs(float32_artifact: Path) -> None:
    """The weight file is about the sum of its tensors, and no graph carries a copy."""
    with open_artifact(float32_artifact) as artifact:
        sizes = {entry.path: entry.bytes for entry in artifact.manifest.files}
        total = sum(entry.size_bytes for entry in artifact.tensors.values())
    stored = sum(size for path, size in sizes.items() if path.startswith("weights/"))
    assert total <= stored <= total * 1.05
    for path, size in sizes.items():
        if path.endswith("model.so"):
            assert size < total / 2, path
