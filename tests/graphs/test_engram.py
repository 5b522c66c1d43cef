"""N-gram hashes and gates against published vectors and the golden model (spec 9.4-9.6, 18.2, 18.3, 18.8)."""

import math

import numpy as np
import pytest
import torch
from golden import rms_ratio
from graph_steps import (
    Chunk,
    Request,
    bf16_ulps,
    decode_inputs,
    ragged_inputs,
    random_tokens,
    step_context,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from model_dirs import release_config

from deepinfer.graphs.config import parse_config
from deepinfer.graphs.context import Scope
from deepinfer.graphs.engram import engram, hash_tokens
from deepinfer.graphs.engram_tables import bucket_primes, multipliers
from deepinfer.kernels.engram_gate import memory_gate
from deepinfer.kernels.engram_ids import hash_tokens as hash_contexts

# table rows of the last of the compressed ids 5, 17, 99091, 5 in the released model
RELEASE_HASHES = {
    1: "12391924 30601786 32347082 62848667 70397898 94727027 98981383 125214817 137477310 158283928 "
    "170183372 186738561 199160461 222179456 233717225 248862157 264715494 276499540 299365124 311000014 "
    "329498392 341357834 360928159 374153547",
    14: "743092 18408009 41668928 49698968 70671423 85309510 103753309 124352426 133323207 152679242 "
    "173382312 184399208 195980780 215496953 228729201 251781413 261281483 273686983 301155862 306177099 "
    "331534523 343375720 355326914 369472407",
}
TINY_TOKENS = [10, 11, 12, 500, 7, 8, 9, 10]  # 500 stands inside an image
TINY_HASHES = {
    1: [
        [80, 177, 300, 390, 486, 644],
        [53, 183, 276, 401, 422, 533],
        [20, 199, 253, 369, 474, 566],
        [69, 132, 238, 396, 428, 621],
        [47, 188, 254, 323, 532, 614],
        [53, 146, 290, 366, 421, 580],
        [74, 122, 274, 390, 528, 537],
        [26, 190, 255, 328, 528, 640],
    ],
    3: [
        [117, 156, 346, 417, 681, 858],
        [88, 223, 385, 496, 625, 727],
        [59, 144, 397, 486, 584, 849],
        [35, 167, 376, 530, 644, 748],
        [102, 180, 302, 541, 648, 838],
        [68, 259, 279, 519, 561, 804],
        [9, 138, 293, 412, 642, 823],
        [113, 214, 357, 436, 579, 786],
    ],
}


def contexts(tokens: list[int], dead: list[bool]) -> tuple[torch.Tensor, torch.Tensor]:
    """Compressed ids of every position and its three predecessors, own first, and which are alive."""
    rows = range(len(tokens))
    ids = [[tokens[max(row - back, 0)] >> 1 for back in range(4)] for row in rows]
    alive = [[row >= back and not dead[row - back] for back in range(4)] for row in rows]
    return torch.tensor(ids), torch.tensor(alive)


def hash_ids(context: torch.Tensor, alive: torch.Tensor, pad: int, tables: Scope) -> torch.Tensor:
    """Table rows of contexts in which, from the first dead token on, all count as `pad` (9.4)."""
    context = torch.where(alive.long().cumprod(1).bool(), context, pad)
    return hash_contexts(
        context, tables["engram.multipliers"], tables["engram.primes"], tables["engram.offsets"]
    )


@pytest.mark.parametrize("index", [0, 1])
def test_hashes_of_the_release(index):
    config = parse_config(release_config())
    layer = config.engram_layer_ids[index]
    primes = bucket_primes(config)[index]
    prefix = f"layers.{layer}.engram."
    tables = {
        f"{prefix}multipliers": torch.from_numpy(multipliers(layer, 4, 99092)),
        f"{prefix}primes": torch.from_numpy(primes),
        f"{prefix}offsets": torch.from_numpy(np.concatenate(([0], np.cumsum(primes)[:-1]))),
    }
    alive = torch.ones(1, 4, dtype=torch.bool)
    ids = hash_ids(torch.tensor([[5, 99091, 17, 5]]), alive, 2, Scope(tables, layer))
    assert ids[0].tolist() == [int(word) for word in RELEASE_HASHES[layer].split()]


@pytest.mark.parametrize("layer", [1, 3])
def test_hashes_of_the_tiny_model_with_a_dead_token(weights, layer):
    """From the first dead token back, all count as padding; position 3 is dead itself."""
    context, alive = contexts(TINY_TOKENS, [token == 500 for token in TINY_TOKENS])
    ids = hash_ids(context, alive, 1, Scope(weights, layer))
    assert ids.tolist() == TINY_HASHES[layer]


@pytest.mark.parametrize("layer", [1, 3])
def test_hashes_around_images_agree_with_the_reference(golden, weights, layer):
    entry = golden.cases["vl40"]
    context, alive = contexts(entry["tokens"], [bool(image) for image in entry["image_mask"]])
    ids = hash_ids(context, alive, 1, Scope(weights, layer))
    expected = golden["intermediates"][f"vl40.L{layer}.engram_hash_ids"].long()
    assert torch.equal(ids, expected)


def test_what_lies_behind_a_dead_token_does_not_matter(weights):
    scope = Scope(weights, 1)
    alive = torch.tensor([[True, False, True, True]])
    first = hash_ids(torch.tensor([[9, 4, 200, 7]]), alive, 1, scope)
    assert torch.equal(first, hash_ids(torch.tensor([[9, 100, 3, 250]]), alive, 1, scope))
    assert not torch.equal(first, hash_ids(torch.tensor([[8, 4, 200, 7]]), alive, 1, scope))


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 255), min_size=4, max_size=4),
    length=st.integers(1, 4),
    layer=st.sampled_from([1, 3]),
)
def test_hashes_equal_their_definition_in_plain_integers(weights, tokens, length, layer):
    scope, pad = Scope(weights, layer), 1
    names = ("multipliers", "primes", "offsets")
    factors, primes, offsets = (scope[f"engram.{name}"].tolist() for name in names)
    used = tokens[:length] + [pad] * (4 - length)
    expected, mixed = [], used[0] * factors[0]
    for size in range(1, 4):
        mixed ^= used[size] * factors[size]
        for head in range(2):
            column = (size - 1) * 2 + head
            expected.append(mixed % primes[column] + offsets[column])
    alive = torch.tensor([[back < length for back in range(4)]])
    assert hash_ids(torch.tensor([tokens]), alive, pad, scope)[0].tolist() == expected


