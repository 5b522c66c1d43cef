"""Matrices dequantised once for all steps: the same bytes as dequantised at every call, within a budget."""

import pytest
import torch
from graph_steps import Chunk, Request, decode_inputs, make_model, ragged_inputs, random_tokens, same_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.graphs.store import dequantized_store

EVERYTHING = 1 << 30


def added_bytes(store, plain):
    """Bytes of the tensors that are not those of the plain store."""
    return sum(tensor.nbytes for name, tensor in store.items() if tensor is not plain[name])


def quantized_matrices(store):
    return {name for name in store if name.removesuffix("weight") + "scale" in store and "weight" in name}


def logits_of(config, weights, precision):
    """Logits of a prefill and two decode steps of two requests, and what the caches hold then."""
    model = make_model(config, weights, precision, max_num_seqs=2)
    requests = [Request(random_tokens(21, 3), 1, (1, 2)), Request(random_tokens(9, 4), 2, (3, 4))]
    chunks = [Chunk(request, 0, len(request.token_ids) - 2) for request in requests]
    found = [model.logits(model.step("prefill", ragged_inputs(chunks, model.layout)))]
    for back in (2, 1):
        rows = [Chunk(request, len(request.token_ids) - back, 1) for request in requests]
        found.append(model.logits(model.step("decode", decode_inputs(rows, model.layout))))
    return [torch.cat(found), *model.caches.values()]


@pytest.mark.parametrize("precision", ["native", "float32"])
def test_steps_give_the_same_bytes(config, weights, precision):
    everything = dequantized_store(weights, EVERYTHING)
    assert not quantized_matrices(everything), "all were dequantised"
    half = dequantized_store(weights, added_bytes(everything, weights) // 2)
    assert 0 < len(quantized_matrices(half)) < len(quantized_matrices(weights))
    want = logits_of(config, weights, precision)
    for store in (everything, half):
        got = logits_of(config, store, precision)
        assert all(same_bytes(a, b) for a, b in zip(got, want, strict=True))


def test_the_dequantised_matrix_is_the_one_that_is_used(config, weights):
    store = dequantized_store(weights, EVERYTHING)
    store["layers.3.ffn.experts.w2.weight"] *= 2
    assert not same_bytes(logits_of(config, store, "native")[0], logits_of(config, weights, "native")[0])


@given(share=st.floats(0, 1.1))
@settings(max_examples=12, deadline=None)
def test_a_budget_is_respected_and_used(weights, share):
    total = added_bytes(dequantized_store(weights, EVERYTHING), weights)
    budget = int(share * total)
    store = dequantized_store(weights, budget)
    used = added_bytes(store, weights)
    assert used <= budget
    left = quantized_matrices(store)
    values = {name: 2 if ".experts." in name else 1 for name in left}
    assert all(4 * values[name] * weights[name].numel() > budget - used for name in left), "another would fit"
    for name in left:
        assert store[name] is weights[name]
        scale = name.removesuffix("weight") + "scale"
        assert store[scale] is weights[scale]


def test_dense_matrices_come_before_experts(weights):
    dense = [name for name in quantized_matrices(weights) if ".ffn.experts." not in name]
    store = dequantized_store(weights, 4 * sum(weights[name].numel() for name in dense))
    assert {name for name in dense if store[name].dtype != torch.float32} == set()
    assert all(".ffn.experts." in name for name in quantized_matrices(store))


def test_an_unquantised_store_stays_as_it_is(weights):
    once = dequantized_store(weights, EVERYTHING)
    again = dequantized_store(once, EVERYTHING)
    assert list(again) == list(once) and all(again[name] is once[name] for name in once)
