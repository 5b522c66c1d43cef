"""Compression with position biases: float64, windows that overlap, every split, what is written."""

import itertools
import math

import pytest
import torch
from routes import ROUTES

from deepinfer.errors import UsageError
from deepinfer.kernels import compress_biased, hadamard, quantize_fp4, quantize_tail, rope
from deepinfer.kernels.index_topk import index_record_width
from deepinfer.kernels.packing import pack_linear
from deepinfer.kernels.quantize_tail import tail_record_bytes

RING, ENTRIES, SLOTS, SIZE, INPUTS, ROTATED = 13, 8, 3, 64, 96, 16


class Layer:
    """Weights and caches of one layer; request r owns slot r + 1 and blocks of its own."""

    def __init__(self, route, ratio, *, quantize=False, index=False, ring=RING):
        generator = torch.Generator().manual_seed(3)
        self.run, self.ratio, self.overlap = getattr(compress_biased, route), ratio, ratio == 4
        self.quantize, self.index = quantize, index
        self.dtype = torch.bfloat16 if quantize else torch.float32
        width = SIZE * (2 if self.overlap else 1)
        self.wkv, self.wgate = (
            torch.randn(2, width, INPUTS, generator=generator).div(INPUTS**0.5).to(self.dtype)
        )
        self.bias = torch.randn(ratio, width, generator=generator)
        self.norm = torch.rand(SIZE, generator=generator) + 0.5
        angles = torch.randn(512, ROTATED // 2, generator=generator) * 3
        self.table = torch.cat((angles.cos(), angles.sin()), dim=1)
        self.ring = torch.full((SLOTS, ring, 2 * width), math.nan)  # what was never written is never seen
        record = index_record_width(SIZE, True) if index else tail_record_bytes(SIZE, ROTATED)
        self.region = torch.zeros(
            40, ENTRIES, record if quantize else SIZE, dtype=torch.uint8 if quantize else torch.float32
        )

    def feed(self, *chunks, padding=0):
        """`chunks` are (request, first position, rows `[n, D]`), one line of the request table each."""
        counts = [len(rows) for _, _, rows in chunks]
        lines = torch.arange(len(chunks)).repeat_interleave(torch.tensor(counts))
        filler = torch.full((padding, INPUTS), math.nan, dtype=self.dtype)
        return self.run(
            torch.cat([*(rows for _, _, rows in chunks), filler]),
            *(self.wkv, self.wgate, self.bias, self.norm, 1e-6, self.ring, self.table, self.region),
            torch.cat([*(torch.arange(s, s + len(r)) for _, s, r in chunks), torch.full((padding,), -1)]),
            torch.cat([lines, torch.zeros(padding, dtype=torch.int64)]),
            torch.tensor([[12 * request + 1 + block for block in range(12)] for request, _, _ in chunks]),
            torch.tensor([request + 1 for request, _, _ in chunks]),
            torch.tensor([first for _, first, _ in chunks]),
            torch.tensor(counts),
            *(self.ratio, self.overlap, self.quantize, self.index),
        )

    def entries(self, request: int, count: int) -> torch.Tensor:
        return self.region[12 * request + 1 : 12 * request + 13].flatten(0, 1)[:count]


def rows_for(layer: Layer, count: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, INPUTS, generator=generator).to(layer.dtype)


def pooled(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """The normed latents `[entries, d]` in float64, window by window as the text says."""
    value, gate = (x.double() @ weight.double().T for weight in (layer.wkv, layer.wgate))
    gate = gate + layer.bias.double()[torch.arange(len(x)) % layer.ratio]
    latents = []
    for window in range(len(x) // layer.ratio):
        own = slice(window * layer.ratio, (window + 1) * layer.ratio)
        u, g = value[own], gate[own]
        if layer.overlap:
            u, g = u[:, SIZE:], g[:, SIZE:]
            if window:
                before = slice(own.start - layer.ratio, own.start)
                u = torch.cat((value[before, :SIZE], u))
                g = torch.cat((gate[before, :SIZE], g))
        pool = (u * g.softmax(0)).sum(0)
        latents.append(layer.norm.double() * pool * torch.rsqrt(pool.pow(2).mean() + 1e-6))
    return torch.stack(latents)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("ratio", [4, 2, 8])
def test_entries_agree_with_float64(route, ratio):
    layer = Layer(route, ratio)
    x = rows_for(layer, 45)
    latent = layer.feed((0, 0, x))
    want = pooled(layer, x)
    closed = latent[ratio - 1 :: ratio].contiguous()
    torch.testing.assert_close(closed.double(), want, rtol=1e-4, atol=1e-5)
    closing = torch.arange(45) % ratio == ratio - 1
    assert (latent[~closing] == 0).all()
    first = torch.arange(len(want)) * ratio
    assert torch.equal(layer.entries(0, len(want)), rope(closed, layer.table, first, False))
    assert (layer.entries(0, 96)[len(want) :] == 0).all()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("index", [False, True])
def test_records_are_those_of_the_formats(route, index):
    layer = Layer(route, 4, quantize=True, index=index)
    latent = layer.feed((0, 0, rows_for(layer, 21)))[3::4].contiguous()
    turned = rope(latent, layer.table, torch.arange(5) * 4, False)
    want = quantize_fp4(hadamard(turned), "e8m0") if index else quantize_tail(turned, ROTATED)
    assert torch.equal(layer.entries(0, 5), want)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("ratio", "ring"), [(4, 13), (4, 8), (8, 13), (2, 2)])
@pytest.mark.parametrize("quantize", [False, True])
def test_every_split_gives_the_same_bytes(route, ratio, ring, quantize, same_bytes):
    whole = Layer(route, ratio, quantize=quantize, ring=ring)
    x = rows_for(whole, 27)
    want = whole.feed((0, 0, x))
    for cuts in ([1], [3, 4, 9], [8, 16, 24], [5, 6, 7, 20], list(range(1, 27))):
        layer = Layer(route, ratio, quantize=quantize, ring=ring)
        got = [layer.feed((0, a, x[a:b]), padding=2)[: b - a] for a, b in itertools.pairwise([0, *cuts, 27])]
        same_bytes(torch.cat(got), want)
        same_bytes(layer.entries(0, 96), whole.entries(0, 96))
        kept = torch.arange(max(0, 27 - ring), 27) % ring
        same_bytes(layer.ring[1, kept], whole.ring[1, kept])


@pytest.mark.parametrize("route", ROUTES)
def test_requests_side_by_side_and_packed_weights_change_nothing(route, same_bytes):
    alone, together = Layer(route, 4), Layer(route, 4)
    x, y = rows_for(alone, 19), rows_for(alone, 10, seed=2)
    want = alone.feed((0, 0, x))
    together.wkv, together.wgate = pack_linear(together.wkv), pack_linear(together.wgate)
    together.feed((0, 0, x[:7]))
    got = together.feed((1, 0, y), (0, 7, x[7:]))
    same_bytes(got[10:], want[7:])
    same_bytes(together.entries(0, 96), alone.entries(0, 96))


@pytest.mark.parametrize("route", ROUTES[1:])
def test_every_route_writes_what_the_reference_writes(route):
    layers = [Layer(each, 4) for each in (route, "reference")]
    for layer in layers:
        layer.feed((0, 0, rows_for(layer, 30)), (1, 0, rows_for(layer, 11, seed=4)))
    for name in ("ring", "region"):
        got, want = (getattr(layer, name) for layer in layers)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ring": 7}, "open_group: must hold at least 8 positions"),
        ({"bias": torch.zeros(3, 128)}, "bias"),
        ({"wgate": torch.zeros(64, INPUTS)}, "wgate"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, message):
    for route in ROUTES:
        layer = Layer(route, 4, ring=change.get("ring", RING))
        for name in ("bias", "wgate"):
            setattr(layer, name, change.get(name, getattr(layer, name)))
        with pytest.raises((UsageError, RuntimeError), match=message.split(":")[0]):
            layer.feed((0, 0, rows_for(layer, 5)))
