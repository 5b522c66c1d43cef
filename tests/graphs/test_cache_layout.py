"""Cache layout: published sizes of the released model, and that regions never overlap."""

import dataclasses
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_dirs import release_config

from deepinfer.errors import SettingsError
from deepinfer.graphs.cache_layout import CacheLayout, cache_layout
from deepinfer.graphs.config import load_config, parse_config


@pytest.fixture(scope="module")
def release():
    return parse_config(release_config())


@pytest.fixture(scope="module")
def layout(release):
    return cache_layout(release, "native", max_num_seqs=8, max_model_len=16_389)


def test_released_records_have_their_byte_sizes(layout):
    sizes = {
        name: layout.region(f"layers.2.{name}").record_bytes
        for name in ("window", "compressed_kv", "index_key")
    }
    assert sizes == {"window": 528, "compressed_kv": 288, "index_key": 68}
    assert layout.region("layers.2.open_group").record_bytes == 4096


def test_released_block_size(layout):
    assert layout.record_bytes_per_block() == 113_920
    assert layout.block_bytes == 114_048
    owners = {
        layer: sum(
            layout.region(f"layers.{layer}.{part}").total_bytes for part in ("compressed_kv", "index_key")
        )
        for layer in (2, 8, 14, 20)
    }
    assert owners == {2: 22_784, 8: 22_784, 14: 22_784, 20: 45_568}


def test_released_rings_and_slot(layout):
    windows = [region for region in layout.of_kind("state") if region.name.endswith("window")]
    assert len(windows) == 40
    assert {(r.entries, r.total_bytes) for r in windows} == {(134, 70_752)}
    assert sum(r.total_bytes for r in windows[:20]) == 1_415_040
    pending = [region for region in layout.regions if region.name.endswith("open_group")]
    assert [(r.name, r.entries) for r in pending] == [(f"layers.{n}.open_group", 7) for n in (2, 8, 14)]
    assert sum(r.total_bytes for r in pending) == 86_016
    history = layout.region("token_history")
    assert (history.entries, history.dtype, history.record_shape) == (9, "int32", (1,))
    # the published total of a slot without the rings of the three draft layers, and the token history
    assert layout.slot_bytes == 3_128_352 - 212_256 + 9 * 4 + 28
    assert layout.slot_bytes % 64 == 0


def test_entries_per_block_follow_the_ratio(layout):
    entries = {r.name: (r.entries, r.tokens_per_entry) for r in layout.of_kind("paged")}
    assert entries["layers.2.compressed_kv"] == (64, 2)
    assert entries["layers.20.index_key"] == (128, 1)
    assert all(count * tokens == layout.block_tokens for count, tokens in entries.values())


def test_pools_hold_every_request_at_full_length_besides_id_zero(layout):
    assert layout.max_blocks_per_request == 129
    assert layout.num_blocks == 1 + 8 * 129
    assert layout.num_slots == 9


def test_golden_block_is_rounded_to_both_record_sizes(golden_dir):
    layout = cache_layout(load_config(golden_dir), "native", 1, 128)
    assert layout.record_bytes_per_block() == 128 * 140
    assert layout.block_bytes == 18_216
    assert layout.block_bytes % 36 == 0
    assert layout.block_bytes % 66 == 0


def test_float32_records_are_the_vectors(golden_dir):
    layout = cache_layout(load_config(golden_dir), "float32", 1, 128)
    region = layout.region("layers.4.index_key")
    assert (region.dtype, region.record_shape, region.record_bytes) == ("float32", (64,), 256)
    assert layout.region("layers.4.window").record_shape == (64,)
    assert layout.block_bytes == layout.record_bytes_per_block()
    assert layout.block_bytes % 64 == 0


def test_without_engram_there_is_no_token_history(golden_dir):
    config = dataclasses.replace(load_config(golden_dir), engram_layer_ids=(), engram_num_embeddings=())
    assert "token_history" not in [r.name for r in cache_layout(config, "native", 1, 128).regions]


def test_the_layout_is_json(layout):
    again = json.loads(json.dumps(layout.to_dict()))
    assert again == layout.to_dict()
    assert again["regions"][0]["record_shape"] == [528]


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        ({"precision": "bf16"}, "precision"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"max_model_len": 4097}, "max_model_len"),
        ({"max_model_len": 129, "num_blocks": 2}, "num_blocks"),
    ],
)
def test_limits_that_cannot_work_are_refused(golden_dir, arguments, where):
    given_arguments = {"precision": "native", "max_num_seqs": 1, "max_model_len": 128} | arguments
    with pytest.raises(SettingsError) as caught:
        cache_layout(load_config(golden_dir), **given_arguments)
    assert caught.value.where == where


def test_a_given_number_of_blocks_is_kept(golden_dir):
    assert cache_layout(load_config(golden_dir), "native", 4, 256, num_blocks=3).num_blocks == 3


def check_disjoint(layout: CacheLayout) -> None:
    for kind, size in (("paged", layout.block_bytes), ("state", layout.slot_bytes)):
        end = 0
        for region in layout.of_kind(kind):
            assert region.offset_bytes >= end
            assert region.offset_bytes % region.item_bytes == 0
            assert size % region.item_bytes == 0
            end = region.offset_bytes + region.total_bytes
        assert end <= size


@given(
    precision=st.sampled_from(["native", "float32"]),
    head_dim=st.integers(1, 8).map(lambda n: 32 * n),
    index_dim=st.integers(1, 6).map(lambda n: 32 * n),
    window=st.integers(1, 200),
    ngram=st.integers(2, 6),
)
def test_regions_are_aligned_and_disjoint_for_any_sizes(
    golden_dir, precision, head_dim, index_dim, window, ngram
):
    config = dataclasses.replace(
        load_config(golden_dir),
        head_dim=head_dim,
        index_head_dim=index_dim,
        sliding_window=window,
        engram_max_ngram_size=ngram,
    )
    check_disjoint(cache_layout(config, precision, 2, 300))


@pytest.mark.parametrize("precision", ["native", "float32"])
def test_views_by_stride_touch_every_byte_once(golden_dir, precision):
    """Writing each region's views leaves exactly the padding untouched."""
    layout = cache_layout(load_config(golden_dir), precision, 2, 200)
    for kind, count, size in (
        ("paged", layout.num_blocks, layout.block_bytes),
        ("state", layout.num_slots, layout.slot_bytes),
    ):
        arena = torch.zeros(count * size, dtype=torch.uint8)
        for region in layout.of_kind(kind):
            typed = arena.view(getattr(torch, region.dtype))
            shape = (count, region.entries, *region.record_shape)
            view = torch.as_strided(
                typed, shape, layout.strides(region), region.offset_bytes // region.item_bytes
            )
            assert (view == 0).all(), region.name  # nobody else wrote here
            typed_ones = torch.full((region.item_bytes,), 255, dtype=torch.uint8).view(typed.dtype)
            view.copy_(typed_ones.expand(shape))
        written = sum(region.total_bytes for region in layout.of_kind(kind))
        assert int((arena == 255).sum()) == count * written
