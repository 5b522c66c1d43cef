"""Sparse attention: golden vectors, float64, the graphs' form, chunking, extremes, addresses, refusals."""

import math
import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from routes import ROUTES
from torch import Tensor

from deepinfer.errors import UsageError
from deepinfer.graphs.records import PRECISIONS
from deepinfer.graphs.rows import StepInputs
from deepinfer.kernels import quantize_fp4, quantize_fp8, ring_write, sparse_attention
from deepinfer.kernels.sparse_attention import softmax_with_sink

INF, NAN = float("inf"), float("nan")
PRECISION = {torch.bfloat16: PRECISIONS["native"], torch.float32: PRECISIONS["float32"]}


@dataclass
class Sequence:
    """All rows of one request, and where its state lives."""

    query: Tensor  # [N, H, d]
    record: Tensor  # [N, r]
    picks: Tensor  # [N, k]
    slot: int
    blocks: list[int]


class Model:
    """A layer's caches and some requests whose compressed entries are all written already."""

    def __init__(
        self, dtype, lengths, *, heads=3, width=64, window=20, ratio=1, top_k=10, per_block=8, seed=0
    ):
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype, self.quantize, self.window, self.top_k = dtype, dtype == torch.bfloat16, window, top_k
        self.width, self.scale = width, width**-0.5
        self.sink = torch.randn(heads, generator=self.generator)
        count = -(-max(lengths) // (per_block * ratio))
        order = torch.randperm(len(lengths) * count, generator=self.generator) + 1
        self.compressed = self.fp4(self.vectors(1 + len(order), per_block))
        self.ring = torch.zeros_like(self.fp8(self.vectors(1 + len(lengths), window + 6)))
        self.table_width = count
        self.sequences = [
            Sequence(
                self.vectors(length, heads).to(dtype),
                self.fp8(self.vectors(length).to(dtype)),
                self.pick(length, ratio),
                index + 1,
                order[index * count : (index + 1) * count].tolist(),
            )
            for index, length in enumerate(lengths)
        ]

    def vectors(self, *shape):
        # unequal keys: logits of a few units, so that the softmax is not flat
        return torch.randn(*shape, self.width, generator=self.generator) * 2

    def fp8(self, x):
        return quantize_fp8.native(x) if self.quantize else x

    def fp4(self, x):
        return quantize_fp4.native(x, "e4m3") if self.quantize else x

    def pick(self, length, ratio):
        picks = torch.full((length, self.top_k), -1)
        for position in range(length):
            entries = torch.randperm((position + 1) // ratio, generator=self.generator)[: self.top_k]
            picks[position, : len(entries)] = entries.sort().values
        return picks

    def step(self, chunks, *, padding=0, table_width=None):
        """Query, record, picks and the step inputs of rows of (sequence, start, count), one line each."""
        table = torch.zeros(len(chunks), table_width or self.table_width, dtype=torch.int64)
        slots, starts, counts = (torch.zeros(len(chunks), dtype=torch.int64) for _ in range(3))
        positions, lines, parts = [], [], []
        for line, (index, start, count) in enumerate(chunks):
            sequence = self.sequences[index]
            table[line, : len(sequence.blocks)] = torch.tensor(sequence.blocks)
            slots[line], starts[line], counts[line] = sequence.slot, start, count
            positions += range(start, start + count)
            lines += [line] * count
            parts.append((sequence, slice(start, start + count)))
        query, record, picks = (
            torch.cat([getattr(sequence, name)[rows] for sequence, rows in parts])
            for name in ("query", "record", "picks")
        )
        inputs = StepInputs(
            torch.zeros(len(positions) + padding, dtype=torch.int64),
            torch.tensor(positions + [-1] * padding),
            torch.tensor(lines + [0] * padding),
            table,
            slots,
            starts,
            torch.zeros_like(slots),
            counts,
        )
        grown = (torch.cat((x, x[:1].expand(padding, *x.shape[1:]))) for x in (query, record, picks))
        return (*grown, inputs)

    def attend(self, route, chunks, **settings):
        """Outputs and mass of a step, which also writes the ring."""
        query, record, picks, inputs = self.step(chunks, **settings)
        result = self.run(route, query, record, picks, inputs)
        addresses = (inputs.slot_ids, inputs.num_computed_tokens, inputs.row_counts)
        ring_write.native(self.ring, record, inputs.positions, inputs.request_index, *addresses)
        return result

    def run(self, route, query, record, picks, inputs, with_mass=True):
        return getattr(sparse_attention, route)(
            *(query, record, self.ring, self.compressed, picks, self.sink, self.scale, self.window),
            *(inputs.positions, inputs.request_index, inputs.block_table, inputs.slot_ids),
            *(inputs.num_computed_tokens, self.quantize, with_mass),
        )

    def plain(self, chunks, *, padding=0):
        """Outputs and mass of a step without a ring: keys are taken from all rows of the request."""
        precision, back = PRECISION[self.dtype], torch.arange(self.window - 1, -1, -1)
        query, keys, visible = [], [], []
        for index, start, count in chunks:
            sequence, rows = self.sequences[index], slice(start, start + count)
            wanted, picks = torch.arange(start, start + count).unsqueeze(1) - back, sequence.picks[rows]
            block = torch.tensor(sequence.blocks)[picks.clamp(min=0) // 8]
            window = precision.window_vector(sequence.record[wanted.clamp(min=0)])
            entries = precision.compressed_vector(self.compressed[block, picks.clamp(min=0) % 8])
            query.append(sequence.query[rows])
            keys.append(torch.cat((window, entries), dim=1))
            visible.append(torch.cat((wanted >= 0, picks >= 0), dim=1))
        parts = (torch.cat(part) for part in (query, keys, visible))
        results = softmax_with_sink(*parts, self.sink, self.scale)
        return tuple(torch.cat((x, x.new_zeros(padding, *x.shape[1:]))) for x in results)

    def assert_ring_holds(self, done):
        """The ring has the last records of every sequence, of which `done` rows are written."""
        length = self.ring.shape[1]
        for sequence, count in zip(self.sequences, done, strict=True):
            positions = torch.arange(max(0, count - length), count)
            assert torch.equal(self.ring[sequence.slot, positions % length], sequence.record[positions])


def in_float64(query, keys, visible, sink, scale):
    """The definition in float64: output, the same sum over |values|, mass."""
    keys = torch.where(visible.unsqueeze(-1), keys, 0).double()
    logits = torch.einsum("thd,tnd->thn", query.double(), keys) * scale
    logits = logits.masked_fill(~visible.unsqueeze(1), -INF)
    top = logits.amax(-1, keepdim=True).clamp(min=-1e30)
    weights = (logits - top).exp()
    shares = weights / (weights.sum(-1, keepdim=True) + (sink.double().view(1, -1, 1) - top).exp())
    return shares @ keys, shares @ keys.abs(), shares.sum(1)


def close(got, exact, absolute, dtype):
    unit = 2**-8 if dtype == torch.bfloat16 else 2**-22
    assert ((got.double() - exact).abs() <= unit * exact.abs() + 2e-5 * absolute + 1e-7).all()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"heads": 1, "width": 32, "window": 1, "top_k": 1},
        {"heads": 6, "width": 64, "window": 32, "top_k": 32, "ratio": 2},
        {"heads": 7, "width": 96, "window": 33, "top_k": 17},
        {"heads": 13, "width": 544, "window": 16, "top_k": 40},
    ],
)
def test_close_to_float64(route, dtype, shape):
    model = Model(dtype, [70, 40, 3], seed=1, **shape)
    chunks = [(0, 0, 70), (1, 0, 40), (2, 0, 3)]
    query, record, picks, inputs = model.step(chunks, padding=2)
    output, mass = model.run(route, query, record, picks, inputs)
    _, window = record.shape, model.window
    precision = PRECISION[dtype]
    back = torch.arange(window - 1, -1, -1)
    valid = (inputs.positions >= 0).unsqueeze(1)
    visible = torch.cat((inputs.positions.unsqueeze(1) >= back, picks >= 0), dim=1) & valid
    own = precision.window_vector(record[(torch.arange(len(record)).unsqueeze(1) - back).clamp(min=0)])
    block = inputs.block_table[inputs.request_index].gather(1, picks.clamp(min=0) // 8)
    entries = precision.compressed_vector(model.compressed[block, picks.clamp(min=0) % 8])
    keys = torch.cat((own, entries), dim=1)
    exact, absolute, exact_mass = in_float64(query, keys, visible, model.sink, model.scale)
    close(output, exact, absolute, dtype)
    torch.testing.assert_close(mass.double(), exact_mass, rtol=2e-5, atol=2e-6)
    assert not output[-2:].any()
    assert not mass[-2:].any()


@pytest.mark.parametrize("route", ROUTES)
def test_golden_vectors_of_the_vendor(route, golden_kernels):
    """Lists beyond 64 entries with gaps and duplicates, as picks; the vendor rounds probabilities to bf16.

    Every row needs a key of its own in the window: one that no logit comes near.
    """
    index = golden_kernels["sparse_attn.idx"].long()
    keys, query = golden_kernels["sparse_attn.kv"].float(), golden_kernels["sparse_attn.q"]
    sink, scale = golden_kernels["sparse_attn.sink"].float(), golden_kernels["sparse_attn.scale"].item()
    rows, heads, width = query.shape
    # one element more, in which a row's own key alone differs from zero
    wide = torch.cat((query, torch.ones(rows, heads, 1)), dim=-1)
    own = torch.zeros(rows, width + 1)
    own[:, width] = -1e6
    entries = torch.cat((keys, torch.zeros(len(keys), 1)), dim=1).reshape(1, -1, width + 1)
    compressed = torch.cat((torch.full_like(entries, NAN), entries))
    lines, one = torch.arange(rows), torch.ones(rows, 1, dtype=torch.int64)
    positions = torch.full((rows,), 1000)
    output, mass = getattr(sparse_attention, route)(
        *(wide, own, torch.zeros(1, 1, width + 1), compressed, index, sink, scale, 1),
        *(positions, lines, one, torch.zeros(rows, dtype=torch.int64), positions, False, True),
    )
    visible, listed_keys = index >= 0, keys[index.clamp(min=0)]
    exact, absolute, _ = in_float64(query, listed_keys, visible, sink, scale)
    filled = visible.any(1)
    assert not filled[0]
    assert filled[1:].all()
    output = output[filled][..., :width]
    close(output, exact[filled], absolute[filled], torch.float32)
    expected = golden_kernels["sparse_attn.o"].float()[filled]
    error = (output - expected).abs()
    assert (error <= 2**-8 * (absolute + 2 * exact.abs())[filled] + 1e-6).all()
    assert (mass[:, 1:][~visible] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_reference_is_the_plain_form_step_after_step(dtype, same_bytes):
    """Prefill in ragged chunks, then decode, each on a ring that it writes itself; native is close."""
    ours, native = (Model(dtype, [60, 47, 9], seed=2) for _ in range(2))
    done = [0, 0, 0]
    steps = [
        ([(0, 0, 13), (1, 0, 40), (2, 0, 1)], 2),
        ([(2, 1, 7), (0, 13, 46)], 3),
        ([(0, 59, 1), (2, 8, 1), (1, 40, 1)], 5),
        ([(1, 41, 1)], 7),
    ]
    tolerance = {"rtol": 2.0**-7 if dtype == torch.bfloat16 else 1e-5, "atol": 1e-5}
    for chunks, padding in steps:
        want = ours.plain(chunks, padding=padding)
        for got, expected in zip(ours.attend("reference", chunks, padding=padding), want, strict=True):
            same_bytes(got, expected)
        for got, expected in zip(native.attend("native", chunks, padding=padding), want, strict=True):
            torch.testing.assert_close(got, expected, **tolerance)
        for index, start, count in chunks:
            done[index] = start + count
        ours.assert_ring_holds(done)
        assert torch.equal(ours.ring[1:], native.ring[1:])


def one_shot(dtype, lengths, seed, **shape):
    model = Model(dtype, lengths, seed=seed, **shape)
    results = [model.attend("native", [(index, 0, length)]) for index, length in enumerate(lengths)]
    return [tuple(part for part in result) for result in results]


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 75), min_size=1, max_size=3),
    window=st.sampled_from([1, 15, 16, 20]),
    heads=st.sampled_from([1, 6, 8]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    seed=st.integers(0, 2**31),
)
def test_chunks_company_padding_and_decode_change_no_bit(lengths, window, heads, dtype, seed, same_bytes):
    schedule = random.Random(seed)
    want = one_shot(dtype, lengths, seed, window=window, heads=heads)
    model = Model(dtype, lengths, seed=seed, window=window, heads=heads)
    done, parts = [0] * len(lengths), [[] for _ in lengths]
    while done != lengths:
        chunks = []
        for index in schedule.sample(range(len(lengths)), len(lengths)):
            count = min(lengths[index] - done[index], schedule.choice([0, 1, 1, 5, 16, 40]))
            if count:
                chunks.append((index, done[index], count))
        if not chunks:
            continue
        padding, wider = schedule.randrange(4), model.table_width + schedule.choice([0, 50])
        result = model.attend("native", chunks, padding=padding, table_width=wider)
        row = 0
        for index, _, count in chunks:
            parts[index].append([part[row : row + count] for part in result])
            row, done[index] = row + count, done[index] + count
        assert not result[0][row:].any()
    for pieces, whole in zip(parts, want, strict=True):
        for got, expected in zip(zip(*pieces, strict=True), whole, strict=True):
            same_bytes(torch.cat(got), expected)


