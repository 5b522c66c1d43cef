"""Pooling into compressed entries, whatever the chunks (spec 6, 18.8)."""

import itertools
import math

import pytest
import torch
from golden import rms_ratio
from graph_steps import (
    Chunk,
    Request,
    bf16_ulps,
    decode_inputs,
    differing_records,
    ragged_inputs,
    random_tokens,
    records_of,
    same_bytes,
    step_context,
)

from deepinfer.graphs.cache_layout import ROLLBACK_TOKENS
from deepinfer.graphs.compressor import write_compressed
from deepinfer.graphs.eager import single_request_inputs

PRECISIONS = ["native", "float32"]
LAYER = 1  # ratio 2
STEM = f"layers.{LAYER}.attn.compressor."


class Compressor:
    """The compressor of one layer over one request, fed chunk by chunk with inputs of its own."""

    def __init__(self, model, x: torch.Tensor, layer: int = LAYER, **weights: torch.Tensor) -> None:
        self.model, self.x, self.layer, self.weights = model, x, layer, weights
        self.request = Request([0] * len(x), slot=1, blocks=[2, 1])

    def feed(self, start: int, count: int, phase: str = "prefill") -> tuple[torch.Tensor, torch.Tensor]:
        """Return the latents and the entries that close among `count` rows from `start` on."""
        make = decode_inputs if phase == "decode" else ragged_inputs
        inputs = make([Chunk(self.request, start, count)], self.model.layout)
        seen = {}

        def tap(layer: int, name: str, value: torch.Tensor) -> torch.Tensor:
            seen[name] = value
            return value

        context = step_context(self.model, inputs, tap, **self.weights)
        write_compressed(context, self.layer, self.x[start : start + count])
        positions, ratio = torch.arange(start, start + count), self.model.config.ratio(self.layer)
        emitted = (positions + 1) % ratio == 0
        assert not seen["latent"][~emitted].any()  # rows that close no group carry none
        return seen["latent"][emitted], positions[emitted] // ratio

    def records(self, num_tokens: int) -> dict[str, torch.Tensor]:
        """Return the layer's compressed entries and open rows after `num_tokens` tokens."""
        records = records_of(self.model, self.request, num_tokens)
        names = (f"layers.{self.layer}.{region}" for region in ("compressed_kv", "open_group"))
        return {name: records[name] for name in names if name in records}


