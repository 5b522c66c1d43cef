"""The eager model against the golden results of v41-tiny, by the tiers of its README."""

import itertools
import random

import numpy as np
import pytest
import torch
from golden import DECODE_CASES, TEXT_CASES, Golden, rms_ratio
from graph_steps import Chunk, Request, decode_inputs, ragged_inputs, same_bytes

from deepinfer.graphs.eager import EagerModel, eager_logits, single_request_inputs
from deepinfer.kernels.index_topk import entries_of_blocks

SIGMA = 0.981  # standard deviation of the golden logits


@pytest.mark.parametrize("case", [*TEXT_CASES, "wild97"])
def test_float32_logits_agree_with_the_reference(golden, case):
    """Tier 1: quantisers off. Rows on which a decision hangs by less than 1e-4 are left out."""
    logits = eager_logits(golden.directory, golden.tokens(case), precision="float32")
    expected, margins = golden["fp32"][f"{case}.logits"], golden["fp32"][f"{case}.margins"]
    clear = ((margins >= 1e-4) | (margins == 0)).all(dim=1)  # 0: an exact tie, which the tie rule decides
    assert clear.float().mean() > 0.8
    error = (torch.from_numpy(logits) - expected).abs()[clear].max()
    assert error <= 1e-4 * SIGMA


@pytest.mark.parametrize("case", DECODE_CASES)
def test_float32_decode_agrees_with_the_reference(golden, case):
    entry = golden.cases[case]
    logits = eager_logits(
        golden.directory, golden.tokens(case), precision="float32", chunk_sizes=[len(entry["prompt"])]
    )
    expected = golden["fp32"][f"{case}.logits"]
    assert np.abs(logits[-len(entry["forced"]) :] - expected.numpy()).max() <= 1e-4 * SIGMA


@pytest.mark.parametrize("case", TEXT_CASES)
def test_native_logits_are_close_end_to_end(golden, case):
    """Tier 3, a coarse check: one flipped bit is amplified by every later quantiser."""
    logits = torch.from_numpy(eager_logits(golden.directory, golden.tokens(case)))
    expected = golden["logits"][f"{case}.logits"]
    rows = len(expected)
    assert (logits - expected).pow(2).mean().sqrt() <= (0.15 if rows <= 27 else 0.4) * expected.std()
    assert torch.cosine_similarity(logits, expected, dim=1).median() >= 0.95


@pytest.mark.parametrize("precision", ["native", "float32"])
@pytest.mark.parametrize(
    ("case", "plans"),
    [("n3", [[], [2], [1, 1, 1], [1]]), ("n17", [[], [16], [5, 7]]), ("n97", [[60, 30]])],
)
def test_chunk_sizes_do_not_change_a_byte(golden, case, plans, precision):
    """The chunks of `n97` are longer than the rings, which hold 22 positions."""
    tokens = golden.tokens(case)
    whole = eager_logits(golden.directory, tokens, precision)
    for chunk_sizes in plans:
        split = eager_logits(golden.directory, tokens, precision, chunk_sizes)
        assert split.tobytes() == whole.tobytes(), chunk_sizes


def chunk_plans(num_tokens: int, seed: str) -> list[list[int]]:
    """Chunk sizes of prefills, decode takes the rest: none, one, all, all but one, and three random plans."""
    rng = random.Random(seed)
    plans = [[], [1], [1] * num_tokens, [num_tokens - 1]]
    for _ in range(3):
        cuts = sorted(rng.sample(range(1, num_tokens), rng.randint(1, 4)))
        plans.append([b - a for a, b in itertools.pairwise([0, *cuts])])
    return plans


@pytest.mark.parametrize("precision", ["native", "float32"])
def test_chunked_prefill_and_decode_give_the_same_bytes(golden, new_model, precision):
    """All plans side by side, a request each: every step takes the next piece of each plan (14)."""
    tokens = golden.tokens("n40")
    plans = chunk_plans(len(tokens), precision)
    model = new_model(precision, max_model_len=128, max_num_seqs=len(plans))
    whole = model.logits(
        model.step("prefill", ragged_inputs([Chunk(Request(tokens), 0, len(tokens))], model.layout))
    )
    requests = [Request(tokens, slot=line, blocks=(line,)) for line in range(1, len(plans) + 1)]
    done, hidden = [0] * len(plans), [[] for _ in plans]
    remaining = [list(plan) for plan in plans]

    def run(phase: str, lines: list[int], counts: list[int]) -> None:
        make = decode_inputs if phase == "decode" else ragged_inputs
        chunks = [Chunk(requests[line], done[line], count) for line, count in zip(lines, counts, strict=True)]
        rows = model.step(phase, make(chunks, model.layout)).split(counts)
        for line, count, part in zip(lines, counts, rows, strict=True):
            hidden[line].append(part)
            done[line] += count

    while unfinished := [line for line in range(len(plans)) if done[line] < len(tokens)]:
        prefilling = [line for line in unfinished if remaining[line]]
        decoding = [line for line in unfinished if not remaining[line]]
        if prefilling:
            run("prefill", prefilling, [remaining[line].pop(0) for line in prefilling])
        if decoding:
            run("decode", decoding, [1] * len(decoding))
    for plan, parts in zip(plans, hidden, strict=True):
        assert same_bytes(model.logits(torch.cat(parts)), whole), plan


