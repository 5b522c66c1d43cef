"""Contracts of model, sampler and loop: rows, selection, random numbers, counts, over the table backend."""

import dataclasses
import inspect
import math
from pathlib import Path

import pytest
import torch
from fake_graphs import fake_limits, fake_runner

from deepinfer.errors import RequestError
from deepinfer.runtime import model_runner, sampler
from deepinfer.runtime.engine import Engine
from deepinfer.runtime.limits import Limits
from deepinfer.runtime.request import Request
from deepinfer.runtime.sampler import CompiledSampler
from deepinfer.runtime.sampler_interface import Sampler
from deepinfer.runtime.sampler_reference import ReferenceSampler
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.table_runner import TableRunner

ROOT = Path(__file__).parent.parent.parent
EOS = 1
BOTH = [CompiledSampler(), ReferenceSampler()]
both_samplers = pytest.mark.parametrize("one", BOTH, ids=[one.name for one in BOTH])


def limits(**changes: object) -> Limits:
    return fake_limits(vocab_size=16, **changes)  # type: ignore[arg-type]


def run(engine: Engine, *requests: tuple[list[int], SamplingParams]) -> list[Request]:
    added = [engine.add_request(prompt, params) for prompt, params in requests]
    while engine.has_work:
        engine.step()
    return added