@pytest.mark.parametrize(
    ("dot", "gate"),
    [(0.25, 0.62245933), (-0.25, 0.37754067), (0.0, 0.50025), (-1e-30, 0.49975), (4.0, 0.88079708)],
)
def test_gates_of_the_published_vector(dot, gate):
    """The norms of rows of ones are one, so the weights alone set the product (9.6).

    A sum never is -0 unless all its terms are and it starts from one: the smallest negatives stand for it.
    """
    ones = torch.ones(1, 2, 16)
    result = memory_gate(ones, ones, torch.full((2, 16), dot / 4), 1e-20)
    assert result.tolist() == [pytest.approx([gate, gate], abs=1e-7)]


def test_norms_of_the_gate_are_per_stream():
    """A stream a thousand times larger than its neighbour leaves the neighbour's gate alone."""
    residual = torch.ones(1, 2, 16)
    residual[0, 1] *= 1000
    gates = memory_gate(residual, torch.ones(1, 2, 16), torch.full((2, 16), 0.25), 1e-20)
    expected = 1 / (1 + math.exp(-1))
    assert gates[0].tolist() == pytest.approx([expected, expected], rel=1e-6)


def test_zero_streams_and_zero_memory_give_a_finite_gate():
    zeros, ones = torch.zeros(1, 4, 16), torch.ones(1, 4, 16)
    for residual, key in ((zeros, ones), (ones, zeros), (zeros, zeros)):
        gate = memory_gate(residual, key, torch.ones(4, 16), 1e-20)
        assert torch.allclose(gate, torch.tensor(0.50025), atol=1e-6)


@pytest.mark.parametrize("layer", [1, 3])
def test_injection_agrees_with_the_reference_around_images(golden, new_model, layer):
    """Text rows of an image prompt, with the reference's streams and hashes (9.5, 9.6)."""
    stored, entry = golden["intermediates"], golden.cases["vl40"]
    text = ~torch.tensor(entry["image_mask"], dtype=torch.bool)
    model = new_model(max_model_len=128)
    inputs = ragged_inputs([Chunk(Request(entry["tokens"]), 0, 40)], model.layout)
    context = step_context(model, inputs)
    context.engram_ids[layer] = stored[f"vl40.L{layer}.engram_hash_ids"].long()
    before, after = stored[f"vl40.L{layer}.R_pre_engram"], stored[f"vl40.L{layer}.R_in"]
    residual = engram(context, layer, before)
    assert bf16_ulps(residual, after)[text].float().ne(0).float().mean() <= 1e-3
    assert rms_ratio(residual[text], after[text]) <= 2e-3
    assert not torch.equal(before[text], after[text])
    assert torch.equal(before[~text], after[~text])


