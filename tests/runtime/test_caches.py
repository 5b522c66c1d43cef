"""Arenas and their region views: addresses, independence of neighbours, refusal of what does not fit."""

import pytest
import torch
from fake_graphs import fake_cache_layout, fake_limits
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.artifacts.schema import CacheLayout, CacheRegion
from deepinfer.errors import ResourceError
from deepinfer.runtime.caches import CacheArenas

ITEM_BYTES = {"uint8": 1, "bfloat16": 2, "int32": 4, "float32": 4}


def layout(regions: list[CacheRegion], block_bytes: int, slot_bytes: int, count: int = 3) -> CacheLayout:
    return CacheLayout(
        block_tokens=128,
        block_bytes=block_bytes,
        num_blocks=count,
        slot_bytes=slot_bytes,
        num_slots=count,
        max_blocks_per_request=1,
        regions=tuple(regions),
    )


def region(name: str, kind: str, offset: int, entries: int, shape: tuple, dtype: str) -> CacheRegion:
    return CacheRegion(
        name=name, kind=kind, offset_bytes=offset, entries=entries, record_shape=shape, dtype=dtype
    )


def test_every_byte_of_a_region_is_where_the_layout_says() -> None:
    arenas = CacheArenas.allocate(
        layout(
            [
                region("a", "paged", 0, 4, (3,), "uint8"),
                region("b", "paged", 16, 2, (2, 2), "float32"),
                region("c", "state", 8, 5, (1,), "int32"),
            ],
            block_bytes=64,
            slot_bytes=32,
        )
    )
    a, b, c = (arenas.regions[name] for name in "abc")
    assert (a.shape, b.shape, c.shape) == ((3, 4, 3), (3, 2, 2, 2), (3, 5, 1))
    a[2, 3, 1] = 99
    assert arenas.blocks[2 * 64 + 3 * 3 + 1] == 99
    b[1, 1, 0, 1] = 1.5
    assert arenas.blocks[64 + 16 + (4 + 1) * 4 :][:4].view(torch.float32) == 1.5
    c[2, 4] = -5
    assert arenas.slots[2 * 32 + 8 + 16 :][:4].view(torch.int32) == -5
    assert list(arenas.regions) == ["a", "b", "c"]
    assert arenas.total_bytes == 3 * 96


@given(st.data())
def test_regions_of_random_layouts_do_not_touch_each_other(data: st.DataObject) -> None:
    regions, offset = [], 0
    for index in range(data.draw(st.integers(1, 5))):
        dtype = data.draw(st.sampled_from(sorted(ITEM_BYTES)))
        offset = -(-offset // 4) * 4 + 4 * data.draw(st.integers(0, 2))
        shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
        entries = data.draw(st.integers(1, 5))
        regions.append(region(str(index), "paged", offset, entries, shape, dtype))
        offset += entries * torch.Size(shape).numel() * ITEM_BYTES[dtype]
    arenas = CacheArenas.allocate(layout(regions, -(-offset // 4) * 4 + 8, 0))
    assert not arenas.blocks.any()
    for index, view in enumerate(arenas.regions.values()):
        view.view(view.dtype).fill_(index + 1)
    for index, view in enumerate(arenas.regions.values()):
        assert (view == index + 1).all()
    arenas.blocks.zero_()
    assert not any(view.any() for view in arenas.regions.values())


def test_region_that_does_not_fit_its_unit_is_refused() -> None:
    for bad in (
        region("a", "paged", 60, 1, (5,), "uint8"),
        region("a", "paged", 2, 1, (1,), "float32"),
        region("a", "state", 0, 1, (1,), "uint8"),
    ):
        with pytest.raises(AssertionError, match="region a"):
            CacheArenas.allocate(layout([bad], 64, 0))


def test_memory_that_is_not_to_be_had_is_a_resource_error() -> None:
    with pytest.raises(ResourceError, match="smaller max_model_len"):
        CacheArenas.allocate(layout([], 2**50, 0, count=2**12))


def test_untouched_memory_is_not_resident() -> None:
    """A pool for many long requests must not cost its size before it is used."""
    arenas = CacheArenas.allocate(
        layout([region("a", "paged", 0, 1, (4096,), "uint8")], 2**20, 0, count=2**14)
    )
    assert arenas.total_bytes == 2**34
    arenas.regions["a"][1] = 1
    assert arenas.regions["a"][2**14 - 1].sum() == 0


def test_views_keep_the_memory_alive() -> None:
    view = CacheArenas.allocate(fake_cache_layout(fake_limits())).regions["layers.0.window"]
    view.fill_(7)
    assert (view == 7).all()
