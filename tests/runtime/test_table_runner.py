"""The table backend: scores through the cache are those without one, and a scheduler's mistakes show."""

import dataclasses

import numpy as np
import pytest
import torch
from text_engine import text_limits

from deepinfer.runtime import sampler
from deepinfer.runtime.engine import Engine
from deepinfer.runtime.limits import Limits
from deepinfer.runtime.request import Batch, Request, ScheduledRows
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.table_runner import TableRunner

EOS = 1
VOCAB = 16


def table_limits(**changes: object) -> Limits:
    return text_limits(**({"vocab_size": VOCAB, "eos_token_ids": (EOS,)} | changes))


def request_of(tokens: list[int], block_table: tuple[int, ...], slot_id: int) -> Request:
    request = Request(0, tuple(tokens), SamplingParams(), seed=0)
    request.block_table, request.slot_id = block_table, slot_id
    return request


def prefill(*parts: tuple[Request, int, int]) -> Batch:
    rows = tuple(ScheduledRows(*part) for part in parts)
    return Batch("prefill", 64, rows)


PROMPT = [3, 1, 4, 15, 9, 2, 6, 5, 3, 5]


def last_score(runner: TableRunner, batch: Batch) -> np.ndarray:
    return runner.run(batch).numpy()[-1]


@pytest.mark.parametrize("order", [None, 1, 2, 7])
def test_scores_in_chunks_through_blocks_equal_scores_without_a_cache(order: int | None) -> None:
    runner = TableRunner(table_limits(), seed=3, order=order)
    expected = runner.scores(PROMPT)
    assert expected.dtype == np.float32 and expected.shape == (len(PROMPT), VOCAB)
    for cuts in ([10], [3, 7], [4, 4, 2], [1] * 10):
        request, start = request_of(PROMPT, (9, 2, 30), 3), 0
        for count in cuts:
            scores = runner.run(prefill((request, start, count)))
            start += count
        assert torch.equal(scores, torch.from_numpy(expected[-1:]))


def test_order_says_how_many_tokens_decide() -> None:
    for order in (1, 2, 3):
        scores = TableRunner(table_limits(), order=order).scores([5, 6, 7, 8, 5, 6, 7, 8, 9, 7, 8])
        assert np.array_equal(scores[7], scores[3])
        assert np.array_equal(scores[10], scores[7]) is (order <= 2)
    whole = TableRunner(table_limits()).scores([0] * 40)
    assert len(np.unique(whole, axis=0)) == 40


def test_a_seed_is_a_table_and_equal_scores_are_common() -> None:
    one, two = (TableRunner(table_limits(), seed=seed).scores(PROMPT) for seed in (1, 2))
    assert not np.array_equal(one, two)
    assert np.array_equal(one, TableRunner(table_limits(), seed=1).scores(PROMPT))
    many = TableRunner(table_limits(), seed=1).scores(PROMPT * 6)
    top = np.sort(many, axis=1)[:, -2:]
    assert (top[:, 0] == top[:, 1]).any()


def test_requests_of_one_step_do_not_see_each_other() -> None:
    runner = TableRunner(table_limits())
    one, two = request_of(PROMPT[:6], (1, 2), 1), request_of(PROMPT[3:], (3, 4), 2)
    scores = runner.run(prefill((one, 0, 6), (two, 0, 7))).numpy()
    assert np.array_equal(scores[0], runner.scores(PROMPT[:6])[-1])
    assert np.array_equal(scores[1], runner.scores(PROMPT[3:])[-1])


@pytest.mark.parametrize("blocks", [(1, 2, 1), (1, 2, 7)], ids=["shared", "own"])
def test_a_block_of_somebody_else_changes_the_scores(blocks: tuple[int, ...]) -> None:
    """The second case is the twin that changes nothing."""
    runner = TableRunner(table_limits())
    request, other = request_of(PROMPT, blocks, 1), request_of([8] * 4, (5,), 2)
    runner.run(prefill((request, 0, 9)))
    runner.run(prefill((other, 0, 4)))
    right = np.array_equal(last_score(runner, prefill((request, 9, 1))), runner.scores(PROMPT)[-1])
    assert right is (blocks == (1, 2, 7))
    request.block_table = (1, 5, 7)
    assert not np.array_equal(last_score(runner, prefill((request, 9, 1))), runner.scores(PROMPT)[-1])


