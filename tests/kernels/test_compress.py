"""Pooling into compressed entries: golden vectors, float64, every split into chunks, what is written."""

import itertools
import math

import pytest
import torch
from routes import ROUTES

from deepinfer.errors import UsageError
from deepinfer.kernels import compress, dequantize_fp4, linear, quantize_fp4, rms_norm, rope
from deepinfer.kernels.packing import pack_linear

RING, ENTRIES, SLOTS = 7, 8, 4


class Layer:
    """Weights and caches of one layer; requests own slots and blocks by their number."""

    def __init__(self, route, ratio, *, quantize=True, inputs=96, size=64, seed=0, **weights):
        generator = torch.Generator().manual_seed(seed)
        self.run, self.ratio, self.quantize, self.size = getattr(compress, route), ratio, quantize, size
        self.dtype = torch.bfloat16 if quantize else torch.float32
        wkv, wgate = torch.randn(2, size, inputs, generator=generator).div(inputs**0.5).to(self.dtype)
        self.wkv, self.wgate = weights.get("wkv", wkv), weights.get("wgate", wgate)
        self.norm = weights.get("norm", torch.rand(size, generator=generator) + 0.5)
        angles = torch.randn(512, size // 4, generator=generator) * 3
        self.table = weights.get("table", torch.cat((angles.cos(), angles.sin()), dim=1))
        self.ring = torch.zeros(SLOTS, RING, 2 * size)
        width = size // 2 + size // 16 if quantize else size
        self.region = torch.zeros(40, ENTRIES, width, dtype=torch.uint8 if quantize else torch.float32)
        if ratio == 1:
            self.wgate, self.ring = self.wgate[:0], self.ring[:0, :0, :0]

    def blocks_of(self, request: int) -> list[int]:
        return list(range(12 * request + 12, 12 * request, -1))

    def arguments(self, chunks, padding=0):
        """`chunks` are (request, first position, rows `[n, D]`), one line of the request table each."""
        counts = [len(rows) for _, _, rows in chunks]
        positions = [torch.arange(first, first + len(rows)) for _, first, rows in chunks]
        lines = torch.arange(len(chunks)).repeat_interleave(torch.tensor(counts))
        filler = torch.full((padding, chunks[0][2].shape[1]), math.nan, dtype=chunks[0][2].dtype)
        return [
            *(torch.cat([*(rows for _, _, rows in chunks), filler]), self.wkv, self.wgate, self.norm, 1e-20),
            *(self.ring, self.table, self.region),
            torch.cat([*positions, torch.full((padding,), -1)]),
            torch.cat([lines, torch.zeros(padding, dtype=torch.int64)]),
            torch.tensor([self.blocks_of(request) for request, _, _ in chunks]),
            torch.tensor([request + 1 for request, _, _ in chunks]),
            torch.tensor([first for _, first, _ in chunks]),
            torch.tensor(counts),
            *(self.ratio, self.quantize),
        ]

    def feed(self, *chunks, padding=0) -> torch.Tensor:
        return self.run(*self.arguments(chunks, padding))

    def entries(self, request: int, count: int) -> torch.Tensor:
        return self.region[self.blocks_of(request)].flatten(0, 1)[:count]

    def open_rows(self, request: int, num_tokens: int) -> torch.Tensor:
        """What the ring still needs to hold: the rows of the open group."""
        if self.ratio == 1:
            return self.ring
        positions = torch.arange(num_tokens // self.ratio * self.ratio, num_tokens)
        return self.ring[request + 1, positions % RING]


def rows_for(layer: Layer, count: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, layer.wkv.shape[1], generator=generator).to(layer.dtype)


@pytest.mark.parametrize("route", ROUTES)
def test_pool_of_the_published_vector(route):
    """Values (2, -1) under gates (0, ln 3) pool to -1/4: shares of one and three quarters (6.2, 18.8)."""
    x = torch.zeros(2, 96)
    x[0, 0], x[1, 1] = 1, 1
    value, gate = torch.zeros(64, 96), torch.zeros(64, 96)
    value[:, 0], value[:, 1], gate[:, 1] = 2, -1, math.log(3)
    layer = Layer(route, 2, quantize=False, wkv=value, wgate=gate, norm=torch.full((64,), 0.25))
    latent = layer.feed((0, 0, x))
    assert (latent[0] == 0).all()
    torch.testing.assert_close(latent[1], torch.full((64,), -0.25))  # the norm of a constant row is its sign


@pytest.mark.parametrize("route", ROUTES)
def test_compressor_agrees_with_the_vendor(route, golden_kernels):
    """Nine rows at once leave position 8 parked; four single rows follow (6.4)."""
    weights = {name: golden_kernels[f"compressor.{name}"] for name in ("wkv", "wgate", "norm")}
    layer, x = Layer(route, 2, **weights), golden_kernels["compressor.x"]
    latents = [layer.feed((0, 0, x[:9]))[1::2]]
    parked = torch.cat(
        (golden_kernels["compressor.open_u_after9"], golden_kernels["compressor.open_g_after9"])
    )
    torch.testing.assert_close(layer.open_rows(0, 9)[0], parked, rtol=1e-5, atol=1e-5)
    for position in range(9, 13):
        latents.append(layer.feed((0, position, x[position : position + 1]))[: position % 2])
    got, want = torch.cat(latents), golden_kernels["compressor.latents"]
    assert (got != want).float().mean() <= 0.005
    torch.testing.assert_close(got.float(), want.float(), rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("number", [1, 3, 4])
def test_golden_inputs_give_the_golden_latents(route, number, golden_values, golden_weights):
    stem = f"layers.{number}.attn.compressor."
    names = {"wkv": "wkv.weight", "wgate": "wgate.weight", "norm": "norm.weight"}
    weights = {
        key: golden_weights[stem + name] for key, name in names.items() if stem + name in golden_weights
    }
    layer = Layer(route, 1 if number == 4 else 2, inputs=128, **weights)
    latent = layer.feed((0, 0, golden_values[f"L{number}.attn_x"]))
    assert (
        latent[layer.ratio - 1 :: layer.ratio] != golden_values[f"L{number}.latent"]
    ).float().mean() <= 1e-3


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
def test_close_to_float64(route, ratio):
    layer = Layer(route, ratio, quantize=False)
    x = rows_for(layer, 24)
    latent = layer.feed((0, 0, x))
    pooled = x.double() @ layer.wkv.double().T
    if ratio > 1:
        gates = (x.double() @ layer.wgate.double().T).unflatten(0, (-1, ratio))
        pooled = (pooled.unflatten(0, (-1, ratio)) * gates.softmax(1)).sum(1)
    exact = pooled / pooled.pow(2).mean(1, keepdim=True).sqrt() * layer.norm.double()
    torch.testing.assert_close(latent[ratio - 1 :: ratio].double(), exact, rtol=1e-5, atol=1e-5)
    turned = rope.reference(latent, layer.table, torch.arange(24) // ratio * ratio, False)
    torch.testing.assert_close(layer.entries(0, 24 // ratio), turned[ratio - 1 :: ratio])


@pytest.mark.parametrize("ratio", [1, 2, 4])
@pytest.mark.parametrize("quantize", [True, False])
def test_native_is_made_of_the_other_operations(ratio, quantize, same_bytes):
    layer = Layer("native", ratio, quantize=quantize)
    x = rows_for(layer, 13)
    latent = layer.feed((0, 0, x))
    if ratio == 1:
        value = linear.native(x, layer.wkv, x.dtype)
        same_bytes(latent, rms_norm.native(value, layer.norm, 1e-20))
    else:
        products = [linear.native(x, weight, torch.float32) for weight in (layer.wkv, layer.wgate)]
        parked = torch.cat(products, dim=1)
        same_bytes(layer.ring[1, torch.arange(6, 13) % RING], parked[6:])
    entries = torch.arange(13 // ratio)
    record = rope.native(latent[ratio - 1 :: ratio].contiguous(), layer.table, entries * ratio, False)
    record = quantize_fp4.native(record, "e4m3") if quantize else record
    same_bytes(layer.entries(0, 13 // ratio), record)


@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize("ratio", [1, 2, 3])
@pytest.mark.parametrize("route", ROUTES)
def test_every_split_gives_the_same_bytes(route, ratio, quantize, same_bytes):
    """All ways to cut seven rows, hence token by token too, beside a request that is cut otherwise (6.4)."""

    def run(counts):
        layer = Layer(route, ratio, quantize=quantize)
        x, other, parts = rows_for(layer, 7), rows_for(layer, 20, seed=2), []
        for step, (first, count) in enumerate(
            zip(itertools.accumulate(counts, initial=0), counts, strict=False)
        ):
            around = (2, 2 * step, other[2 * step : 2 * step + 2])
            chunks = [(0, first, x[first : first + count])]
            chunks = [around, *chunks] if step % 2 else [*chunks, around]
            latent = layer.feed(*chunks, padding=step)
            begin = 2 if step % 2 else 0
            parts.append(latent[begin : begin + count])
            assert (latent[len(latent) - step :] == 0).all()
        return torch.cat(parts), layer.entries(0, 7 // ratio), layer.open_rows(0, 7)

    whole = run([7])
    cuts = itertools.chain.from_iterable(itertools.combinations(range(1, 7), count) for count in range(1, 7))
    for cut in list(cuts) if route == "native" else [(3,), (1, 2), (1, 2, 3, 4, 5, 6)]:
        counts = [after - before for before, after in itertools.pairwise([0, *cut, 7])]
        for got, want in zip(run(counts), whole, strict=True):
            same_bytes(got, want)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("ratio", [2, 3])
def test_a_chunk_longer_than_the_ring_reads_before_it_writes(route, ratio, same_bytes):
    """The last rows of a chunk lie in the ring where its first rows find their predecessors."""
    whole, split = Layer(route, ratio), Layer(route, ratio)
    x = rows_for(whole, 60)
    whole.feed((1, 0, x))
    for first, last in itertools.pairwise([0, 5, 25, 26, 40, 41, 60]):
        split.feed((1, first, x[first:last]))
    same_bytes(split.entries(1, 60 // ratio), whole.entries(1, 60 // ratio))
    same_bytes(split.ring[2], whole.ring[2])


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("back", [1, 3, RING - 1])
def test_rows_taken_back_leave_no_trace(route, back, same_bytes):
    straight, layer = Layer(route, 2), Layer(route, 2)
    right = rows_for(layer, 15)
    straight.feed((0, 0, right))
    wrong = right.clone()
    wrong[12 - back : 12] = -right[12 - back : 12].flip(1)
    layer.feed((0, 0, wrong[:12]))
    layer.feed((0, 12 - back, right[12 - back : 13]))
    layer.feed((0, 13, right[13:]))
    same_bytes(layer.entries(0, 7), straight.entries(0, 7))
    same_bytes(layer.open_rows(0, 15), straight.open_rows(0, 15))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("ratio", [1, 2])
def test_only_what_closes_is_written(route, ratio, same_bytes):
    layer = Layer(route, ratio)
    layer.region.fill_(7)
    layer.ring.fill_(3.5)
    layer.feed((1, 3, rows_for(layer, 6)), (0, 0, rows_for(layer, 1)), padding=3)
    written = (layer.region != 7).any(-1).nonzero().tolist()
    entries = [*range(4, 9)] + [3] if ratio == 1 else [1, 2, 3]
    expected = [[layer.blocks_of(1)[entry // ENTRIES], entry % ENTRIES] for entry in entries]
    assert sorted(written) == sorted(expected + [[layer.blocks_of(0)[0], 0]] * (ratio == 1))
    if ratio > 1:
        parked = (layer.ring != 3.5).any(-1).nonzero().tolist()
        assert parked == [[1, 0]] + [[2, entry] for entry in sorted(p % RING for p in range(3, 9))]


@pytest.mark.parametrize("route", ROUTES)
def test_a_nan_stays_in_its_group(route, same_bytes):
    good, bad = Layer(route, 2), Layer(route, 2)
    x = rows_for(good, 12)
    want = good.feed((0, 0, x))
    poisoned = x.clone()
    poisoned[4, 7] = math.nan
    got = bad.feed((0, 0, poisoned))
    assert got[5].isnan().all()
    others = [row for row in range(12) if row != 5]
    same_bytes(got[others], want[others])
    assert dequantize_fp4.reference(bad.entries(0, 3)[2], "e4m3", torch.float32).isnan().all()
    same_bytes(bad.entries(0, 6)[[0, 1, 3, 4, 5]], good.entries(0, 6)[[0, 1, 3, 4, 5]])


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("gate", [200.0, 1e30, 3e38])
def test_gates_of_any_size_choose_one_row(route, gate):
    x = torch.zeros(2, 96)
    x[0, 0], x[1, 1] = 1, 1
    value, gates = torch.zeros(64, 96), torch.zeros(64, 96)
    value[:, 0], value[:, 1], gates[0, 0], gates[1, 1], gates[2, 0] = 1, 2, gate, gate, -gate
    layer = Layer(route, 2, quantize=False, wkv=value, wgate=gates, norm=torch.ones(64))
    latent = layer.feed((0, 0, x))[1]
    torch.testing.assert_close(
        latent / latent[3] * 1.5, torch.tensor([1, 2, 2] + [1.5] * 61), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("ratio", [1, 2])
def test_the_number_of_threads_changes_no_byte(ratio, same_bytes, set_threads):
    results = []
    for threads in (1, 2):
        set_threads(threads)
        layer = Layer("native", ratio, inputs=512, size=256)
        chunks = [(request, 0, rows_for(layer, 90, seed=request)) for request in range(3)]
        results.append((layer.feed(*chunks), layer.region, layer.ring))
    for got, want in zip(*results, strict=True):
        same_bytes(got, want)


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize("rows", [1, 6, 20])
def test_packed_weights_give_the_same_bytes(ratio, quantize, rows, same_bytes):
    plain, packed = Layer("native", ratio, quantize=quantize), Layer("native", ratio, quantize=quantize)
    packed.wkv, packed.wgate = pack_linear(plain.wkv), pack_linear(plain.wgate) if ratio > 1 else plain.wgate
    assert packed.wkv.dim() == 3
    x = rows_for(plain, rows)
    same_bytes(packed.feed((0, 1, x)), plain.feed((0, 1, x)))
    same_bytes(packed.region, plain.region)
    same_bytes(packed.ring, plain.ring)
    references = [Layer("reference", ratio, quantize=quantize) for _ in range(2)]
    references[1].wkv, references[1].wgate = packed.wkv, packed.wgate
    same_bytes(*(reference.feed((0, 1, x)) for reference in references))


@pytest.mark.parametrize("quantize", [True, False])
def test_regions_inside_arenas_and_beyond_32_bits(quantize, tmp_path, same_bytes):
    """Blocks and slots lie three billion items apart, in files that are nearly all hole."""
    layer, far = Layer("native", 2, quantize=quantize), 3_000_000_000
    layer.blocks_of = lambda request: [1, 2]
    near = Layer("native", 2, quantize=quantize)
    near.blocks_of = layer.blocks_of

    def spread(small, outer, name):
        size = (outer - 1) * far + small[0].numel()
        arena = torch.from_file(str(tmp_path / name), shared=True, size=size, dtype=small.dtype)
        return arena.as_strided((outer, *small.shape[1:]), (far, small.shape[2], 1))

    layer.region, layer.ring = spread(layer.region, 3, "blocks"), spread(layer.ring, 3, "slots")
    x = rows_for(layer, 21)
    for each in (layer, near):
        each.latents = torch.cat([each.feed((1, 0, x[:9])), each.feed((1, 9, x[9:]))])
    same_bytes(layer.latents, near.latents)
    same_bytes(layer.entries(1, 10), near.entries(1, 10))
    same_bytes(layer.ring[2].contiguous(), near.ring[2])


def test_wrong_arguments_are_refused():
    layer = Layer("native", 2)
    good = layer.arguments([(1, 3, rows_for(layer, 6))], padding=1)

    def refused(match, *, native_only=False, **changes):
        inputs = list(good)
        for index, value in changes.items():
            inputs[int(index[1:])] = value
        routes = (("reference", UsageError), ("fake", UsageError), ("native", RuntimeError))
        for route, error in routes[2:] if native_only else routes:
            with pytest.raises(error, match=match):
                getattr(compress, route)(*inputs)

    refused("wkv:? must have shape", _1=good[1][:, :-1].contiguous())
    refused("wgate:? must have 64 outputs", _2=good[2][:32].contiguous())
    refused("norm_weight:? must have shape", _3=good[3][:-1].contiguous())
    refused("open_group:? must have shape", _5=good[5][..., :-1])
    refused("open_group:? must hold at least 2 positions, got 1", _5=good[5][:, :1])
    refused("table:? must have an even number of columns", _6=good[6][:, :-1].contiguous())
    refused("region.*(uint8|unsupported dtype)", _7=good[7].float())
    refused("positions:? must have shape", _8=good[8][:-1].contiguous())
    refused("slot_ids:? must have shape", _11=good[11].repeat(2))
    refused("ratio:? must be at least 1, got 0", _14=0)
    refused("request_index must lie in 0 .. 0, got 1", native_only=True, _9=good[9] + 1)
    refused("block_table must lie in 0 .. 39, got 40", native_only=True, _10=good[10] + 16)
    refused("slot_ids must lie in 0 .. 3, got 4", native_only=True, _11=good[11] + 2)
    refused("lies beyond the 12 blocks", native_only=True, _8=good[8] + 200)
    refused("lies beyond the 4 rows of the table", native_only=True, _6=good[6][:4].contiguous())
    refused("does not fit a request", native_only=True, _12=good[12] - 1)
    refused("does not fit a request", native_only=True, _13=good[13] - 1)
