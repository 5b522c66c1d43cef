"""Pools from a memory budget: what fits, what is refused, what the manifest then says."""

import argparse
from pathlib import Path

import pytest

from deepinfer.cache_sizes import resolve_sizes
from deepinfer.cli.common import size_in_bytes
from deepinfer.errors import SettingsError
from deepinfer.graphs.config import load_config
from deepinfer.settings import CompileConfig


@pytest.mark.parametrize("spare", [0, 1, 7])
def test_a_budget_gives_as_many_blocks_as_it_holds(golden_dir: Path, spare: int) -> None:
    config = load_config(golden_dir)
    _, full = resolve_sizes(CompileConfig(max_model_len=256, max_num_seqs=4), config)
    slots, least = full.num_slots * full.slot_bytes, 1 + full.max_blocks_per_request
    for blocks in range(least, full.num_blocks):
        budget = slots + blocks * full.block_bytes + spare
        options, layout = resolve_sizes(
            CompileConfig(max_model_len=256, max_num_seqs=4, kv_cache_memory_bytes=budget), config
        )
        assert layout.num_blocks == options.num_blocks == blocks
        assert layout.num_blocks * layout.block_bytes + slots <= budget
        same, _ = resolve_sizes(CompileConfig(max_model_len=256, max_num_seqs=4, num_blocks=blocks), config)
        assert options == same, "a budget is another way to say how many blocks"


def test_a_large_budget_reserves_no_block_that_could_never_be_used(golden_dir: Path) -> None:
    config = load_config(golden_dir)
    options, layout = resolve_sizes(CompileConfig(kv_cache_memory_bytes=1 << 40), config)
    assert (options, layout) == resolve_sizes(CompileConfig(), config)


def test_a_budget_too_small_for_one_request_is_refused_with_what_is_needed(golden_dir: Path) -> None:
    config = load_config(golden_dir)
    _, full = resolve_sizes(CompileConfig(), config)
    needed = full.num_slots * full.slot_bytes + (1 + full.max_blocks_per_request) * full.block_bytes
    resolve_sizes(CompileConfig(kv_cache_memory_bytes=needed), config)
    with pytest.raises(SettingsError, match=r"kv_cache_memory_bytes.*too few.*lower max_num_seqs"):
        resolve_sizes(CompileConfig(kv_cache_memory_bytes=needed - 1), config)


def test_a_budget_and_a_number_of_blocks_exclude_each_other() -> None:
    with pytest.raises(SettingsError, match="one of the two"):
        CompileConfig(num_blocks=9, kv_cache_memory_bytes=1 << 30)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("123", 123), ("1KiB", 1024), ("2 GiB", 2 << 30), (" 7MiB ", 7 << 20), ("1TiB", 1 << 40)],
)
def test_sizes_are_read(text: str, expected: int) -> None:
    assert size_in_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1.5GiB", "2GB", "2gib", "1e9", "9" * 16])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="2GiB"):
        size_in_bytes(text)