def sampled(count: int, seed: int, **options: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": count, "seed": seed, "ignore_eos": True, **options})


def logprobs_of(one: Sampler, logits: list[float], **options: object) -> dict[int, float]:
    """Every kept token's log-probability."""
    params = SamplingParams(logprobs=len(logits), **options)
    (entries,) = one.sample(torch.tensor([logits]), [params], [1], [1]).logprobs
    assert entries is not None
    return {token: entry.logprob for token, entry in entries.items()}


def test_prompts_of_unlike_lengths_are_never_overwritten_by_sampled_tokens() -> None:
    """ROW-06: each answer begins after its own prompt, which stays as it came."""
    prompts = [[3, 4], [5, 6, 7, 8]]
    requests = run(Engine(TableRunner(limits())), *((prompt, sampled(6, 1)) for prompt in prompts))
    alone = [run(Engine(TableRunner(limits())), (prompt, sampled(6, 1)))[0] for prompt in prompts]
    for request, single, prompt in zip(requests, alone, prompts, strict=True):
        assert list(request.prompt_token_ids) == prompt
        assert request.output_token_ids == single.output_token_ids and len(request.output_token_ids) == 6


def test_end_token_inside_a_prompt_does_not_end_the_request() -> None:
    """ROW-07."""
    params = SamplingParams(max_tokens=5, temperature=0, stop_token_ids=[7], allowed_token_ids=range(8, 16))
    for prompt in ([3, EOS, 4], [3, 7], [EOS]):
        (request,) = run(Engine(TableRunner(limits())), (prompt, params))
        assert (request.finish_reason, len(request.output_token_ids)) == ("length", 5)


@pytest.mark.parametrize("buckets", [(1,), (2, 3), (16,)])
def test_tokens_of_the_prompt_take_no_draw_however_it_is_cut(buckets: tuple[int, ...]) -> None:
    """ROW-08: the first draw is that of the position after the prompt."""
    prompt, oracle = [3, 9, 4, 11, 8], TableRunner(limits(), seed=2)
    (request,) = run(
        Engine(TableRunner(limits(prefill_buckets=buckets), seed=2)), (prompt, sampled(1, seed=6))
    )
    logits = torch.from_numpy(oracle.scores(prompt))
    drawn = sampler.sample(logits[-1:], [sampled(1, 6)], [len(prompt)], [6]).token_ids
    assert request.output_token_ids == drawn


def test_logprob_of_a_token_is_read_from_the_row_that_chose_it() -> None:
    """ROW-10: z[y] - logsumexp(z); of the next row it would be another number."""
    runner = TableRunner(limits(), seed=4)
    prompt = [3, 9, 4]
    (request,) = run(Engine(runner), (prompt, SamplingParams(max_tokens=8, temperature=0, logprobs=0)))
    tokens = request.output_token_ids
    scores = torch.from_numpy(runner.scores([*prompt, *tokens])).double().log_softmax(-1)
    first = len(prompt) - 1
    reported = [entry[token].logprob for token, entry in zip(tokens, request.logprobs, strict=True)]
    own = [float(scores[first + place, token]) for place, token in enumerate(tokens)]
    following = [float(scores[first + place + 1, token]) for place, token in enumerate(tokens)]
    assert reported == pytest.approx(own, abs=1e-5)
    assert all(abs(ours - theirs) > 1e-3 for ours, theirs in zip(reported, following, strict=True))


@both_samplers
def test_logits_and_log_probabilities_have_one_winner(one: Sampler) -> None:
    """POL-02; a second softmax over log-probabilities changes nothing but the last bit."""
    logits = [3.0, 2.0, 1.0, 0.0]
    normalised = torch.tensor(logits, dtype=torch.float64).log_softmax(0)
    for row in (logits, normalised.tolist()):
        greedy = one.sample(torch.tensor([row]), [SamplingParams(temperature=0)], [1], [1])
        assert greedy.token_ids == [0]
    twice = normalised.log_softmax(0).exp() - normalised.exp()
    assert float(twice.abs().max()) <= 1e-15


@pytest.mark.parametrize(
    "logits",
    [
        torch.zeros(1, 8, dtype=torch.bfloat16),
        torch.zeros(1, 8, dtype=torch.float64),
        torch.zeros(8),
        torch.zeros(1, 2, 8),
        torch.zeros(2, 8),
    ],
    ids=["bfloat16", "float64", "vector", "attention scores", "two rows"],
)
def test_only_float32_logits_by_row_and_vocabulary_are_sampled(logits: torch.Tensor) -> None:
    """POL-01, POL-03, POL-10: no other kind of score reaches a draw."""
    with pytest.raises(AssertionError):
        CompiledSampler().sample(logits, [SamplingParams()], [1], [1])


@both_samplers
def test_temperature_divides_logits_before_the_softmax(one: Sampler) -> None:
    """POL-05."""
    found = logprobs_of(one, [2.0, 1.0, 0.5, 0.1], temperature=1.0)
    expected = {0: 0.5745, 1: 0.2114, 2: 0.1282, 3: 0.0859}
    assert {token: math.exp(value) for token, value in found.items()} == pytest.approx(expected, abs=5e-5)
    halved = logprobs_of(one, [2.0, 1.0, 0.5, 0.1], temperature=2.0)
    assert halved[0] - halved[1] == pytest.approx(0.5, abs=1e-6)


@both_samplers
def test_temperature_zero_is_greedy_and_not_a_division(one: Sampler) -> None:
    """POL-05: two logits 1e-5 apart, of which a tiny temperature would draw the second every fourth time."""
    params = SamplingParams(temperature=0)
    assert params.greedy and params.temperature == 0.0
    logits = torch.tensor([[0.0, 1e-5]]).repeat(200, 1)
    assert set(one.sample(logits, [params] * 200, range(200), range(200)).token_ids) == {1}
    tiny = one.sample(logits, [SamplingParams(temperature=1e-5)] * 200, range(200), range(200)).token_ids
    assert 20 < tiny.count(0) < 90  # .269 of 200
    with pytest.raises(RequestError, match="temperature"):
        SamplingParams(temperature=-1.0)


DYADIC = [0.0, -math.log(2), -2 * math.log(2), -3 * math.log(2), -3 * math.log(2)]  # of 2: 1/2, 1/4, 1/8, ...


@both_samplers
@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 1), (0.75, 2), (0.875, 3), (0.8751, 5), (1.0, 5)])
def test_top_p_stops_where_the_sum_equals_it(one: Sampler, top_p: float, kept: int) -> None:
    """POL-07: 1/2, 1/4, 1/8, 1/16, 1/16; at .75 the sum before the third token equals top_p, so it goes."""
    assert sorted(logprobs_of(one, DYADIC, top_p=top_p)) == list(range(kept))


