"""Hashes of n-grams: golden tables, plain Python integers, chunks against single steps, refusals."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from routes import ROUTES

from deepinfer.errors import UsageError
from deepinfer.graphs.engram_tables import multipliers
from deepinfer.kernels import engram_ids

RING = 9
PRIMES = torch.tensor([101, 103, 107, 109, 113, 127])


def run(route, *args):
    return getattr(engram_ids, route)(*args)


def golden_tables(golden_values, row):
    names = ("engram_multipliers", "engram_primes", "engram_offsets")
    return golden_values["engram_token_map"].long(), *(golden_values[name][row].long() for name in names)


def whole_prompt(tokens):
    count = len(tokens)
    return torch.arange(count), torch.zeros(count, dtype=torch.long), torch.ones(1, dtype=torch.long)


def small_tables(seed=0):
    generator = torch.Generator().manual_seed(seed)
    token_map = torch.randint(0, 50, (110,), generator=generator)
    factors = 2 * torch.randint(0, 2**55, (4,), generator=generator) + 1
    return token_map, factors, PRIMES, PRIMES.cumsum(0) - PRIMES


def hash_by_hand(tokens, position, token_map, factors, primes, offsets, pad):
    """Spec 9.4 in Python integers."""
    h, ids, heads = 0, [], len(primes) // (len(factors) - 1)
    for back in range(len(factors)):
        token = tokens[position - back] if position >= back else pad
        h ^= int(token_map[min(max(token, 0), len(token_map) - 1)]) * int(factors[back])
        if back:
            columns = range((back - 1) * heads, back * heads)
            ids += [h % int(primes[c]) + int(offsets[c]) for c in columns]
    return ids


def hash_with_dead_tokens(context, alive, pad, factors, primes, offsets):
    """Spec 9.4 in int64 tensors, one size of n-gram after another; a dead token makes all older ones pad."""
    context = torch.where(alive.long().cumprod(1).bool(), context, pad)
    heads, columns = len(primes) // (len(factors) - 1), []
    for size in range(2, len(factors) + 1):
        mixed = context[:, 0] * factors[0]
        for back in range(1, size):
            mixed = mixed ^ (context[:, back] * factors[back])
        for column in range((size - 2) * heads, (size - 1) * heads):
            columns.append(mixed % primes[column] + offsets[column])
    return torch.stack(columns, dim=1)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("row", "layer"), [(0, 1), (1, 3)])
def test_golden_layers(route, row, layer, golden_values, golden_dir):
    tokens = torch.tensor(json.loads((golden_dir / "tokens.json").read_text())["n40"]["tokens"])
    positions, line, one = whole_prompt(tokens)
    history = torch.zeros(2, 3, 1, dtype=torch.int32)
    rest = (2, positions, line, one, torch.zeros_like(one))
    got = run(route, tokens, history, *golden_tables(golden_values, row), *rest)
    assert torch.equal(got, golden_values[f"L{layer}.engram_hash_ids"].long())


@pytest.mark.parametrize("route", ROUTES)
def test_release_parameters_give_the_published_rows(route):
    """Spec 18.2: compressed ids 5, 17, 99091, 5; products close to 2^63."""
    token_map = torch.arange(99092)
    factors = torch.from_numpy(multipliers(1, 4, 99092))
    above = "57 79 81 97 121 129 133 183 189 207 211 253 277 289 307 321 339 381 393 399 403 409 447 463"
    primes = 16_000_000 + torch.tensor([int(value) for value in above.split()])
    tokens = torch.tensor([5, 17, 99091, 5])
    positions, line, one = whole_prompt(tokens)
    history = torch.zeros(2, 3, 1, dtype=torch.int64)
    rest = (2, positions, line, one, torch.zeros_like(one))
    got = run(route, tokens, history, token_map, factors, primes, primes.cumsum(0) - primes, *rest)
    wanted = "12391924 30601786 32347082 62848667 70397898 94727027 98981383 125214817 137477310 158283928"
    assert got[3, :10].tolist() == [int(value) for value in wanted.split()]
    assert got[3, -2:].tolist() == [360928159, 374153547]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_chunking_equals_python_integers(data):
    """Several requests, cut into steps anywhere, rows in the ring or in the step, padding in between."""
    requests = data.draw(st.integers(1, 3))
    seed = data.draw(st.integers(0, 99))
    rng = np.random.default_rng(seed)
    texts = [rng.integers(-3, 130, rng.integers(1, 25)).tolist() for _ in range(requests)]
    slots = rng.permutation(requests) + 1
    region = torch.zeros(requests + 1, RING + 2, 1, dtype=torch.int32)
    history = region[:, :RING]  # strided, as regions are
    done = [0] * requests
    constants = small_tables(seed)
    while any(d < len(text) for d, text in zip(done, texts, strict=True)):
        counts = [int(rng.integers(0, len(t) - d + 1)) for d, t in zip(done, texts, strict=True)]
        tokens, positions, line = [], [], []
        for r, (text, start, count) in enumerate(zip(texts, done, counts, strict=True)):
            tokens += text[start : start + count] + [77]
            positions += [*range(start, start + count), -1]
            line += [r] * (count + 1)
        step = (torch.tensor(positions), torch.tensor(line), torch.tensor(slots), torch.tensor(done))
        args = (torch.tensor(tokens), history, *constants, 3, *step)
        got = engram_ids.native(*args)
        assert torch.equal(got, engram_ids.reference(*args))
        for row, (r, p) in enumerate(zip(line, positions, strict=True)):
            want = hash_by_hand(texts[r], p, *constants, 3) if p >= 0 else [0] * len(PRIMES)
            assert got[row].tolist() == want
        for r, count in enumerate(counts):
            for p in range(done[r], done[r] + count):
                history[slots[r], p % RING] = texts[r][p]
            done[r] += count


@pytest.mark.parametrize("route", ROUTES)
def test_products_that_wrap_around_agree_with_the_definition(route):
    generator = torch.Generator().manual_seed(0)
    token_map = torch.randint(0, 2**40, (110,), generator=generator)
    factors = torch.randint(-(2**62), 2**62, (4,), generator=generator)
    offsets = PRIMES.cumsum(0) - PRIMES
    tokens = torch.randint(0, 110, (30,), generator=generator)
    positions, line, one = whole_prompt(tokens)
    rest = (3, positions, line, one, torch.zeros_like(one))
    got = run(route, tokens, torch.zeros(2, 3, 1).int(), token_map, factors, PRIMES, offsets, *rest)
    wanted = positions.unsqueeze(1) - torch.arange(4)
    context = token_map[tokens[wanted.clamp(min=0)]]
    want = hash_with_dead_tokens(context, wanted >= 0, token_map[3], factors, PRIMES, offsets)
    assert torch.equal(got, want)
    assert (got >= 0).all()


def test_wrong_arguments_are_refused():
    args = list(engram_ids.make_inputs(3, torch.float32, 0))

    def refuse(index, value, match, routes=("reference", "native")):
        changed = [*args[:index], value, *args[index + 1 :]]
        for route in routes:
            with pytest.raises(UsageError if route == "reference" else RuntimeError, match=match):
                run(route, *changed)

    refuse(1, args[1][..., 0], "engram_ids: history:? must have shape")
    refuse(1, args[1][:, :2], "engram_ids: history:? must hold at least 3 tokens, got 2")
    refuse(1, args[1].float(), "engram_ids: history")
    refuse(3, args[3][:1].contiguous(), "engram_ids: multipliers:? must have at least 2")
    refuse(3, args[3][:3].contiguous().repeat(2), "engram_ids: (primes|size of primes):? must")
    refuse(6, 110, "engram_ids: pad_token_id:? must lie in 0 .. 109, got 110")
    refuse(8, args[8][:2], "engram_ids: request_index:? must have shape")
    args[7] = torch.tensor([4, 5, 6])
    args[10] = torch.tensor([4, 5, 6])
    native = ("native",)
    refuse(4, torch.zeros(6, dtype=torch.long), "primes must be positive", native)
    refuse(8, torch.tensor([0, 3, 2]), "request_index must lie in 0 .. 2, got 3", native)
    refuse(8, torch.tensor([0, -1, 2]), "request_index must lie in 0 .. 2, got -1", native)
    refuse(9, torch.tensor([0, 4, 2]), "slot_ids must lie in 0 .. 3, got 4", native)
    refuse(10, torch.tensor([2, 5, 6]), "row 0 of position 4 cannot follow 2 rows", native)
    refuse(10, torch.tensor([-2, 5, 6]), "num_computed_tokens must not be negative", native)