@pytest.mark.parametrize("heads", [1, 5, 6, 7, 64])
def test_a_head_does_not_depend_on_the_others_nor_on_threads(heads, same_bytes, set_threads):
    model = Model(torch.bfloat16, [400], heads=heads, width=512, window=128, top_k=64, per_block=128, seed=3)
    rows = [(0, 0, 300)]
    query, record, picks, inputs = model.step(rows)
    set_threads(1)
    output, mass = model.run("native", query, record, picks, inputs)
    set_threads(2)
    for with_mass in (True, False):
        again, mass_again = model.run("native", query, record, picks, inputs, with_mass)
        same_bytes(again, output)
        assert mass_again.shape == ((300, 192) if with_mass else (300, 0))
    same_bytes(model.run("native", query, record, picks, inputs)[1], mass)
    sink = model.sink
    model.sink = sink[-1:].clone()
    alone, _ = model.run("native", query[:, -1:].contiguous(), record, picks, inputs)
    same_bytes(alone, output[:, -1:])
    last = model.step([(0, 299, 1)])[3]
    model.sink = sink
    model.ring[1, torch.arange(299 - 128, 299) % 134] = record[299 - 128 : 299]
    lone, lone_mass = model.run("native", query[-1:], record[299:], picks[299:300], last)
    same_bytes(lone, output[-1:])
    same_bytes(lone_mass, mass[-1:])


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_not_visible_may_hold_anything(route, dtype, same_bytes):
    """NaN records in every place that no row's list names: other slots, blocks and positions."""
    model = Model(dtype, [60, 60], seed=4)
    model.attend("native", [(0, 0, 40), (1, 0, 40)])
    query, record, picks, inputs = model.step([(0, 40, 2), (1, 40, 1)], padding=2)
    want = model.run(route, query, record, picks, inputs)
    poison = (lambda x: torch.full_like(x, 255)) if dtype == torch.bfloat16 else (lambda x: x * NAN)
    ring, compressed = poison(model.ring), poison(model.compressed)
    for index, last in ((0, 41), (1, 40)):
        sequence = model.sequences[index]
        needed = torch.arange(max(0, 40 - model.window + 1), 40) % model.ring.shape[1]
        ring[sequence.slot, needed] = model.ring[sequence.slot, needed]
        for entry in sequence.picks[40 : last + 1].unique().tolist():
            if entry >= 0:
                place = (sequence.blocks[entry // 8], entry % 8)
                compressed[place] = model.compressed[place]
    record[-2:] = poison(record[-2:])
    query[-2:] = NAN
    model.ring, model.compressed = ring, compressed
    for got, expected in zip(model.run(route, query, record, picks, inputs), want, strict=True):
        assert got.isfinite().all()
        same_bytes(got, expected)


@pytest.mark.parametrize("route", ROUTES)
def test_a_nan_key_reaches_the_rows_that_see_it_and_no_other(route, same_bytes):
    model = Model(torch.float32, [50, 50], window=20, seed=5)
    query, record, picks, inputs = model.step([(0, 0, 50), (1, 0, 50)])
    picks[:] = -1
    clean = model.run(route, query, record, picks, inputs)
    record[10, 3] = NAN
    output, mass = model.run(route, query, record, picks, inputs)
    sees = torch.zeros(100, dtype=torch.bool)
    sees[10:30] = True
    assert output[sees].isnan().all()
    for got, want in zip((output, mass), clean, strict=True):
        same_bytes(got[~sees], want[~sees])


def lone_key(route, key, query, sink, scale=0.5):
    """One row that sees one key: itself."""
    zero, one = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64)
    record, query = torch.tensor([key]), torch.tensor([[query]])
    return getattr(sparse_attention, route)(
        *(query, record, torch.zeros(1, 1, len(key)), torch.zeros(0, 0, 0), torch.zeros(1, 0).long()),
        *(torch.tensor([sink]), scale, 1, zero, zero, one, zero, zero, False, True),
    )


@pytest.mark.parametrize("route", ROUTES)
def test_the_sink_takes_its_share(route):
    output, mass = lone_key(route, [4.0, 8.0], [0.0, 0.0], math.log(3))
    assert output.flatten().tolist() == pytest.approx([1.0, 2.0])
    assert mass.tolist() == [[pytest.approx(0.25)]]
    output, _ = lone_key(route, [4.0, 8.0], [0.5, 0.0], 1.0)  # not scaled
    assert output.flatten().tolist() == pytest.approx([2.0, 4.0])
    for sink in (1e4, 3e38, INF):
        assert lone_key(route, [4.0, 8.0], [1.0, 1.0], sink)[0].flatten().tolist() == [0, 0]
    for sink in (-3e38, -INF):
        assert lone_key(route, [4.0, 8.0], [1.0, 1.0], sink)[0].flatten().tolist() == [4, 8]
    assert lone_key(route, [4.0, 8.0], [1.0, 1.0], NAN)[0].isnan().all()


@pytest.mark.parametrize("route", ROUTES)
def test_extreme_logits(route):
    largest = torch.finfo(torch.float32).max
    assert lone_key(route, [largest, 0.0], [1.0, 0.0], 0.0)[0].flatten().tolist() == [largest, 0.0]
    assert lone_key(route, [-1e20, 5.0], [1e20, 0.0], 0.0)[0].flatten().tolist() == [0, 0]  # logit -inf
    assert lone_key(route, [-1e20, 5.0], [1e15, 0.0], 0.0)[0].flatten().tolist() == [0, 0]  # below -1e30
    assert lone_key(route, [1e20, 5.0], [1e20, 0.0], 0.0)[0].isnan().all()  # logit inf
    assert lone_key(route, [1e10, 5.0], [1e10, 0.0], 0.0)[0].flatten().tolist() == [1e10, 5.0]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("sink", [-INF, -50.0, 0.0, 50.0])
def test_padding_rows_give_zeros_whatever_the_sink(route, sink):
    model = Model(torch.float32, [5], seed=6)
    model.sink[:] = sink
    query, record, picks, inputs = model.step([(0, 0, 2)], padding=3)
    inputs.request_index[2:] = 77  # nobody reads it
    output, mass = model.run(route, query, record, picks, inputs)
    assert not output[2:].any()
    assert not mass[2:].any()
    assert mass[:2].any()


@pytest.mark.parametrize("route", ROUTES)
def test_an_entry_counts_once_per_listing_and_gaps_count_nothing(route):
    model = Model(torch.float32, [30], seed=7, top_k=4)
    query, record, picks, inputs = model.step([(0, 0, 30)])
    for listing in ([3, 3, 5, -1], [-1, 3, -1, 5], [5, 3, -1, -1]):
        picks[29] = torch.tensor(listing)
        output, mass = model.run(route, query, record, picks, inputs)
        entries = torch.tensor([entry for entry in listing if entry >= 0])
        blocks = torch.tensor(model.sequences[0].blocks)[entries // 8]
        keys = torch.cat((record[10:30], model.compressed[blocks, entries % 8])).unsqueeze(0)
        visible = torch.ones(1, keys.shape[1], dtype=torch.bool)
        exact, absolute, exact_mass = in_float64(query[29:], keys, visible, model.sink, model.scale)
        close(output[29:], exact, absolute, torch.float32)
        columns = [column for column, entry in enumerate(listing) if entry >= 0]
        torch.testing.assert_close(mass[29, 20:][columns].double(), exact_mass[0, 20:], rtol=1e-5, atol=1e-6)
        assert not mass[29, 20:][[column for column in range(4) if column not in columns]].any()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_offsets_beyond_two_to_the_31(route, dtype, tmp_path, same_bytes):
    """Ring and entries inside arenas with a huge outer stride, in sparse files."""
    model = Model(dtype, [40], seed=8)
    model.attend("native", [(0, 0, 39)])
    arguments = model.step([(0, 39, 1)])
    want = model.run(route, *arguments)
    for name in ("ring", "compressed"):
        region = getattr(model, name)
        stride, item = 2**30 + 64, region.element_size()
        size = 4 * stride
        arena = torch.from_file(str(tmp_path / name), shared=True, size=size, dtype=torch.uint8)
        far = arena.view(region.dtype).as_strided(
            (4, *region.shape[1:]), (stride // item, region.shape[2], 1)
        )
        far[3] = region[1 if name == "ring" else model.sequences[0].blocks[0]]
        setattr(model, name, far)
    inputs = arguments[3]._replace(slot_ids=torch.tensor([3]), block_table=torch.tensor([[3, 3, 3, 3, 3]]))
    picks = torch.where(arguments[2] < 8, arguments[2], -1)
    got = model.run(route, *arguments[:2], picks, inputs)
    assert got[0].isfinite().all()
    if (picks == arguments[2]).all():
        same_bytes(got[0], want[0])
    other = Model(dtype, [40], seed=8)
    other.attend("native", [(0, 0, 39)])
    for part, expected in zip(got, other.run(route, *arguments[:2], picks, arguments[3]), strict=True):
        same_bytes(part, expected)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layers_without_compressed_keys(route, dtype, same_bytes):
    model = Model(dtype, [40], seed=9)
    query, record, picks, inputs = model.step([(0, 0, 40)])
    output, mass = model.run(route, query, record, torch.full_like(picks, -1), inputs)
    model.compressed = model.compressed.new_empty(0, 0, 0)
    none_output, none_mass = model.run(route, query, record, picks[:, :0].contiguous(), inputs)
    torch.testing.assert_close(none_output, output, rtol=2.0**-7, atol=1e-6)
    torch.testing.assert_close(none_mass, mass[:, :20], rtol=1e-5, atol=1e-6)
    if route == "native":
        same_bytes(none_output, output)


def changed(tensor, index, value):
    copy = tensor.clone()
    copy[index] = value
    return copy


def test_every_index_out_of_range_is_refused():
    model = Model(torch.bfloat16, [60], seed=10)
    model.attend("native", [(0, 0, 50)])
    query, record, picks, inputs = model.step([(0, 50, 3)])
    far = 2**62
    wrong = [(changed(picks, (1, 9), entry), inputs, "picks") for entry in (52, 64, 1000, far, -2, -far)]
    first = int(picks[1, 0]) // 8
    wrong += [
        (picks, inputs._replace(block_table=changed(inputs.block_table, (0, first), block)), "block_table")
        for block in (0, -1, len(model.compressed), far, -far)
    ]
    wrong += [
        (picks, inputs._replace(slot_ids=torch.tensor([slot])), "slot_ids") for slot in (0, -1, 2, far, -far)
    ]
    wrong += [
        (picks, inputs._replace(request_index=changed(inputs.request_index, 1, line)), "request_index")
        for line in (-1, 1, far)
    ]
    wrong += [
        (
            picks,
            inputs._replace(num_computed_tokens=torch.tensor([start])),
            "(num_computed_tokens|row|positions)",
        )
        for start in (-1, 51, 49, 0, far)
    ]
    wrong += [
        (picks, inputs._replace(positions=changed(inputs.positions, 1, position)), "(positions|row|picks)")
        for position in (-2, 53, far)
    ]
    for route, error in (("reference", UsageError), ("native", RuntimeError)):
        for these_picks, these_inputs, name in wrong:
            with pytest.raises(error, match=f"sparse_attention: {name}"):
                model.run(route, query, record, these_picks, these_inputs)
    narrow = inputs._replace(block_table=inputs.block_table[:, :1].contiguous())
    for route, error in (("reference", UsageError), ("native", RuntimeError)):
        with pytest.raises(error, match="sparse_attention: picks"):
            model.run(route, query, record, picks, narrow)


def test_wrong_shapes_are_refused():
    arguments = list(sparse_attention.make_inputs(3, torch.bfloat16, 0))
    names = ("query", "record", "ring", "compressed", "picks", "sink", "scale", "window", "positions")
    names += ("request_index", "block_table", "slot_ids", "num_computed_tokens")
    routes = (("reference", UsageError), ("fake", UsageError), ("native", RuntimeError))
    for route, error in routes:
        run = getattr(sparse_attention, route)
        for index, name in enumerate(names):
            if isinstance(arguments[index], Tensor):
                bad = arguments.copy()
                bad[index] = arguments[index].unsqueeze(0)
                with pytest.raises(error, match=f"sparse_attention: {name}:? must have shape"):
                    run(*bad)
                bad[index] = arguments[index].to(torch.float64)
                with pytest.raises(error, match=f"sparse_attention: {name}"):
                    run(*bad)
        for window in (0, 23):
            bad = arguments.copy()
            bad[7] = window
            with pytest.raises(error, match=r"sparse_attention: window:? must lie in 1 \.\. 22"):
                run(*bad)
        for index, name in ((2, "ring"), (3, "compressed")):
            bad = arguments.copy()
            bad[index] = torch.stack((arguments[index],) * 2, -1)[..., 0]
            with pytest.raises(error, match=f"sparse_attention: {name}:? must be contiguous within"):
                run(*bad)
        bad = arguments.copy()
        bad[13] = False
        with pytest.raises(error, match="sparse_attention: record"):
            run(*bad)


def test_the_byte_check_finds_sums_that_depend_on_the_chunks(same_bytes):
    """Online softmax over what each step adds would not pass: without this, the checks could be blind."""
    model = Model(torch.float32, [64], seed=11, window=20)
    query, record, picks, inputs = model.step([(0, 0, 64)])
    keys = record[44:64].unsqueeze(0)
    logits = torch.einsum("hd,nd->hn", query[63], keys[0]) * model.scale

    def in_two_parts(cut):
        tops = [part.amax(1, keepdim=True) for part in (logits[:, :cut], logits[:, cut:])]
        parts = [
            (part - top).exp() for part, top in zip((logits[:, :cut], logits[:, cut:]), tops, strict=True)
        ]
        top = torch.maximum(*tops)
        shares = [part * (own - top).exp() for part, own in zip(parts, tops, strict=True)]
        total = shares[0].sum(1, keepdim=True) + shares[1].sum(1, keepdim=True)
        return (shares[0] @ keys[0, :cut] + shares[1] @ keys[0, cut:]) / total

    with pytest.raises(pytest.fail.Exception, match="elements differ"):
        same_bytes(in_two_parts(7), in_two_parts(12))
