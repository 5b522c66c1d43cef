"""Rotary embedding against published vectors, the vendor's tables, and its own invariants (spec 4, 18.4)."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_dirs import release_config

from deepinfer.graphs.config import parse_config
from deepinfer.graphs.rope import (
    COMPRESSED_TABLE,
    WINDOW_TABLE,
    inverse_frequencies,
    rope_table,
    rope_tables,
    table_for_layer,
)
from deepinfer.kernels.rope import rotate

RELEASE = parse_config(release_config())


@pytest.fixture(scope="module")
def release_tables() -> dict[str, torch.Tensor]:
    return rope_tables(RELEASE, 70000)


def test_yarn_frequencies_of_the_release():
    frequencies = inverse_frequencies(64, 160000.0, RELEASE.rope_scaling)
    expected = {
        0: 1.0,
        1: 0.6876560219336321,
        15: 0.003635538583622384,
        16: 0.0022656250,
        20: 2.9697777826e-4,
        24: 1.953125e-5,
        25: 5.372312671356501e-06,
        31: 5.680529036909976e-07,
    }
    for index, value in expected.items():
        assert frequencies[index].item() == pytest.approx(value, rel=1e-6), index


def test_plain_frequencies_of_the_release():
    frequencies = inverse_frequencies(64, 10000.0, None)
    assert frequencies[[0, 1, 15, 31]].tolist() == pytest.approx(
        [1, 0.74989421, 0.01333521, 1.3335e-4], rel=3e-5
    )


def test_yarn_frequencies_of_the_tiny_model(config):
    frequencies = inverse_frequencies(32, config.compress_rope_theta, config.rope_scaling)
    expected = [1, 0.36204171, 0.11879111, 0.03139071, 0.003125, 0.00147772, 0.00069877]
    assert frequencies[:7].tolist() == pytest.approx(expected, rel=1e-5)


def test_an_original_length_of_zero_switches_scaling_off():
    off = dataclasses.replace(RELEASE.rope_scaling, original_max_position_embeddings=0)
    assert torch.equal(inverse_frequencies(64, 160000.0, off), inverse_frequencies(64, 160000.0, None))


def test_a_ramp_of_no_width_still_separates_scaled_from_plain_frequencies():
    """Both corrections fall on one pair: the guard of the division keeps the ramp finite."""
    steep = dataclasses.replace(
        RELEASE.rope_scaling, original_max_position_embeddings=1, beta_fast=32, beta_slow=32
    )
    frequencies = inverse_frequencies(64, 160000.0, steep)
    plain = inverse_frequencies(64, 160000.0, None)
    assert torch.allclose(frequencies[1:], plain[1:] / 16)
    assert frequencies[0] == plain[0]


@pytest.mark.parametrize(("golden_name", "table"), [("main", WINDOW_TABLE), ("compress", COMPRESSED_TABLE)])
def test_tables_agree_with_the_vendor(golden, release_tables, golden_name, table):
    kernels = golden["kernels"]
    rows = release_tables[table][kernels[f"rope.{golden_name}.positions"].long()]
    cos, sin = rows.chunk(2, dim=-1)
    assert torch.allclose(cos, kernels[f"rope.{golden_name}.cos"], rtol=0, atol=1.2e-7)
    assert torch.allclose(sin, kernels[f"rope.{golden_name}.sin"], rtol=0, atol=1.2e-7)


@pytest.mark.parametrize("name", ["main", "compress"])
def test_rotations_equal_the_vendor_bit_for_bit(golden, name):
    kernels = golden["kernels"]
    cos_sin = torch.cat((kernels[f"rope.{name}.cos"], kernels[f"rope.{name}.sin"]), dim=-1)
    x = kernels[f"rope.{name}.x"]
    assert torch.equal(rotate(x, cos_sin, False), kernels[f"rope.{name}.y"])
    assert torch.equal(rotate(x, cos_sin, True), kernels[f"rope.{name}.y_inverse"])


def test_only_the_tail_rotates_in_interleaved_pairs():
    """Position 1 of a table with one pair: (u, v) turns by one radian, everything before stays."""
    table = rope_table(2, 10000.0, None, 2)
    rotated = rotate(torch.tensor([[5.0, 7.0, 1.0, 0.0]]), table[1:], False)
    assert rotated[0].tolist() == pytest.approx([5.0, 7.0, 0.54030231, 0.84147098])
    wide = rope_table(4, 10000.0, None, 2)[1:]
    rotated = rotate(torch.tensor([[0.0, 0.0, 1.0, 0.0]]), wide, False)
    assert rotated[0, :2].tolist() == [0, 0]
    assert rotated[0, 2:].tolist() == pytest.approx([0.99995, 0.00999983])


def test_a_row_rotates_all_its_heads_by_its_own_position():
    table = rope_table(16, 160000.0, RELEASE.rope_scaling, 100)[[3, 99]]
    x = torch.randn(2, 3, 24, generator=torch.Generator().manual_seed(0))
    together = rotate(x, table, False)
    for head in range(3):
        assert torch.equal(together[:, head], rotate(x[:, head], table, False))


@settings(max_examples=40, deadline=None)
@given(position=st.integers(0, 69999), seed=st.integers(0, 2**31), yarn=st.booleans())
def test_the_inverse_undoes_the_rotation(release_tables, position, seed, yarn):
    cos_sin = release_tables[COMPRESSED_TABLE if yarn else WINDOW_TABLE][[position]]
    x = torch.randn(1, 2, 96, generator=torch.Generator().manual_seed(seed))
    back = rotate(rotate(x, cos_sin, False), cos_sin, True)
    assert torch.allclose(back, x, atol=2e-6)
    assert torch.equal(back[..., :32], x[..., :32])


@settings(max_examples=40, deadline=None)
@given(
    distance=st.integers(0, 300),
    first=st.integers(0, 600),
    second=st.integers(0, 600),
    seed=st.integers(0, 2**31),
)
def test_products_depend_on_the_distance_alone(release_tables, distance, first, second, seed):
    table = release_tables[COMPRESSED_TABLE]
    query, key = torch.randn(2, 1, 64, generator=torch.Generator().manual_seed(seed))

    def product(position: int) -> torch.Tensor:
        rotated_key = rotate(key, table[[position]], False)
        return (rotate(query, table[[position + distance]], False) * rotated_key).sum()

    scale = query.norm() * key.norm()
    assert abs(product(first) - product(second)) <= 2e-4 * scale  # angles are float32: 1e3 * 6e-8


def test_layers_with_compression_use_the_scaled_table(config):
    tables = rope_tables(config, 8)
    for layer in range(config.num_hidden_layers):
        name = COMPRESSED_TABLE if config.ratio(layer) else WINDOW_TABLE
        assert table_for_layer(tables, config, layer) is tables[name]
    assert not torch.equal(tables[COMPRESSED_TABLE], tables[WINDOW_TABLE])
