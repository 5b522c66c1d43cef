"""A whole step on native operations: close to the eager model, and the same bytes however it is cut."""

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from golden import Golden
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
from torch import Tensor

from deepinfer.graphs.cache_layout import cache_layout
from deepinfer.graphs.checkpoint import Checkpoint
from deepinfer.graphs.config import ModelConfig
from deepinfer.graphs.eager import EagerModel
from deepinfer.graphs.records import PRECISIONS
from deepinfer.graphs.store import build_store, store_specs
from deepinfer.kernels.native import load_host_library

LENGTH = 150


@pytest.fixture(scope="module")
def packed(golden_dir: Path, config: ModelConfig) -> dict[str, Tensor]:
    load_host_library()
    return build_store(Checkpoint(golden_dir, config), config, 256, packed=True)


@pytest.fixture
def native_model(config: ModelConfig, packed: dict[str, Tensor]) -> Callable[..., EagerModel]:
    def make(precision: str, max_num_seqs: int = 1) -> EagerModel:
        layout = cache_layout(config, precision, max_num_seqs=max_num_seqs, max_model_len=256)
        return EagerModel(config, PRECISIONS[precision], packed, layout, native_ops=True)

    return make


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def run_in_chunks(
    model: EagerModel, request: Request, counts: list[int], *, padding: int = 0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of all tokens and what the caches hold after them; what is left after `counts` is decoded."""
    total, start, hidden = len(request.token_ids), 0, []
    for count in counts:
        inputs = ragged_inputs([Chunk(request, start, count)], model.layout, padding_rows=padding)
        hidden.append(model.step("prefill", inputs)[:count])
        start += count
    for position in range(start, total):
        chunks = [Chunk(request, position, 1), *[None] * padding]
        hidden.append(model.step("decode", decode_inputs(chunks, model.layout))[:1])
    return model.logits(torch.cat(hidden)), records_of(model, request, total)


def test_packed_specs_are_those_of_the_packed_store(config, packed):
    specs = store_specs(config, 256, packed=True)
    assert {name: (tuple(value.shape), value.dtype) for name, value in packed.items()} == specs
    assert specs != store_specs(config, 256)


def test_float32_logits_are_close_to_the_eager_model(golden: Golden, new_model, native_model):
    for case in ("n9", "n40", "n97"):
        tokens = golden.tokens(case)
        inputs = ragged_inputs([Chunk(Request(tokens), 0, len(tokens))], native_model("float32").layout)
        got, want = (
            model.logits(model.step("prefill", inputs))
            for model in (native_model("float32"), new_model("float32"))
        )
        assert (got - want).abs().max() <= 1e-4, case


@pytest.mark.parametrize("precision", ["native", "float32"])
def test_chunks_decode_and_padding_give_the_same_bytes(native_model, precision, threads):
    """One shot, chunks, token by token, and padded rows: logits and cache records."""
    request = Request(random_tokens(LENGTH, seed=11), blocks=(1, 2))
    want_logits, want_records = run_in_chunks(native_model(precision), request, [LENGTH])
    rng = random.Random(precision)
    cuts = [sorted(rng.sample(range(1, LENGTH), 5)) for _ in range(2)]
    plans = [[b - a for a, b in itertools.pairwise([0, *cut, LENGTH])] for cut in cuts]
    for counts, padding in ((plans[0], 0), (plans[1], 3), ([100], 0), ([1], 2)):
        logits, records = run_in_chunks(native_model(precision), request, counts, padding=padding)
        assert same_bytes(logits, want_logits), counts
        assert not differing_records(records, want_records), counts


@pytest.mark.parametrize("precision", ["native", "float32"])
def test_requests_side_by_side_give_the_bytes_of_each_alone(native_model, precision, threads):
    lengths, count = (37, 70, 5, 64), 4
    requests = [
        Request(random_tokens(length, seed=length), slot=line + 1, blocks=(2 * line + 1, 2 * line + 2))
        for line, length in enumerate(lengths)
    ]
    together = native_model(precision, max_num_seqs=count)
    hidden: list[list[Tensor]] = [[] for _ in requests]
    first = [length // 2 for length in lengths]
    chunks = [Chunk(request, 0, start) for request, start in zip(requests, first, strict=True)]
    for line, part in enumerate(
        together.step("prefill", ragged_inputs(chunks, together.layout)).split(first)
    ):
        hidden[line].append(part)
    for offset in range(max(lengths)):
        running = [line for line in range(count) if first[line] + offset < lengths[line]]
        if not running:
            break
        steps = [Chunk(requests[line], first[line] + offset, 1) for line in running]
        for line, row in zip(
            running, together.step("decode", decode_inputs(steps, together.layout)), strict=True
        ):
            hidden[line].append(row.unsqueeze(0))
    for line, request in enumerate(requests):
        alone = native_model(precision, max_num_seqs=count)
        logits, records = run_in_chunks(alone, request, [lengths[line]])
        assert same_bytes(together.logits(torch.cat(hidden[line])), logits)
        assert not differing_records(records_of(together, request, lengths[line]), records)


@pytest.mark.parametrize("precision", ["native", "float32"])
def test_padding_rows_change_nothing_but_what_nobody_owns(native_model, precision):
    model = native_model(precision)
    request = Request(random_tokens(20, seed=3))
    model.step("prefill", ragged_inputs([Chunk(request, 0, 20)], model.layout))
    before = {name: cache.clone() for name, cache in model.caches.items()}
    model.step("decode", decode_inputs([None] * 4, model.layout))
    model.step("prefill", ragged_inputs([None], model.layout, padding_rows=16))
    for name, cache in model.caches.items():
        assert same_bytes(cache[1:], before[name][1:]), name