class TeacherForced:
    """Feeds the golden streams into every sublayer and keeps what each of them computes."""

    def __init__(self, golden: Golden) -> None:
        self.golden = golden["intermediates"]
        self.values: dict[str, torch.Tensor] = {}

    def __call__(self, layer: int, name: str, value: torch.Tensor) -> torch.Tensor:
        self.values[f"L{layer}.{name}"] = value.clone()
        stream = {"engram": "R_in", "attn": "R_mid", "ffn": "R_out"}.get(name)
        if stream is None:
            return value
        forced = value.clone()
        forced[:40] = self.golden[f"L{layer}.{stream}"]
        return forced


@pytest.fixture(scope="module")
def forced(golden) -> tuple[TeacherForced, EagerModel]:
    tokens = golden.tokens("n40")
    model = EagerModel.load(golden.directory, "native", max_model_len=len(tokens))
    tap = TeacherForced(golden)
    model.step("prefill", single_request_inputs(tokens, 0, torch.tensor([1]), slot=1), tap)
    return tap, model


@pytest.mark.parametrize("layer", range(8))
def test_native_sublayers_agree_on_golden_inputs(golden, forced, layer):
    """Tier 2: one sublayer at a time; attention keeps float32 probabilities, hence its wider limit."""
    tap, _ = forced
    stored = golden["intermediates"]
    limits = {"attn_y": 2.5e-2, "ffn_y": 2e-3, "o": 2.5e-2, "qr": 2e-3, "q": 2e-3}
    streams = {"attn": ("R_mid", 2.5e-2), "ffn": ("R_out", 2e-3), "engram": ("R_in", 2e-3)}
    checks = {name: (name, limit) for name, limit in limits.items()} | streams
    compared = set()
    for name, (expected, limit) in checks.items():
        if f"L{layer}.{expected}" in stored and f"L{layer}.{name}" in tap.values:
            ratio = rms_ratio(tap.values[f"L{layer}.{name}"][:40], stored[f"L{layer}.{expected}"])
            assert ratio <= limit, (name, ratio)
            compared.add(name)
    assert compared >= {"attn_y", "ffn_y", "attn", "ffn"}


@pytest.mark.parametrize("layer", range(8))
def test_native_decisions_agree_exactly_on_golden_inputs(golden, forced, layer):
    tap, model = forced
    stored = golden["intermediates"]
    assert torch.equal(tap.values[f"L{layer}.router_picks"], stored[f"L{layer}.router_picks"].long())
    assert torch.allclose(
        tap.values[f"L{layer}.router_weights"], stored[f"L{layer}.router_weights"], atol=1e-6
    )
    if f"L{layer}.topk" in stored:
        expected = stored[f"L{layer}.topk"].long()
        assert torch.equal(tap.values[f"L{layer}.topk"][:, : expected.shape[1]], expected)
    if f"L{layer}.candidates" in stored:
        expected = stored[f"L{layer}.candidates"].bool()
        blocks, size = tap.values[f"L{layer}.candidates"], model.config.candidate_block_size
        assert torch.equal(entries_of_blocks(blocks, size, expected.shape[1]), expected)
    if f"L{layer}.engram_hash_ids" in stored:
        assert torch.equal(
            tap.values[f"L{layer}.engram_hash_ids"], stored[f"L{layer}.engram_hash_ids"].long()
        )


@pytest.mark.parametrize("layer", range(8))
def test_native_cache_records_agree_on_golden_inputs(golden, forced, layer):
    """At most isolated one-step differences in what the caches hold."""
    _, model = forced
    stored, precision = golden["intermediates"], model.precision
    ring = model.caches[f"layers.{layer}.window"]
    positions = torch.arange(40 - ring.shape[1], 40)
    window = precision.window_vector(ring[1, positions % ring.shape[1]])
    assert_isolated(window, stored[f"L{layer}.window_kv"][positions])
    if f"L{layer}.compressed_kv" in stored:
        expected = stored[f"L{layer}.compressed_kv"]
        region = model.caches[f"layers.{layer}.compressed_kv"]
        assert_isolated(precision.compressed_vector(region[1, : len(expected)]), expected)
        expected = stored[f"L{layer}.index_k"]
        region = model.caches[f"layers.{layer}.index_key"]
        assert_isolated(precision.index_key_vector(region[1, : len(expected)]), expected)


def assert_isolated(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that all but one value in a thousand are equal, and those within one FP4 step."""
    different = actual.float() != expected.float()
    assert different.float().mean() <= 1e-3
    assert rms_ratio(actual, expected) <= 2e-2