@both_samplers
def test_a_token_too_many_is_not_kept_where_the_sum_equals_top_p_in_decimals(one: Sampler) -> None:
    """POL-07: .5, .3, .1, .1 at .8, in 1,000 draws."""
    logits = torch.tensor([0.5, 0.3, 0.1, 0.1]).log().repeat(1000, 1)
    drawn = one.sample(logits, [SamplingParams(top_p=0.8)] * 1000, range(1000), [3] * 1000).token_ids
    assert set(drawn) == {0, 1}


@both_samplers
@pytest.mark.parametrize("top_p", [1e-8, 1e-4, 1e-3])
def test_very_small_top_p_is_the_most_likely_token(one: Sampler, top_p: float) -> None:
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(1)).repeat(50, 1)
    params = [SamplingParams(top_p=top_p, temperature=0.8)] * 50
    for given in (logits, logits.bfloat16().float()):
        drawn = one.sample(given, params, [4] * 50, range(50)).token_ids
        assert set(drawn) == {int(given[0].argmax())}


@both_samplers
def test_rows_are_normalised_each_by_itself(one: Sampler) -> None:
    """POL-11: along the other axis the columns would sum to 1, and the rows to 1.5."""
    params = [SamplingParams(logprobs=3)] * 2
    found = one.sample(torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 2.0]]), params, [1, 1], [1, 1])
    for entries in found.logprobs:
        assert entries is not None and len(entries) == 3
        assert sum(math.exp(entry.logprob) for entry in entries.values()) == pytest.approx(1, abs=1e-6)


@both_samplers
def test_top_k_beyond_the_vocabulary_and_off_keep_everything(one: Sampler) -> None:
    logits = [0.5, -1.0, 2.0, 0.0]
    for top_k in (4, 5, 9_999_999, 0, -1):
        assert sorted(logprobs_of(one, logits, top_k=top_k)) == [0, 1, 2, 3]
    with pytest.raises(RequestError, match="top_k"):
        SamplingParams(top_k=-2)


def test_greedy_choice_is_safe_only_where_the_margin_exceeds_twice_the_error() -> None:
    """NUM-02: an error of .25 each way turns a margin of .5 into a tie, which the lower id wins."""
    choose = lambda row: int(  # noqa: E731
        CompiledSampler().sample(torch.tensor([row]), [SamplingParams(temperature=0)], [1], [1]).token_ids[0]
    )
    assert (choose([0.5, 1.0]), choose([0.75, 0.75])) == (1, 0)
    assert choose([0.5, 1.0 + 2**-20]) == choose([0.75, 0.75 + 2**-20]) == 1


def test_draws_do_not_move_for_what_draws_nothing() -> None:
    """RNG-04: greedy neighbours, ended and refused requests leave a request's draws where they are."""
    (alone,) = run(Engine(TableRunner(limits())), ([3, 4], sampled(8, seed=5)))
    engine = Engine(TableRunner(limits()))
    with pytest.raises(RequestError):
        engine.add_request([99], sampled(1, 5))
    crowd = run(
        engine,
        ([5], sampled(2, 5)),
        ([6, 7], sampled(8, 0, temperature=0)),
        ([3, 4], sampled(8, seed=5)),
        ([8], sampled(1, 5)),
    )
    assert crowd[2].output_token_ids == alone.output_token_ids


@pytest.mark.parametrize("cut", [1, 5, 11])
def test_request_resumed_from_its_tokens_and_seed_goes_on_with_the_same_draws(cut: int) -> None:
    """RNG-05: draws are numbered by position, so nothing has to be kept but the tokens and the seed."""
    prompt = [3, 4, 5]
    (whole,) = run(Engine(TableRunner(limits())), (prompt, sampled(12, seed=77)))
    (again,) = run(Engine(TableRunner(limits())), (prompt, sampled(12, seed=77)))
    assert again.output_token_ids == whole.output_token_ids
    begun = [*prompt, *whole.output_token_ids[:cut]]
    (rest,) = run(Engine(TableRunner(limits())), (begun, sampled(12 - cut, seed=77)))
    assert rest.output_token_ids == whole.output_token_ids[cut:]
    (other,) = run(Engine(TableRunner(limits())), (begun, sampled(12 - cut, seed=78)))
    assert cut == 11 or other.output_token_ids != rest.output_token_ids


