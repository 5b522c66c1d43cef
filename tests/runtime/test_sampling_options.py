"""Every sampling parameter against plain lists, with exact ties; rows of a batch against each row alone."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sampling_reference import choose

from deepinfer.kernels import sample as sample_op
from deepinfer.runtime import sampler
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.sampling_state import make_state

VOCAB = 20  # as many as `logprobs` can list, so that the list shows everything kept
END = (1, 4)
IDS = st.integers(0, VOCAB - 1)
# Sums, products and quotients of these are exact in float32: what is equal here is equal there.
LOGITS = st.lists(st.integers(-8, 8).map(lambda n: n / 2), min_size=VOCAB, max_size=VOCAB)
QUARTERS = st.integers(-8, 8).map(lambda n: n / 4)
OPTIONS = {
    "temperature": st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    "top_k": st.sampled_from([-1, 0, 1, 2, 5, 19, 20, 1000]),
    "top_p": st.sampled_from([0.001, 0.3, 0.55, 0.9, 1.0]),
    "min_p": st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    "repetition_penalty": st.sampled_from([0.5, 1.0, 2.0, 4.0]),
    "presence_penalty": QUARTERS,
    "frequency_penalty": QUARTERS,
    "logit_bias": st.dictionaries(IDS, QUARTERS, max_size=4),
    "allowed_token_ids": st.none() | st.lists(IDS, min_size=1, max_size=6),
    "bad_words": st.lists(st.lists(IDS, min_size=1, max_size=3), max_size=4),
    "min_tokens": st.integers(0, 4),
    "stop_token_ids": st.lists(IDS, max_size=3),
}
TOKENS = st.lists(st.integers(0, 5), max_size=4)  # few ids, so that words and counts occur


def draw_one(
    logits: list[float], params: SamplingParams, prompt: list[int], output: list[int], seed: int
) -> sampler.Sampled:
    state = make_state(params, prompt, END, len(logits))
    for count in range(len(output) + 1):  # token by token, as an engine does
        if state is not None:
            state.advance(output[:count])
    position = len(prompt) + len(output)
    return sampler.sample(torch.tensor([logits]), [params], [position], [seed], [state])


def assert_equals_lists(
    logits: list[float], params: SamplingParams, prompt: list[int], output: list[int], seed: int
) -> None:
    want = choose(logits, params, prompt, output, END, seed)
    assume(not want.close)
    got = draw_one(logits, params, prompt, output, seed)
    if want.token is None:
        assert (got.status[0], got.token_ids[0]) == (sampler.NOTHING_ALLOWED, sampler.NO_TOKEN)
        assert got.logprobs == [None]
        return
    assert (got.status[0], got.token_ids[0]) == (sampler.OK, want.token)
    (entries,) = got.logprobs
    assert entries is not None and next(iter(entries)) == want.token
    raw = params.logprobs_mode == "raw"
    order = sorted(range(VOCAB), key=lambda token: (-logits[token], token)) if raw else want.kept
    assert set(entries) == set(order[: params.logprobs]) | {want.token}
    for token, entry in entries.items():
        assert math.isfinite(entry.logprob)
        assert entry.logprob == pytest.approx(want.logprobs[token], abs=2e-5)
        assert entry.rank == order.index(token) + 1


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "stop_token_ids"])
@pytest.mark.parametrize("mode", ["processed", "raw"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_each_option_equals_plain_lists(name: str, mode: str, data: st.DataObject) -> None:
    """POL-06 by threshold, POL-07, POL-09, POL-13, ROW-10, ROW-11."""
    values = {name: data.draw(OPTIONS[name]), "temperature": data.draw(OPTIONS["temperature"])}
    params = SamplingParams(logprobs=data.draw(st.sampled_from([0, 3, 20])), logprobs_mode=mode, **values)
    prompt, output = data.draw(TOKENS.filter(len)), data.draw(TOKENS)
    assert_equals_lists(data.draw(LOGITS), params, prompt, output, data.draw(st.integers(0, 2**64 - 1)))


@settings(max_examples=150, deadline=None)
@given(st.fixed_dictionaries({}, optional=OPTIONS), LOGITS, TOKENS.filter(len), TOKENS, st.integers(0, 9))
def test_options_together_apply_in_the_declared_order(
    options: dict, logits: list, prompt: list, output: list, seed: int
) -> None:
    """POL-12, POL-17."""
    assert_equals_lists(logits, SamplingParams(logprobs=20, **options), prompt, output, seed)


ROW = st.tuples(
    st.fixed_dictionaries(
        {},
        optional=OPTIONS
        | {"logprobs": st.integers(0, 20), "logprobs_mode": st.sampled_from(["processed", "raw"])},
    ),
    LOGITS,
    TOKENS.filter(len),
    TOKENS,
    st.integers(0, 2**64 - 1),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(ROW, min_size=2, max_size=7))
def test_row_of_a_mixed_batch_equals_the_row_alone_by_bytes(rows: list) -> None:
    params = [SamplingParams(**options) for options, *_ in rows]
    alone = [draw_one(row[1], own, *row[2:]) for own, row in zip(params, rows, strict=True)]
    states = []
    for own, (_, _, prompt, output, _) in zip(params, rows, strict=True):
        states.append(make_state(own, prompt, END, VOCAB))
        if states[-1] is not None:
            states[-1].advance(output)
    together = sampler.sample(
        torch.tensor([row[1] for row in rows]),
        params,
        [len(row[2]) + len(row[3]) for row in rows],
        [row[4] for row in rows],
        states,
    )
    for index, single in enumerate(alone):
        assert (together.token_ids[index], together.status[index]) == (single.token_ids[0], single.status[0])
        assert (together.logprobs or [None] * len(rows))[index] == (single.logprobs or [None])[0]


def test_plain_rows_reach_the_operation_with_nothing_but_a_temperature(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    spy = SimpleNamespace(native=lambda *arguments: calls.append(arguments) or sample_op.native(*arguments))
    monkeypatch.setattr(sampler, "sample_op", spy)
    params = [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=0, stop_token_ids=[3], ignore_eos=True),
    ]
    sampler.sample(torch.zeros(2, 8), params, [1, 2], [3, 4])
    (arguments,) = calls
    assert [tuple(entry.shape) for entry in arguments[4:15]] == [
        *[(0,)] * 3, (0, 3), *[(0,)] * 6, (0, 0),
    ]  # fmt: skip
    assert arguments[15].shape == (0,) and arguments[16:] == (4096, -1, False)


def test_a_plain_row_is_the_same_beside_rows_with_every_option() -> None:
    rng = np.random.default_rng(3)
    logits = torch.from_numpy(rng.normal(size=(40, 5003)).astype(np.float32) * 4)
    plain = [SamplingParams(temperature=float(heat)) for heat in rng.choice([0.0, 0.6, 1.0], 40)]
    before = sampler.sample(logits, plain, range(40), range(40))
    busy = SamplingParams(
        top_k=9, top_p=0.5, min_p=0.1, repetition_penalty=1.3, presence_penalty=1, logit_bias={7: 5},
        allowed_token_ids=range(100), bad_words=[[8]], min_tokens=2, logprobs=4,
    )  # fmt: skip
    mixed = [busy if row % 3 == 1 else own for row, own in enumerate(plain)]
    states = [make_state(own, [5, 6], END, 5003) for own in mixed]
    after = sampler.sample(logits, mixed, range(40), range(40), states)
    for row in range(40):
        assert row % 3 == 1 or after.token_ids[row] == before.token_ids[row]


def test_tied_logits_at_the_edge_of_top_k_all_stay() -> None:
    """POL-06, where the decision is by threshold."""
    params = SamplingParams(top_k=2, logprobs=20)
    (entries,) = draw_one([1.0, 1.0, 1.0, 0.0], params, [0], [], 5).logprobs
    assert set(entries) == {0, 1, 2}


def test_kept_probabilities_sum_to_one() -> None:
    """POL-08, POL-09: p = .5, .3, .2 at top_p .6 keeps the first two, .625 and .375."""
    params = SamplingParams(top_p=0.6, logprobs=20)
    (entries,) = draw_one([math.log(p) for p in (0.2, 0.5, 0.3)], params, [0], [], 5).logprobs
    assert {token: math.exp(entry.logprob) for token, entry in entries.items()} == pytest.approx(
        {1: 0.625, 2: 0.375}, abs=1e-6
    )


def test_allowed_ids_are_the_support() -> None:
    """POL-14: outside exactly nothing, inside probabilities sum to 1."""
    params = SamplingParams(allowed_token_ids=[7, 4], logprobs=20)
    (entries,) = draw_one([float(n) for n in range(VOCAB)], params, [0], [], 5).logprobs
    assert set(entries) == {4, 7}
    assert sum(math.exp(entry.logprob) for entry in entries.values()) == pytest.approx(1, abs=1e-6)


def test_logprobs_are_finite_where_logits_are_not() -> None:
    logits = [3e38, -3e38, -math.inf, 0.0, 3e38]
    for options in ({}, {"logprobs_mode": "raw"}, {"temperature": 0}, {"temperature": 1e-5}):
        (entries,) = draw_one(logits, SamplingParams(logprobs=5, **options), [0], [], 5).logprobs
        assert {0, 4} <= set(entries) and 2 not in entries
        assert all(math.isfinite(entry.logprob) for entry in entries.values())
    only = SamplingParams(logprobs=0, logprobs_mode="raw", allowed_token_ids=[1])
    (entries,) = draw_one(logits, only, [0], [], 5).logprobs
    assert entries[1].rank == 4 and math.isfinite(entries[1].logprob)


def test_a_row_without_an_allowed_token_leaves_the_others_alone() -> None:
    """POL-15."""
    params = [
        SamplingParams(seed=1),
        SamplingParams(allowed_token_ids=[2], bad_words=[[2]]),
        SamplingParams(seed=2),
    ]
    states = [make_state(own, [3], END, VOCAB) for own in params]
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2))
    result = sampler.sample(logits, params, [1, 1, 1], [1, 1, 2], states)
    plain = sampler.sample(logits, [SamplingParams()] * 3, [1, 1, 1], [1, 1, 2])
    assert result.status == [sampler.OK, sampler.NOTHING_ALLOWED, sampler.OK]
    assert result.token_ids[::2] == plain.token_ids[::2]