def test_a_slot_of_somebody_else_changes_the_scores() -> None:
    runner = TableRunner(table_limits())
    request, other = request_of(PROMPT, (1, 2, 3), 1), request_of([8] * 4, (5,), 1)
    runner.run(prefill((request, 0, 9)))
    runner.run(prefill((other, 0, 4)))
    assert not np.array_equal(last_score(runner, prefill((request, 9, 1))), runner.scores(PROMPT)[-1])


def test_a_position_that_was_skipped_changes_the_scores() -> None:
    runner = TableRunner(table_limits())
    request = request_of(PROMPT, (1, 2, 3), 1)
    runner.run(prefill((request, 0, 4)))
    runner.run(prefill((request, 5, 4)))
    assert not np.array_equal(last_score(runner, prefill((request, 9, 1))), runner.scores(PROMPT)[-1])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_table": (1,)}, "no block"),
        ({"block_table": (0, 1, 2)}, "0, 1, 2"),
        ({"block_table": (1, 2, 65)}, "65"),
        ({"slot_id": 0}, "0"),
        ({"slot_id": 5}, "5"),
        ({"prompt_token_ids": (16,) * 10}, "16"),
        ({"prompt_token_ids": (3,) * 9}, "no token yet"),
    ],
)
def test_an_index_out_of_range_is_a_mistake_of_the_caller(change: dict, words: str) -> None:
    request = dataclasses.replace(request_of(PROMPT, (1, 2, 3), 1), **change)
    with pytest.raises(AssertionError, match=words):
        TableRunner(table_limits()).run(prefill((request, 0, 10)))


def expected_tokens(runner: TableRunner, prompt: list[int], params: SamplingParams) -> list[int]:
    tokens = list(prompt)
    while len(tokens) - len(prompt) < params.max_tokens:
        logits = torch.from_numpy(runner.scores(tokens)[-1:])
        tokens += sampler.sample(logits, [params], [len(tokens)], [params.seed or 0]).token_ids
    return tokens[len(prompt) :]


def test_engine_over_the_table_gives_what_the_table_says() -> None:
    engine = Engine(TableRunner(table_limits(), seed=5))
    oracle = TableRunner(table_limits(), seed=5)
    wanted = []
    for length in (1, 4, 5, 9, 17, 30):
        prompt = np.random.default_rng(length).integers(2, VOCAB, length).tolist()
        params = SamplingParams(
            max_tokens=20, temperature=float(length % 3), seed=length, ignore_eos=True, top_p=0.9
        )
        wanted.append((engine.add_request(prompt, params), expected_tokens(oracle, prompt, params)))
    while engine.has_work:
        engine.step()
    for request, tokens in wanted:
        assert request.output_token_ids == tokens


def test_the_poison_token_ends_its_request_alone() -> None:
    engine = Engine(TableRunner(table_limits(), seed=5, poison_token_id=7))
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True, allowed_token_ids=range(2, 7))
    good, bad = engine.add_request([3, 4], params), engine.add_request([3, 7], params)
    while engine.has_work:
        engine.step()
    assert (bad.finish_reason, bad.stop_reason) == ("error", "numerical_error")
    assert good.output_token_ids == expected_tokens_within(good, range(2, 7))


def expected_tokens_within(request: Request, allowed: range) -> list[int]:
    """The greedy answer where only these ids are allowed."""
    oracle, tokens = TableRunner(table_limits(), seed=5), list(request.prompt_token_ids)
    for _ in range(request.params.max_tokens):
        scores = oracle.scores(tokens)[-1]
        tokens.append(max(allowed, key=lambda token, scores=scores: (scores[token], -token)))
    return tokens[len(request.prompt_token_ids) :]


def test_manifest_names_what_can_change_a_score() -> None:
    manifest = TableRunner(table_limits(), seed=1).manifest()
    assert manifest == TableRunner(table_limits(num_blocks=17), seed=1).manifest()
    for other in (
        TableRunner(table_limits(), seed=2),
        TableRunner(table_limits(vocab_size=17), seed=1),
        TableRunner(table_limits(), seed=1, order=2),
    ):
        assert other.manifest() != manifest