def test_omitted_seed_is_drawn_for_each_request_and_recorded() -> None:
    """K-11: ten prompts that share one object differ; a recorded seed repeats its answer."""
    shared = SamplingParams(max_tokens=12, ignore_eos=True)
    requests = run(Engine(TableRunner(limits(num_slots=11, num_blocks=100))), *[([3, 4], shared)] * 10)
    assert len({request.seed for request in requests}) == 10
    assert len({tuple(request.output_token_ids) for request in requests}) > 5
    for request in requests[:3]:
        (again,) = run(Engine(TableRunner(limits())), ([3, 4], sampled(12, request.seed)))
        assert again.output_token_ids == request.output_token_ids


def test_place_in_a_list_does_not_enter_a_draw() -> None:
    """RNG-06: one object with a seed for four prompts gives what four calls give."""
    params, prompts = sampled(10, seed=42), [[3], [4, 5], [6, 7, 8], [9]]
    together = run(Engine(TableRunner(limits())), *((prompt, params) for prompt in prompts))
    engine = Engine(TableRunner(limits()))
    for prompt, request in zip(prompts, together, strict=True):
        (single,) = run(engine, (prompt, params))  # later ones under higher request ids
        assert single.output_token_ids == request.output_token_ids


@pytest.mark.parametrize("make", [lambda: TableRunner(limits()), fake_runner], ids=["table", "graphs"])
def test_backends_are_exchanged_without_another_change(make: object) -> None:
    """BND-01, LAB-02, LAB-03: ids in, scores out, and the sizes; the engine is the same."""
    runner = make()  # type: ignore[operator]
    for name, member in inspect.getmembers(model_runner.StepRunner, inspect.isfunction):
        if not name.startswith("_"):
            own = inspect.signature(getattr(runner, name)).parameters
            assert list(own) == list(inspect.signature(member).parameters)[1:], name
    (request,) = run(Engine(runner), ([3, 4], sampled(5, 1)))
    assert len(request.output_token_ids) == 5


def test_samplers_are_exchanged_without_another_change() -> None:
    """BND-01: both have the interface's parameters and no other."""
    wanted = list(inspect.signature(Sampler.sample).parameters.values())[1:]
    for one in BOTH:
        own = inspect.signature(one.sample).parameters
        assert list(own) == [parameter.name for parameter in wanted]


def test_loop_and_samplers_name_no_model() -> None:
    """LAB-03."""
    for name in ("engine", "scheduler", "sampler", "sampler_reference", "sampling_state", "table_runner"):
        text = (ROOT / "runtime" / f"{name}.py").read_text("utf-8").lower()
        assert "deepseek" not in text and "engram" not in text, name


def test_positions_processed_are_counted_once_each_and_padding_is_not() -> None:
    """LAB-15, LAB-16: 17 prompt tokens and 32 made with a cache are 48 positions, not 1,040."""
    engine = Engine(TableRunner(limits(decode_buckets=(4,))))
    run(engine, ([3] * 17, sampled(32, 1)))
    assert engine.counts["prefill_rows"] + engine.counts["decode_rows"] == 17 + 32 - 1
    naive = sum(17 + made for made in range(32))
    assert naive == 1040
    three = Engine(TableRunner(limits(decode_buckets=(4,))))
    run(three, *[([3], sampled(2, 1))] * 3)
    assert (three.counts["prefill_rows"], three.counts["decode_rows"]) == (3, 3)


@both_samplers
def test_more_log_probabilities_than_tokens_are_all_there_are(one: Sampler) -> None:
    assert len(logprobs_of(one, [1.0, 0.0, 0.5], top_k=0)) == 3
    params = SamplingParams(logprobs=20, logprobs_mode="raw")
    (entries,) = one.sample(torch.tensor([[1.0, 0.0, 0.5]]), [params], [1], [1]).logprobs
    assert entries is not None and len(entries) == 3
    with pytest.raises(RequestError, match="logprobs"):
        SamplingParams(logprobs=21)


