"""Two samplers behind one interface, held together draw by draw on logits full of exact ties.

On continuous logits a wrong order of equal ones would pass unseen, so every configuration counts the rows
whose edge falls among equal logits, and twins that break ties otherwise must be noticed.
"""

import math
import operator
from collections.abc import Callable

import numpy as np
import pytest
import torch
from fake_graphs import fake_runner
from torch.utils._python_dispatch import TorchDispatchMode

from deepinfer.kernels import sampling
from deepinfer.runtime import sampler, sampler_interface, sampler_reference
from deepinfer.runtime.engine import Engine
from deepinfer.runtime.sampler import CompiledSampler
from deepinfer.runtime.sampler_interface import Sampled, Sampler
from deepinfer.runtime.sampler_reference import ReferenceSampler, by_logit
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.sampling_state import SamplingState, make_state

DRAWS = 640
VOCAB = 50
END = (1,)
# exp, log: correctly rounded in the reference, within 2 units in the compiled one; sums of 50 such terms.
MARGIN = 4e-6

CONFIGURATIONS: dict[str, Callable[[np.random.Generator], dict]] = {
    "greedy": lambda rng: {"temperature": 0},
    "temperature": lambda rng: {"temperature": float(rng.choice([0.3, 0.8, 1.0, 2.5]))},
    "top_k": lambda rng: {"temperature": 0.8, "top_k": int(rng.integers(1, 30))},
    "top_p and min_p": lambda rng: {
        "top_p": float(rng.choice([0.2, 0.5, 0.8, 0.95])),
        "min_p": float(rng.choice([0.0, 0.02, 0.3, 1.0])),
    },
    "everything": lambda rng: {
        "temperature": float(rng.choice([0.0, 0.5, 1.0])),
        "top_k": int(rng.choice([0, 5, 20])),
        "top_p": float(rng.choice([0.6, 0.9, 1.0])),
        "min_p": float(rng.choice([0.0, 0.05])),
        "repetition_penalty": 2.0,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "logit_bias": {int(token): float(rng.integers(-4, 4)) / 2 for token in rng.integers(0, VOCAB, 3)},
        "bad_words": [[int(rng.integers(0, VOCAB))]],
        "min_tokens": 5,
        "allowed_token_ids": range(0, VOCAB, int(rng.integers(1, 3))),
        "logprobs_mode": str(rng.choice(["processed", "raw"])),
    },
}


def tied_logits(rng: np.random.Generator, rows: int, vocab: int = VOCAB) -> torch.Tensor:
    """Halves: a dozen levels, so that each is shared, and sums of bias and penalties stay exact."""
    return torch.from_numpy((np.round(rng.normal(size=(rows, vocab)) * 3) / 2).astype(np.float32))


def states_of(params: list[SamplingParams], rng: np.random.Generator) -> list[SamplingState | None]:
    states = [make_state(own, rng.integers(0, VOCAB, 8).tolist(), END, VOCAB) for own in params]
    for state in states:
        if state is not None:
            state.advance(rng.integers(0, VOCAB, int(rng.integers(0, 8))).tolist())
    return states


def mismatches(one: Sampled, two: Sampled) -> int:
    return sum(map(operator.ne, zip(*one[:2], strict=True), zip(*two[:2], strict=True)))