def inputs_of(config, count: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, config.hidden_size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_pool_of_the_published_vector(new_model, config):
    """Values (2, -1) under gates (0, ln 3) pool to -1/4: shares of one and three quarters (6.2, 18.8)."""
    x = torch.zeros(2, config.hidden_size)
    x[0, 0], x[1, 1] = 1, 1
    value = torch.zeros(config.head_dim, config.hidden_size)
    gate = torch.zeros(config.head_dim, config.hidden_size)
    value[:, 0], value[:, 1], gate[:, 1] = 2, -1, math.log(3)
    norm = torch.full((config.head_dim,), 0.25)
    latent, entries = Compressor(
        new_model("float32"), x, **{f"{STEM}wkv": value, f"{STEM}wgate": gate, f"{STEM}norm": norm}
    ).feed(0, 2)
    assert entries.tolist() == [0]
    assert torch.allclose(latent, torch.full_like(latent, -0.25))  # the norm of a constant row is its sign


def test_gates_weigh_each_dimension_by_itself(new_model, config):
    x = torch.zeros(2, config.hidden_size)
    x[0, 0], x[1, 1] = 1, 1
    value = torch.zeros(config.head_dim, config.hidden_size)
    value[:, 0], value[:, 1] = 1, 2
    gate = torch.zeros(config.head_dim, config.hidden_size)
    gate[0, 0], gate[1, 1], gate[2, 0] = 200, 200, -200  # must not overflow either
    weights = {f"{STEM}wkv": value, f"{STEM}wgate": gate, f"{STEM}norm": torch.ones(config.head_dim)}
    latent, _ = Compressor(new_model("float32"), x, **weights).feed(0, 2)
    assert torch.allclose(latent[0] / latent[0, 3] * 1.5, torch.tensor([1, 2, 2] + [1.5] * 61), rtol=1e-5)


def test_compressor_agrees_with_the_vendor(golden, new_model):
    """Nine rows at once leave position 8 parked; four single rows follow (6.4)."""
    stored = golden["kernels"]
    weights = {f"{STEM}{name}": stored[f"compressor.{name}"] for name in ("wkv", "wgate")}
    weights[f"{STEM}norm"] = stored["compressor.norm"].float()
    compressor = Compressor(new_model(), stored["compressor.x"], **weights)
    parts = [compressor.feed(0, 9)]
    ring = compressor.records(9)[f"layers.{LAYER}.open_group"]
    parked = torch.cat((stored["compressor.open_u_after9"], stored["compressor.open_g_after9"]))
    assert torch.allclose(ring[-1], parked, rtol=1e-5, atol=1e-5)
    parts += [compressor.feed(position, 1, "decode") for position in range(9, 13)]
    assert torch.cat([entries for _, entries in parts]).tolist() == list(range(6))
    latents = torch.cat([latent for latent, _ in parts])
    ulps = bf16_ulps(latents, stored["compressor.latents"])
    assert (ulps > 0).float().mean() <= 0.005
    assert torch.allclose(latents.float(), stored["compressor.latents"].float(), rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("layer", [1, 3, 4])
def test_golden_inputs_give_the_golden_entries(golden, new_model, layer):
    """Latents before, records after the rotation by the group's first position (6.2, 6.3)."""
    stored = golden["intermediates"]
    compressor = Compressor(new_model(), stored[f"L{layer}.attn_x"], layer)
    latents, _ = compressor.feed(0, 40)
    assert (latents != stored[f"L{layer}.latent"]).float().mean() <= 1e-3
    records = compressor.records(40)[f"layers.{layer}.compressed_kv"]
    vectors, expected = (
        compressor.model.precision.compressed_vector(records),
        stored[f"L{layer}.compressed_kv"],
    )
    assert (vectors != expected).float().mean() <= 1e-3
    assert rms_ratio(vectors, expected) <= 2e-2


@pytest.mark.parametrize("case", ["n9", "n15", "n17", "n27"])
def test_the_parked_row_agrees_with_the_reference(golden, new_model, case):
    """Odd prompts leave an open group; the noise of the layers below it is the README's tier 3."""
    tokens, stored = golden.tokens(case), golden["logits"]
    model = new_model(max_model_len=128)
    model.step("prefill", single_request_inputs(tokens, 0, torch.tensor([1]), slot=1))
    for layer, limit in ((1, 0.03), (3, 0.25)):
        ring = model.caches[f"layers.{layer}.open_group"]
        value, gate = ring[1, (len(tokens) - 1) % ring.shape[1]].chunk(2)
        assert rms_ratio(value, stored[f"{case}.L{layer}.open_u"]) <= limit
        assert rms_ratio(gate, stored[f"{case}.L{layer}.open_g"]) <= limit


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layer", [1, 4])
def test_every_split_gives_the_same_bytes(new_model, config, precision, layer):
    """All ways to cut seven rows, hence every odd and even start, and token by token in decode (6.4)."""
    model = new_model(precision, max_model_len=128)
    x = inputs_of(config, 7, model.precision.dtype)

    def run(counts, phase="prefill"):
        compressor = Compressor(new_model(precision, max_model_len=128), x, layer)
        compressor.request = Request([0] * 7, blocks=[1])
        steps = zip(itertools.accumulate(counts, initial=0), counts, strict=False)
        parts = [compressor.feed(start, count, phase) for start, count in steps]
        latents, entries = (torch.cat(part) for part in zip(*parts, strict=True))
        return {**compressor.records(7), "latents": latents, "entries": entries}

    whole = run([7])
    assert whole["entries"].tolist() == list(range(7 // config.ratio(layer)))
    for cuts in itertools.chain.from_iterable(
        itertools.combinations(range(1, 7), count) for count in range(1, 7)
    ):
        counts = [after - before for before, after in itertools.pairwise([0, *cuts, 7])]
        assert not differing_records(run(counts), whole), counts
    assert not differing_records(run([1] * 7, "decode"), whole)


def test_a_chunk_longer_than_the_ring_and_across_blocks(new_model, config):
    x = inputs_of(config, 150)
    whole, split = Compressor(new_model(), x), Compressor(new_model(), x)
    whole.feed(0, 150)
    for start, count in ((0, 9), (9, 118), (127, 1), (128, 3), (131, 19)):
        split.feed(start, count)
    assert not differing_records(split.records(150), whole.records(150))
    region = whole.model.caches[f"layers.{LAYER}.compressed_kv"]
    assert region[2].any(dim=-1).all()
    assert region[1, : (150 - 128) // 2].any(dim=-1).all()  # the request's second block is block 1
    assert not region[1, (150 - 128) // 2 :].any()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("length", [12, 13])
@pytest.mark.parametrize("back", range(1, ROLLBACK_TOKENS + 1))
def test_rows_taken_back_leave_no_trace(new_model, config, precision, length, back):
    """Rejected rows are overwritten by the accepted ones at the same positions (6.4, 15)."""
    right = inputs_of(config, length + 2, new_model(precision).precision.dtype)
    wrong = right.clone()
    wrong[length - back : length] = 7 * right[length - back : length].flip(1)
    straight = Compressor(new_model(precision), right)
    straight.feed(0, length + 2)
    for phase, count in (("prefill", back + 2), ("decode", 1)):
        compressor = Compressor(new_model(precision), wrong)
        compressor.feed(0, length)
        assert differing_records(compressor.records(length), straight.records(length))
        compressor.x = right
        for start in range(length - back, length + 2, count):
            compressor.feed(start, count, phase)
        assert not differing_records(compressor.records(length + 2), straight.records(length + 2))


@pytest.mark.parametrize("back", [1, 4, ROLLBACK_TOKENS])
def test_a_model_that_takes_tokens_back_goes_on_as_if_they_had_never_been(new_model, back):
    """Window, open groups and token history together: drafted rows are wrong, those after them right (15)."""
    tokens, start = random_tokens(34, seed=1), 29
    drafted = [*tokens[:start], *random_tokens(back, seed=2)]
    clean, model = (new_model(max_model_len=128) for _ in range(2))
    request = Request(tokens, blocks=[1])
    for each, ids in ((clean, tokens), (model, drafted)):
        each.step("prefill", ragged_inputs([Chunk(Request(ids, blocks=[1]), 0, start)], each.layout))
    model.step("prefill", ragged_inputs([Chunk(Request(drafted, blocks=[1]), start, back)], model.layout))
    for phase, first, count in (("prefill", start, 3), ("decode", start + 3, 1), ("prefill", start + 4, 1)):
        step = ragged_inputs([Chunk(request, first, count)], model.layout)
        assert torch.equal(model.step(phase, step), clean.step(phase, step))
    paged = [region.name for region in model.layout.of_kind("paged")]
    records, expected = records_of(model, request, 34), records_of(clean, request, 34)
    assert not [name for name in paged if not same_bytes(records[name], expected[name])]