def test_min_tokens_counts_made_tokens_alone_and_bans_no_other_id() -> None:
    """A model that wants its end at once, and one that wants the last id of the vocabulary."""
    prompt, wishes = [3] * 10, {EOS: 50.0}
    params = SamplingParams(max_tokens=14, min_tokens=10, temperature=0, logit_bias=wishes)
    (request,) = run(Engine(TableRunner(limits())), (prompt, params))
    assert len(request.output_token_ids) == 11 and request.output_token_ids[10] == EOS
    assert EOS not in request.output_token_ids[:10] and request.finish_reason == "stop"
    for ignore_eos in (False, True):
        params = SamplingParams(
            max_tokens=6, min_tokens=3, temperature=0, logit_bias={15: 50.0}, ignore_eos=ignore_eos
        )
        (request,) = run(Engine(TableRunner(limits())), (prompt, params))
        assert request.output_token_ids == [15] * 6


def test_order_of_requests_with_and_without_penalties_changes_nothing() -> None:
    one = ([3, 4, 5], SamplingParams(max_tokens=9, temperature=0, repetition_penalty=2.0, ignore_eos=True))
    two = ([6, 7], sampled(9, seed=3, top_k=1))
    first = run(Engine(TableRunner(limits())), one, two)
    second = run(Engine(TableRunner(limits())), two, one)[::-1]
    assert [a.output_token_ids for a in first] == [b.output_token_ids for b in second]


SCORED = [
    {"top_p": 0.7},
    {"temperature": 0.0},
    {"temperature": 0.6, "top_k": 9, "min_p": 0.01},
    {"logprobs_mode": "raw", "temperature": 1.7},
]


@pytest.mark.parametrize("options", SCORED, ids=str)
def test_a_token_has_the_same_log_probability_drawn_forced_or_in_a_prompt(options: dict) -> None:
    """To the last bit: a text that is scored again, or followed with another seed, shows no difference."""
    vocab = 16 if options == SCORED[0] else 300
    wide = dataclasses.replace(fake_limits(vocab_size=vocab), image_token_id=None)
    drawn = []
    for seed in range(4):
        (request,) = run(Engine(TableRunner(wide)), ([3, 4, 5], sampled(20, seed, logprobs=3, **options)))
        tokens = request.output_token_ids
        forced = sampled(20, seed + 100, logprobs=3, golden_token_ids=tokens, **options)
        (followed,) = run(Engine(TableRunner(wide)), ([3, 4, 5], forced))
        assert followed.output_token_ids == tokens and followed.logprobs == request.logprobs
        asked = SamplingParams(max_tokens=1, prompt_logprobs=3, **options)
        (scored,) = run(Engine(TableRunner(wide)), ([3, 4, 5, *tokens], asked))
        assert scored.prompt_logprobs[3:] == request.logprobs
        drawn += tokens
    assert len(set(drawn)) > 5


def test_forced_token_is_scored_after_penalties_and_bias() -> None:
    """Nothing that the request asks for is left out; a token that is not allowed has the lowest value."""
    options = {"repetition_penalty": 1.7, "presence_penalty": 0.3, "logit_bias": {5: 1.25}, "logprobs": 4}
    for allowed in (None, [5, 6, 7, 8]):
        own = sampled(12, 3, allowed_token_ids=allowed, **options)
        (request,) = run(Engine(TableRunner(limits())), ([3, 4, 5], own))
        golden = [*request.output_token_ids[:11], 9]
        (followed,) = run(
            Engine(TableRunner(limits())),
            ([3, 4, 5], sampled(12, 4, allowed_token_ids=allowed, golden_token_ids=golden, **options)),
        )
        assert followed.logprobs[:11] == request.logprobs[:11]
        value = followed.logprobs[11][9].logprob
        assert (value < -1e38) is (allowed is not None)
