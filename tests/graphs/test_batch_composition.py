"""A request's results do not depend on who shares its step, nor on what its memory held before (spec 14, 15).

Hidden rows and cache records are compared by bytes.
"""

import pytest
import torch
from graph_steps import (
    Chunk,
    Request,
    decode_inputs,
    differing_records,
    ragged_inputs,
    random_tokens,
    records_of,
    same_bytes,
)

PRECISIONS = ["native", "float32"]
LENGTHS = (141, 37, 1, 18)  # tokens of the prompts; the first needs two blocks
# where the requests live in the shared caches: no order, no neighbours
HOMES = ((3, (6, 2)), (1, (8,)), (4, (1,)), (2, (5,)))
NUM_SEQS, STEPS = 4, 2


def prompts() -> list[list[int]]:
    """Tokens of every request, those of the decode steps at the end."""
    return [random_tokens(length + STEPS, seed) for seed, length in enumerate(LENGTHS)]


def fill(model, value: int) -> None:
    """Set every byte of the caches to `value`; 255 makes NaN records in both precisions."""
    for cache in model.caches.values():
        cache.view(torch.uint8).fill_(value)


@pytest.fixture(scope="module", params=PRECISIONS)
def alone(request, new_model):
    """Precision, and for each request run by itself: hidden rows of prompt and steps, records at the end."""
    results = []
    for tokens, length in zip(prompts(), LENGTHS, strict=True):
        model, own = new_model(request.param), Request(tokens)
        hidden = [model.step("prefill", ragged_inputs([Chunk(own, 0, length)], model.layout))]
        hidden += [
            model.step("decode", decode_inputs([Chunk(own, position, 1)], model.layout))
            for position in range(length, length + STEPS)
        ]
        results.append((hidden, records_of(model, own, length + STEPS)))
    return request.param, results


@pytest.mark.parametrize(
    ("order", "padding", "garbage"),
    [((0, 1, 2, 3), 0, 0), ((2, 0, 3, 1), 5, 0x77), ((3, 2, 1, 0), 11, 0xFF)],
)
def test_a_shared_step_gives_each_request_what_it_gets_alone(new_model, alone, order, padding, garbage):
    """One ragged prefill, then decode steps in other orders, unused lines in between (5, 6.4, 14)."""
    precision, results = alone
    model = new_model(precision, max_num_seqs=NUM_SEQS)
    fill(model, garbage)
    requests = [Request(tokens, *home) for tokens, home in zip(prompts(), HOMES, strict=True)]
    chunks = [Chunk(requests[index], 0, LENGTHS[index]) for index in order]
    hidden = model.step("prefill", ragged_inputs([None, *chunks, None], model.layout, padding_rows=padding))
    start = 0
    for index in order:
        rows = hidden[start : start + LENGTHS[index]]
        assert same_bytes(rows, results[index][0][0]), index
        start += LENGTHS[index]
    for step in range(STEPS):
        turn = [*order[step + 1 :], None, *order[: step + 1]]
        chunks = [
            None if index is None else Chunk(requests[index], LENGTHS[index] + step, 1) for index in turn
        ]
        hidden = model.step("decode", decode_inputs(chunks, model.layout))
        for row, index in enumerate(turn):
            if index is not None:
                assert same_bytes(hidden[row : row + 1], results[index][0][1 + step]), (step, index)
    for index, own in enumerate(requests):
        records = records_of(model, own, LENGTHS[index] + STEPS)
        assert not differing_records(records, results[index][1]), index


def test_prefill_of_one_request_between_the_decode_steps_of_others(new_model, alone):
    """A prefill step may also carry rows of requests that are further along: chunks at any position."""
    precision, results = alone
    model = new_model(precision, max_num_seqs=NUM_SEQS)
    requests = [Request(tokens, *home) for tokens, home in zip(prompts(), HOMES, strict=True)]
    first = [Chunk(requests[0], 0, 100), Chunk(requests[3], 0, 17)]
    second = [Chunk(requests[3], 17, 1), Chunk(requests[1], 0, 37), Chunk(requests[0], 100, 41)]
    third = [Chunk(requests[0], 141, 1), Chunk(requests[2], 0, 1), Chunk(requests[1], 37, 2)]
    parts: dict[int, list[torch.Tensor]] = {index: [] for index in range(NUM_SEQS)}
    for chunks in (first, second, third):
        hidden = model.step("prefill", ragged_inputs(chunks, model.layout, padding_rows=3))
        for chunk in chunks:
            rows, hidden = hidden[: chunk.count], hidden[chunk.count :]
            parts[requests.index(chunk.request)].append(rows)
    for index, rows in parts.items():
        got = torch.cat(rows)
        assert same_bytes(got, torch.cat(results[index][0])[: len(got)]), index


def touched(model, value: int) -> dict[str, set[tuple[int, int]]]:
    """Return which entries of blocks or slots beyond the first hold anything but `value`, by region."""
    changed = {}
    for name, cache in model.caches.items():
        other = (cache.contiguous().view(torch.uint8) != value).flatten(2).any(-1)
        changed[name] = {(owner, entry) for owner, entry in other.nonzero().tolist() if owner}
    return changed


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_padding_rows_write_to_block_and_slot_zero_alone(new_model, precision, phase):
    model = new_model(precision, max_num_seqs=2)
    fill(model, 0x5A)
    if phase == "decode":
        inputs = decode_inputs([None] * 8, model.layout)
    else:
        inputs = ragged_inputs([None], model.layout, padding_rows=8)
    # what the ids and tables of padding say must not matter
    inputs = inputs._replace(
        token_ids=torch.full((8,), 7),
        block_table=torch.full_like(inputs.block_table, 2),
        slot_ids=torch.full_like(inputs.slot_ids, 1),
    )
    model.step(phase, inputs)
    assert not any(touched(model, 0x5A).values())


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_step_writes_the_entries_of_its_rows_and_no_other(new_model, phase):
    """Position 130 of a request whose second block is block 1: one entry per region (5.5, 6.3)."""
    model = new_model(max_num_seqs=2)
    fill(model, 0x5A)
    own, position = Request([5] * 140, slot=2, blocks=(3, 1)), 131
    make = decode_inputs if phase == "decode" else ragged_inputs
    model.step(phase, make([Chunk(own, position, 1)], model.layout))
    for region in model.layout.regions:
        if region.kind == "paged":
            expected = {(1, (position - 128) // region.tokens_per_entry)}
        else:
            expected = {(2, position % region.entries)}
        assert touched(model, 0x5A)[region.name] == expected, region.name


@pytest.mark.parametrize("position", [0, 128])
def test_an_open_group_writes_no_compressed_entry(new_model, position):
    model = new_model()
    fill(model, 0x5A)
    own = Request([5] * 140)
    model.step("decode", decode_inputs([Chunk(own, position, 1)], model.layout))
    changed = touched(model, 0x5A)
    for layer in (1, 3):
        assert not changed[f"layers.{layer}.compressed_kv"]
        assert not changed[f"layers.{layer}.index_key"]
    assert changed["layers.4.compressed_kv"] == {(1 + position // 128, 0)}
