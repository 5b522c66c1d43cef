"""Index keys: golden values, the operations they are made of, which rows write, any company."""

import math

import pytest
import torch
from routes import ROUTES

from deepinfer.errors import UsageError
from deepinfer.kernels import index_key, linear, quantize_fp4, rms_norm, rope
from deepinfer.kernels.packing import pack_linear
from deepinfer.kernels.quantize_fp4 import dequantize_fp4_reference


def make(ratio, quantize, rows=30, seed=0):
    """One request from position 5 on, then a row of a second one, then padding with NaN."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16 if quantize else torch.float32
    latent = torch.randn(rows + 3, 64, generator=generator).to(dtype)
    latent[rows + 1 :] = math.nan
    wk = torch.randn(96, 64, generator=generator).div(8).to(dtype)
    angles = torch.randn(64, 16, generator=generator) * 3
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    region = torch.zeros(12, 8, 51 if quantize else 96, dtype=torch.uint8 if quantize else torch.float32)
    positions = torch.cat((torch.arange(5, 5 + rows), torch.tensor([11, -1, -1])))
    lines = torch.tensor([0] * rows + [1, 0, 0])
    norm = torch.rand(96, generator=generator) + 0.5
    blocks = torch.tensor([[9, 2, 5, 7, 1], [4, 3, 0, 0, 0]])
    return [latent, wk, norm, 1e-20, table, region, positions, lines, blocks, ratio, quantize]


def written(inputs) -> dict[tuple[int, int], torch.Tensor]:
    """Record of every (request, entry) that the rows of `inputs` close, from its region."""
    region, positions, lines, blocks, ratio = inputs[5], *inputs[6:10]
    found = {}
    for position, line in zip(positions.tolist(), lines.tolist(), strict=True):
        if position >= 0 and (position + 1) % ratio == 0:
            entry = position // ratio
            found[line, entry] = region[blocks[line, entry // 8], entry % 8].clone()
    return found


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("layer", [1, 3, 4])
def test_golden_latents_give_the_golden_keys(route, layer, golden_values, golden_weights):
    """Without rotation at entry 0; later entries rotate by tables that the graphs build."""
    stem, latent = f"layers.{layer}.attn.indexer.", golden_values[f"L{layer}.latent"]
    ratio = 1 if layer == 4 else 2
    table = torch.zeros(4 * ratio, 32)
    table[:, :16] = 1
    region = torch.zeros(2, 4, 34, dtype=torch.uint8)
    getattr(index_key, route)(
        *(latent[:1], golden_weights[stem + "wk.weight"], golden_weights[stem + "k_norm.weight"], 1e-20),
        *(table, region, torch.tensor([ratio - 1]), torch.tensor([0]), torch.tensor([[1]]), ratio, True),
    )
    key = dequantize_fp4_reference(region[1, 0], "e8m0", torch.bfloat16)
    assert (key != golden_values[f"L{layer}.index_k"][0]).float().mean() <= 0.02


@pytest.mark.parametrize("ratio", [1, 2, 3])
@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize("route", ROUTES)
def test_keys_are_made_of_the_other_operations(route, ratio, quantize, same_bytes):
    inputs = make(ratio, quantize)
    latent, wk, norm, eps, table, _, positions, lines = inputs[:8]
    getattr(index_key, route)(*inputs)
    run = {op.name: getattr(op, route) for op in (linear, rms_norm, rope, quantize_fp4)}
    keys = run["rms_norm"](run["linear"](latent, wk, latent.dtype), norm, eps)
    keys = run["rope"](keys, table, positions.clamp(min=0) // ratio * ratio, False)
    records = run["quantize_fp4"](keys, "e8m0") if quantize else keys
    found = written(inputs)
    for row, (position, line) in enumerate(zip(positions.tolist(), lines.tolist(), strict=True)):
        if position >= 0 and (position + 1) % ratio == 0:
            same_bytes(found[line, position // ratio], records[row])
    assert int(inputs[5].any(-1).sum()) == len(found)  # and nothing else, block 0 included


@pytest.mark.parametrize("quantize", [True, False])
def test_native_agrees_with_the_reference_and_float64(quantize):
    native, reference = make(2, quantize), make(2, quantize)
    index_key.native(*native)
    index_key.reference(*reference)
    if quantize:
        assert (native[5] != reference[5]).float().mean() <= 0.01
        return
    torch.testing.assert_close(native[5], reference[5], rtol=1e-5, atol=1e-5)
    latent, wk, norm, _, table = native[:5]
    exact = latent[:31].double() @ wk.double().T
    exact = exact / exact.pow(2).mean(1, keepdim=True).sqrt() * norm.double()
    u, v = exact[:, -32:].unflatten(1, (16, 2)).unbind(-1)
    cos, sin = table[native[6][:31] // 2 * 2].double().chunk(2, dim=1)
    turned = torch.stack((u * cos - v * sin, u * sin + v * cos), dim=-1).flatten(1)
    exact = torch.cat((exact[:, :-32], turned), dim=1)
    for (line, entry), record in written(native).items():
        row = next(row for row in range(31) if native[7][row] == line and native[6][row] == entry * 2 + 1)
        torch.testing.assert_close(record.double(), exact[row], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("ratio", [1, 2])
def test_a_row_does_not_depend_on_the_others(route, ratio, same_bytes, set_threads):
    set_threads(1)
    inputs = make(ratio, True)
    getattr(index_key, route)(*inputs)
    whole = written(inputs)
    set_threads(2)
    order = torch.randperm(33, generator=torch.Generator().manual_seed(1))
    for rows in (*torch.arange(33).split(1), order, order[:5], torch.arange(3, 20)):
        part = make(ratio, True)
        for index in (0, 6, 7):
            part[index] = part[index][rows]
        getattr(index_key, route)(*part)
        for place, record in written(part).items():
            same_bytes(record, whole[place])


def test_packed_weights_give_the_same_bytes(same_bytes):
    plain, packed = make(2, True), make(2, True)
    packed[1] = pack_linear(plain[1])
    assert packed[1].dim() == 3
    index_key.native(*plain)
    index_key.native(*packed)
    same_bytes(packed[5], plain[5])


@pytest.mark.parametrize("route", ROUTES)
def test_a_nan_stays_in_its_entry(route, same_bytes):
    good, bad = make(1, True), make(1, True)
    bad[0][7, 3] = math.nan
    getattr(index_key, route)(*good)
    getattr(index_key, route)(*bad)
    for place, record in written(bad).items():
        if place == (0, 12):
            assert dequantize_fp4_reference(record, "e8m0", torch.float32).isnan().all()
        else:
            same_bytes(record, written(good)[place])


@pytest.mark.parametrize("route", ROUTES)
def test_no_rows_and_rows_that_close_nothing_write_nothing(route):
    inputs = make(4, True, rows=2)
    for rows in (slice(0, 0), slice(0, 2)):
        part = [value[rows] if index in (0, 6, 7) else value for index, value in enumerate(inputs)]
        assert getattr(index_key, route)(*part) is None
    assert not inputs[5].any()


def test_wrong_arguments_are_refused():
    good = make(2, True)

    def refused(match, *, native_only=False, **changes):
        inputs = list(good)
        for index, value in changes.items():
            inputs[int(index[1:])] = value
        routes = (("reference", UsageError), ("fake", UsageError), ("native", RuntimeError))
        for route, error in routes[2:] if native_only else routes:
            with pytest.raises(error, match=match):
                getattr(index_key, route)(*inputs)

    refused("wk:? must have shape", _1=good[1][:, :-1].contiguous())
    refused("multiple of 32, got 48", _1=good[1][:48].contiguous(), _2=good[2][:48].contiguous())
    refused("region:? must have shape", _5=good[5][..., :-1])
    refused("latent:? must be contiguous", _0=good[0].repeat(1, 2)[:, ::2])
    refused("request_index must lie in 0 .. 1, got 2", native_only=True, _7=good[7] + 1)
    refused("block_table must lie in 0 .. 11, got 14", native_only=True, _8=good[8] + 5)
    refused("lies beyond the 5 blocks", native_only=True, _6=good[6] + 80)
    refused("lies beyond the 8 rows of the table", native_only=True, _4=good[4][:8].contiguous())