def assert_same_logprobs(one: Sampled, two: Sampled) -> None:
    for ours, theirs in zip(one.logprobs, two.logprobs, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is None or theirs is None:
            continue
        assert list(ours) == list(theirs)
        for token, entry in ours.items():
            assert entry.rank == theirs[token].rank
            assert entry.logprob == pytest.approx(theirs[token].logprob, rel=MARGIN, abs=MARGIN)


def edges_among_equals(logits: torch.Tensor, params: list[SamplingParams]) -> int:
    """Rows in which the k-th largest logit has an equal that comes after it."""
    values = logits.sort(dim=1, descending=True).values
    return sum(
        bool(values[row, k - 1] == values[row, k])
        for row, own in enumerate(params)
        if 0 < (k := own.top_k or (1 if own.greedy else 0)) < VOCAB
    )


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_both_samplers_give_the_same_tokens_status_and_logprobs(name: str) -> None:
    """POL-17, LAB-10, LAB-11, LAB-12: five configurations, 3,200 draws, no mismatch."""
    rng = np.random.default_rng([7, len(name)])
    logits = tied_logits(rng, DRAWS)
    logits[::101, 3] = float("nan")
    logits[5::101] = -math.inf
    logits[9::101, 7] = math.inf
    params = [
        SamplingParams(logprobs=int(rng.integers(0, 21)), **CONFIGURATIONS[name](rng)) for _ in range(DRAWS)
    ]
    states = states_of(params, rng)
    positions = rng.integers(1, 1 << 20, DRAWS).tolist()
    seeds = rng.integers(0, 2**64, DRAWS, dtype=np.uint64).tolist()
    ours = CompiledSampler().sample(logits, params, positions, seeds, states)
    theirs = ReferenceSampler().sample(logits, params, positions, seeds, states)
    assert mismatches(ours, theirs) == 0
    assert_same_logprobs(ours, theirs)
    assert set(ours.status) == {sampler.OK, sampler.NOT_A_NUMBER, sampler.NOTHING_ALLOWED}
    if name in ("greedy", "top_k", "everything"):
        assert edges_among_equals(logits, params) > 60


def test_ties_at_the_forced_top_k_go_to_the_lower_ids_in_both() -> None:
    rng = np.random.default_rng(3)
    params = [SamplingParams(temperature=3.0, logprobs=3)] * 200
    logits = tied_logits(rng, 200)
    for forced in (1, 7, 49):
        ours = CompiledSampler(forced).sample(logits, params, range(200), range(200))
        theirs = ReferenceSampler(forced).sample(logits, params, range(200), range(200))
        assert mismatches(ours, theirs) == 0
        assert_same_logprobs(ours, theirs)
        for row, token in enumerate(theirs.token_ids):
            assert token in by_logit(logits[row].tolist())[:forced]


def test_rows_wider_than_the_forced_top_k_agree() -> None:
    rng = np.random.default_rng(4)
    logits = tied_logits(rng, 12, vocab=4500) / 4
    params = [SamplingParams(top_p=float(top_p), logprobs=2) for top_p in (1.0, 0.9, 0.5) * 4]
    ours = CompiledSampler().sample(logits, params, range(12), range(12))
    theirs = ReferenceSampler().sample(logits, params, range(12), range(12))
    assert mismatches(ours, theirs) == 0
    assert_same_logprobs(ours, theirs)


class HigherIdsFirst(ReferenceSampler):
    """A twin that sorts equal logits the other way round."""

    def sample(self, logits, params, positions, seeds, states=()) -> Sampled:  # noqa: ANN001
        flipped = super().sample(logits.flip(1), params, positions, seeds, states)
        return flipped._replace(token_ids=[logits.shape[1] - 1 - token for token in flipped.token_ids])


@pytest.mark.parametrize(("name", "least"), [("greedy", 100), ("top_k", 300)])
def test_another_order_of_equal_logits_is_noticed(name: str, least: int) -> None:
    """Without ties neither twin would be: greedy differs only where two logits are equal."""
    rng = np.random.default_rng(5)
    params = [SamplingParams(**CONFIGURATIONS[name](rng)) for _ in range(DRAWS)]
    tied = tied_logits(rng, DRAWS)
    smooth = torch.from_numpy(rng.normal(size=(DRAWS, VOCAB)).astype(np.float32))
    found = {}
    for kind, logits in (("tied", tied), ("smooth", smooth)):
        ours = CompiledSampler().sample(logits, params, range(DRAWS), range(DRAWS))
        twin = HigherIdsFirst().sample(logits, params, range(DRAWS), range(DRAWS))
        found[kind] = mismatches(ours, twin)
    assert found["tied"] > least
    assert name != "greedy" or found["smooth"] == 0


def test_both_invert_the_running_sum_at_the_same_words() -> None:
    """RNG-09: at each edge between two tokens the words on either side give the tokens on either side."""
    logits = [0.5, -1.0, 0.5, 2.0, 0.0]
    found = sampler_reference.distribution(logits, by_logit(logits), SamplingParams())
    masses, total = np.array(found.masses, np.uint64), sum(found.masses)
    for token, edge in enumerate(np.cumsum(found.masses).tolist()[:-1]):
        word = -((-edge << 32) // total)  # the smallest whose target reaches the edge
        for near, expected in ((word - 1, token), (word, token + 1)):
            assert sampler_reference.drawn(found, near) == sampling.draw(masses, near) == expected
    assert sampler_reference.drawn(found, 2**32 - 1) == 4


def test_the_reference_has_the_words_of_the_operation() -> None:
    """RNG-09, and the vectors of the generator by way of a second implementation."""
    rng = np.random.default_rng(6)
    for _ in range(200):
        seed, stream = int(rng.integers(0, 2**64, dtype=np.uint64)), int(rng.integers(0, 2**40))
        expected = sampling.philox.random_word(seed, stream)
        assert sampler_reference.random_word(seed, stream) == expected
    assert sampler_reference.random_word(1, 49_167) == 0xEB5FC5C1


@pytest.mark.parametrize("kind", [CompiledSampler, ReferenceSampler])
def test_status_codes_and_names_are_those_of_the_operation(kind: Callable[[], Sampler]) -> None:
    assert (sampler_interface.OK, sampler_interface.NOT_A_NUMBER, sampler_interface.NOTHING_ALLOWED) == (
        sampling.OK,
        sampling.NOT_A_NUMBER,
        sampling.NOTHING_ALLOWED,
    )
    assert sampler_interface.NO_TOKEN == sampling.NO_TOKEN
    assert sampler_reference.FORCED_TOP_K == sampling.FORCED_TOP_K
    assert kind().name in ("compiled", "reference")
    empty = kind().sample(torch.empty(0, 8), [], [], [])
    assert (empty.token_ids, empty.status, empty.logprobs) == ([], [], ())


def test_engine_gives_the_same_answers_with_either_sampler() -> None:
    """LAB-10, end to end: 32 tokens at temperature 0.8, top-k 40, top-p 0.9."""
    answers = []
    for kind in (CompiledSampler(), ReferenceSampler()):
        engine = Engine(fake_runner(), sampler=kind)
        params = SamplingParams(
            max_tokens=32, temperature=0.8, top_k=40, top_p=0.9, seed=11, ignore_eos=True, logprobs=2
        )
        requests = [engine.add_request([3, 4 + n], params) for n in range(4)]
        while engine.has_work:
            engine.step()
        answers.append([request.output_token_ids for request in requests])
        assert all(len(request.logprobs) == 32 for request in requests)
    assert answers[0] == answers[1] and len(answers[0][0]) == 32


def test_what_is_kept_between_calls_never_shows() -> None:
    """One sampler for many batches gives what a fresh one gives for each, in any order of batches."""
    rng = np.random.default_rng(8)
    kept = CompiledSampler()
    pool = [
        SamplingParams(logprobs=count, **make(rng))
        for make in CONFIGURATIONS.values()
        for count in (None, None, 0, 3)
    ]
    for _ in range(60):
        rows = int(rng.integers(1, 9))
        params = [pool[int(index)] for index in rng.integers(0, len(pool), rows)]
        for step in range(int(rng.integers(1, 4))):
            states = states_of(params, rng)
            logits = tied_logits(rng, rows)
            seeds = rng.integers(0, 2**64, rows, dtype=np.uint64).tolist()
            call = (logits, params, [5 + step] * rows, seeds, states)
            ours, fresh = kept.sample(*call), CompiledSampler().sample(*call)
            assert ours == fresh


class Recorded(TorchDispatchMode):
    """Names of the tensor operations that run within the block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_between_logits_and_tokens_there_is_one_tensor_operation(name: str) -> None:
    """From the second step of the same requests on; what is prepared once per batch is not counted."""
    rng = np.random.default_rng(10)
    params = [SamplingParams(**CONFIGURATIONS[name](rng)) for _ in range(6)]
    logits, states = tied_logits(rng, 6), states_of(params, rng)
    one = CompiledSampler()
    one.sample(logits, params, range(6), range(6), states)
    with Recorded() as recorded:
        one.sample(logits, params, range(1, 7), range(6), states)
    shares_memory = {"aten.lift_fresh.default", "aten.detach.default"}  # torch.from_numpy, Tensor.numpy
    assert [each for each in recorded.names if each not in shares_memory] == ["deepinfer.sample.default"]


def test_states_that_move_on_between_calls_are_seen() -> None:
    """The same parameters and state objects, whose bans and counts change from step to step."""
    params = [
        SamplingParams(min_tokens=2, bad_words=[[7, 8]], repetition_penalty=2.0, temperature=0, logprobs=4),
        SamplingParams(logit_bias={3: 50.0}, temperature=0),
        SamplingParams(temperature=0),
    ]
    states = [make_state(own, [4, 5], END, VOCAB) for own in params]
    kept = CompiledSampler()
    logits = tied_logits(np.random.default_rng(9), 3)
    logits[0, [1, 7, 8]] = torch.tensor([30.0, 40.0, 60.0])
    output: list[int] = []
    for _ in range(6):
        for state in states:
            if state is not None:
                state.advance(output)
        call = (logits, params, [2 + len(output)] * 3, [0] * 3, states)
        ours, theirs = kept.sample(*call), ReferenceSampler().sample(*call)
        assert mismatches(ours, theirs) == 0
        assert_same_logprobs(ours, theirs)
        output.append(ours.token_ids[0])
    # 60, 40 and 30, each halved once it was made; 8 is banned after 7, and the end token 1 for two steps.
    assert output == [8, 7, 1, 8, 8, 8]
