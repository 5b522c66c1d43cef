"""The steps of a comparison: what every graph meets, for any prompts and any limits of an artifact."""

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from deepinfer.artifacts import GraphEntry
from deepinfer.diff_steps import DECODE_STEPS, Chunk, default_lengths, run_steps


class Recorder:
    """Checks every step as it comes and keeps what there was."""

    def __init__(self, manifest: Any) -> None:
        self.manifest, self.steps, self.done = manifest, [], []
        self.lengths: list[int] = []

    def begin(self, lengths: Sequence[int]) -> None:
        cache = self.manifest.cache
        assert 1 <= len(lengths) <= self.manifest.limits.max_num_seqs
        assert sum(-(-length // cache.block_tokens) for length in lengths) <= cache.num_blocks - 1
        self.lengths, self.done = list(lengths), [0] * len(lengths)

    def step(self, entry: GraphEntry, chunks: Sequence[Chunk]) -> None:
        assert chunks and len({chunk.request for chunk in chunks}) == len(chunks) <= entry.request_rows
        assert sum(len(chunk.token_ids) for chunk in chunks) <= entry.bucket
        for chunk in chunks:
            assert chunk.token_ids and chunk.start == self.done[chunk.request]
            self.done[chunk.request] += len(chunk.token_ids)
            assert self.done[chunk.request] <= self.lengths[chunk.request]
            if entry.phase == "decode":
                assert len(chunk.token_ids) == 1 and chunk.start >= 1
        self.steps.append((entry, list(chunks)))


def make_manifest(prefill: list[int], decode: list[int], seqs: int, length: int, blocks: int = 0) -> Any:
    entries = [GraphEntry(name=f"decode-{n}", phase="decode", bucket=n, request_rows=n) for n in decode]
    entries += [
        GraphEntry(name=f"prefill-{n}", phase="prefill", bucket=n, request_rows=seqs) for n in prefill
    ]
    per_request = -(-length // 128)
    return SimpleNamespace(
        graphs=entries,
        limits=SimpleNamespace(max_num_seqs=seqs, max_model_len=length),
        cache=SimpleNamespace(block_tokens=128, num_blocks=blocks or 1 + seqs * per_request),
    )


def run(manifest: Any, prompts: list[list[int]]) -> Recorder:
    recorder = Recorder(manifest)
    names = list(run_steps(recorder, manifest, prompts))
    assert sorted(names) == sorted(entry.name for entry in manifest.graphs)
    return recorder


@given(
    prefill=st.lists(st.integers(1, 40), min_size=1, max_size=3, unique=True),
    decode=st.lists(st.integers(1, 12), min_size=1, max_size=3, unique=True),
    seqs=st.integers(1, 9),
    length=st.integers(2, 300),
    data=st.data(),
)
def test_every_graph_runs_whatever_the_limits(
    prefill: list[int], decode: list[int], seqs: int, length: int, data: st.DataObject
) -> None:
    sizes = data.draw(st.lists(st.integers(1, min(length, 60)), min_size=1, max_size=12))
    blocks = data.draw(st.integers(1 - (-length // 128), 20))
    manifest = make_manifest(prefill, decode, seqs, length, blocks)
    recorder = run(manifest, [[7] * size for size in sizes])
    names = {entry.name for entry, _ in recorder.steps}
    assert names == {entry.name for entry in manifest.graphs}


def test_default_steps_meet_the_shapes_of_serving() -> None:
    manifest = make_manifest([16], [4], 8, 1024)
    lengths = default_lengths(window=16, block_tokens=128, max_model_len=1024)
    recorder = run(manifest, [[index] * length for index, length in enumerate(lengths)])
    prefills = [chunks for entry, chunks in recorder.steps if entry.phase == "prefill"]
    rows = [sum(len(chunk.token_ids) for chunk in chunks) for chunks in prefills]
    assert 16 in rows and min(rows) < 16, "whole buckets and padding rows"
    assert any(len(chunks) > 2 for chunks in prefills), "several requests share a step"
    started = list(itertools.chain(*prefills))
    assert any(chunk.start % 2 for chunk in started), "a chunk goes on inside an open group"
    assert any(chunk.start and len(chunks) > 1 for chunks in prefills for chunk in chunks)
    assert any(
        [chunk.request for chunk in chunks] != sorted(chunk.request for chunk in chunks)
        for chunks in prefills
    )
    assert any(chunk.start > 128 for chunk in started), "beyond a block of the cache"
    decodes = [chunks for entry, chunks in recorder.steps if entry.phase == "decode"]
    assert {len(chunks) for chunks in decodes} >= {3, 4}, "full batches and padding rows"
    positions = {chunk.start for chunks in decodes for chunk in chunks}
    assert set(range(1, 1 + DECODE_STEPS)) <= positions and max(positions) > 128


def test_a_wide_decode_graph_gets_all_its_rows() -> None:
    recorder = run(make_manifest([16], [12], 12, 64), [[1, 2, 3, 4, 5]])
    assert max(len(chunks) for entry, chunks in recorder.steps if entry.phase == "decode") == 12


def test_prompts_of_the_full_length_still_leave_something_to_decode() -> None:
    recorder = run(make_manifest([16], [4], 4, 20), [[1] * 20])
    assert any(entry.phase == "decode" for entry, _ in recorder.steps)


def test_default_lengths_fit_short_models() -> None:
    assert default_lengths(16, 128, 2) == [1]
    assert max(default_lengths(16, 128, 30)) == 22