class Hasher:
    """Feeds a request's tokens to the hashing alone, in chunks, and keeps all rows of ids."""

    def __init__(self, model, tokens: list[int]) -> None:
        self.model, self.request, self.rows = model, Request(tokens), []

    def feed(self, start: int, count: int, phase: str = "prefill") -> None:
        make = decode_inputs if phase == "decode" else ragged_inputs
        inputs = make([Chunk(self.request, start, count)], self.model.layout)
        context = step_context(self.model, inputs)
        hash_tokens(context)
        self.rows.append(torch.cat([context.engram_ids[layer] for layer in (1, 3)], dim=1))

    def ids(self) -> torch.Tensor:
        return torch.cat(self.rows)


def test_every_split_gives_the_same_hashes(new_model, golden):
    """Two pieces at every boundary, token by token in both phases, and against the reference (9.4)."""
    tokens = golden.tokens("n40")
    stored = golden["intermediates"]
    expected = torch.cat([stored[f"L{layer}.engram_hash_ids"].long() for layer in (1, 3)], dim=1)
    model = new_model(max_model_len=128)
    plans = [[40]] + [[cut, 40 - cut] for cut in range(1, 40)] + [[1] * 40]
    for plan in plans:
        hasher, start = Hasher(model, tokens), 0
        for count in plan:
            hasher.feed(start, count)
            start += count
        assert torch.equal(hasher.ids(), expected), plan
    hasher = Hasher(model, tokens)
    for position in range(40):
        hasher.feed(position, 1, "decode")
    assert torch.equal(hasher.ids(), expected)


def test_a_whole_step_hashes_as_the_hashing_alone(new_model):
    """Through the model's tap, across a chunk boundary right after the first token."""
    tokens, seen = random_tokens(9, seed=4), []
    model = new_model(max_model_len=128)

    def tap(layer: int, name: str, value: torch.Tensor) -> torch.Tensor:
        if name == "engram_hash_ids":
            seen.append((layer, value))
        return value

    for start, count in ((0, 1), (1, 8)):
        model.step("prefill", ragged_inputs([Chunk(Request(tokens), start, count)], model.layout), tap)
    assert [layer for layer, _ in seen] == [1, 3, 1, 3]
    hasher = Hasher(new_model(max_model_len=128), tokens)
    hasher.feed(0, 9)
    first, second = torch.cat((seen[0][1][:1], seen[2][1][:8])), torch.cat((seen[1][1][:1], seen[3][1][:8]))
    assert torch.equal(torch.cat((first, second), dim=1), hasher.ids())


@pytest.mark.parametrize("back", range(1, 7))
def test_drafted_tokens_that_are_taken_back_leave_the_history(new_model, back):
    """The ring keeps enough accepted tokens behind up to six rejected ones (9.4, 15)."""
    tokens = random_tokens(24, seed=5)
    straight = Hasher(new_model(), tokens)
    straight.feed(0, 24)
    drafted = [*tokens[:15], *random_tokens(back, seed=6), *tokens[15 + back :]]
    hasher = Hasher(new_model(), drafted)
    hasher.feed(0, 15)
    hasher.feed(15, back)
    hasher.request, hasher.rows = Request(tokens), []
    hasher.feed(15, 1, "decode")
    hasher.feed(16, 8)
    assert torch.equal(hasher.ids(), straight.ids()[15:])


def test_a_new_request_does_not_see_the_former_owner_of_its_slot(new_model):
    tokens = random_tokens(6, seed=7)
    model = new_model()
    Hasher(model, random_tokens(30, seed=8)).feed(0, 30)
    reused, fresh = Hasher(model, tokens), Hasher(new_model(), tokens)
    for hasher in (reused, fresh):
        hasher.feed(0, 2)
        hasher.feed(2, 4)
    assert torch.equal(reused.ids(), fresh.ids())
