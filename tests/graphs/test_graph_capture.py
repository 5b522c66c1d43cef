"""Captured graphs, run as they are on real tensors, against the eager step; what a capture holds."""

import pytest
import torch
from golden import rms_ratio
from graph_steps import (
    Chunk,
    Request,
    decode_inputs,
    differing_records,
    ragged_inputs,
    random_tokens,
    same_bytes,
)
from torch._subclasses.fake_tensor import FakeTensor
from torch.export.graph_signature import InputKind, OutputKind

from deepinfer.errors import CaptureError
from deepinfer.graphs.cache_layout import cache_layout
from deepinfer.graphs.capture import (
    GraphSpec,
    buffer_name,
    capture,
    example_inputs,
    example_regions,
    residual_taps,
    weight_name,
)
from deepinfer.graphs.eager import pad_rows
from deepinfer.graphs.records import PRECISIONS
from deepinfer.graphs.rows import StepInputs
from deepinfer.graphs.store import store_specs
from deepinfer.kernels import native

MAX_MODEL_LEN = 128
NUM_SEQS = 4


@pytest.fixture(scope="module", autouse=True)
def op_library():
    """The op library of this machine; a trace records calls to what it registers."""
    return native.load_host_library()


@pytest.fixture(scope="module")
def layouts(config):
    return {
        name: cache_layout(config, name, max_num_seqs=NUM_SEQS, max_model_len=MAX_MODEL_LEN)
        for name in PRECISIONS
    }


@pytest.fixture(scope="module")
def programs(config, layouts):
    """Captures by (phase, precision), each made once."""
    specs = {
        ("prefill", "float32"): GraphSpec("prefill", 8, 3, taps=True),
        ("decode", "native"): GraphSpec("decode", 4, 4),
        ("logits", "native"): GraphSpec("logits", 4, 0),
    }
    weights = store_specs(config, MAX_MODEL_LEN)
    return {
        key: (spec, capture(spec, config, PRECISIONS[key[1]], layouts[key[1]], weights))
        for key, spec in specs.items()
    }


def run(program, weights, arguments):
    """Run a captured graph on real weights and return its outputs; cache regions are mutated in place."""
    signature, user, feed = program.graph_signature, iter(arguments), []
    for spec in signature.input_specs:
        if spec.kind is InputKind.BUFFER:
            feed.append(weights[weight_name(spec.target)])
        else:
            assert spec.kind is InputKind.USER_INPUT
            feed.append(next(user))
    assert next(user, None) is None
    assert {spec.kind for spec in signature.output_specs} == {OutputKind.USER_OUTPUT}
    with torch.no_grad():
        return program.graph_module(*feed)


def test_a_captured_prefill_equals_the_eager_step(config, weights, new_model, programs):
    """Float32, residuals included: two requests, one of them with history, and two padding rows."""
    spec, program = programs["prefill", "float32"]
    model = new_model("float32", max_num_seqs=NUM_SEQS, max_model_len=MAX_MODEL_LEN)
    old, new = Request(random_tokens(23, 1), 3, (4,)), Request(random_tokens(3, 2), 1, (2,))
    model.step("prefill", ragged_inputs([Chunk(old, 0, 20)], model.layout))
    chunks = [Chunk(old, 20, 3), None, Chunk(new, 0, 3)]
    inputs = ragged_inputs(chunks, model.layout, padding_rows=2)
    caches = {name: cache.clone() for name, cache in model.caches.items()}
    before = {name: cache.clone() for name, cache in caches.items()}
    outputs = run(program, weights, [*inputs, *caches.values()])

    taps = {}

    def keep(layer, name, value):
        taps[layer, name] = value
        return value

    hidden = model.step("prefill", inputs, keep)
    expected = [hidden, *(taps[tap] for tap in residual_taps(config))]
    assert len(outputs) == 1 + len(residual_taps(config)) == 1 + 8 * 2 + 2
    for output, value in zip(outputs, expected, strict=True):
        assert output.dtype == torch.float32
        assert torch.allclose(output[:6], value[:6], rtol=1e-4, atol=2e-5)
    for name, cache in model.caches.items():
        assert not same_bytes(caches[name][1:], before[name][1:]), name
        assert torch.allclose(caches[name][1:], cache[1:], rtol=1e-4, atol=2e-5), name
    assert spec.name == "prefill-8"


def test_a_captured_decode_is_close_to_the_eager_step(weights, new_model, programs):
    """Native: sums in another order may flip a bit, which later quantisers amplify (spec 21.2 item 3)."""
    _, program = programs["decode", "native"]
    model = new_model("native", max_num_seqs=NUM_SEQS, max_model_len=MAX_MODEL_LEN)
    first, second = Request(random_tokens(31, 3), 2, (3,)), Request(random_tokens(8, 4), 4, (1,))
    for request in (first, second):
        count = len(request.token_ids) - 1
        model.step("prefill", ragged_inputs([Chunk(request, 0, count)], model.layout))
    inputs = decode_inputs([Chunk(second, 7, 1), None, Chunk(first, 30, 1)], model.layout)
    inputs = pad_rows(inputs, 1, pad_table=True)
    caches = {name: cache.clone() for name, cache in model.caches.items()}
    outputs = run(program, weights, [*inputs, *caches.values()])
    hidden = model.step("decode", inputs)
    assert [(output.shape, output.dtype) for output in outputs] == [(hidden.shape, torch.bfloat16)]
    assert rms_ratio(outputs[0][[0, 2]], hidden[[0, 2]]) <= 0.15
    # the first layer sees nothing but embeddings: what it and the history write is equal to the byte
    exact = ["layers.0.window", "token_history"]
    got = {name: caches[name][1:] for name in exact}
    assert not differing_records(got, {name: model.caches[name][1:] for name in exact})


def test_captured_logits_equal_the_eager_ones(config, weights, new_model, programs):
    _, program = programs["logits", "native"]
    hidden = torch.randn(4, config.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    (logits,) = run(program, weights, [hidden])
    assert torch.allclose(logits, new_model().logits(hidden), rtol=1e-5, atol=1e-5)


def test_a_capture_names_weights_and_holds_none(config, programs):
    """Every weight is a lifted buffer without data, and no other tensor came along."""
    specs = store_specs(config, MAX_MODEL_LEN)
    for (phase, _), (_, program) in programs.items():
        assert all(isinstance(value, FakeTensor) for value in program.state_dict.values())
        assert not program.constants
        lifted = {
            weight_name(spec.target)
            for spec in program.graph_signature.input_specs
            if spec.kind is InputKind.BUFFER
        }
        assert lifted == ({"head"} if phase == "logits" else specs.keys() - {"head"})


def test_names_of_weights_and_attributes_are_one_to_one(config):
    names = list(store_specs(config, MAX_MODEL_LEN))
    assert [weight_name(buffer_name(name)) for name in names] == names
    assert all("." not in buffer_name(name) for name in names)


@pytest.mark.parametrize("precision", ["native", "float32"])
def test_example_regions_have_the_strides_of_their_arena(layouts, precision):
    layout = layouts[precision]
    views = example_regions(layout)
    for region, view in zip(layout.regions, views, strict=True):
        count = layout.num_blocks if region.kind == "paged" else layout.num_slots
        assert view.shape == (count, region.entries, *region.record_shape)
        assert view.stride() == layout.strides(region)
    assert len({view.untyped_storage().data_ptr() for view in views}) == len(views)


def test_example_inputs_are_padding(layouts):
    spec = GraphSpec("prefill", 8, 3)
    inputs = StepInputs(*example_inputs(spec, layouts["native"]))
    assert inputs.positions.tolist() == [-1] * 8
    assert not inputs.block_table.any()
    assert {tensor.dtype for tensor in inputs} == {torch.int64}
    assert (len(inputs.token_ids), len(inputs.slot_ids)) == (8, 3)


def test_what_cannot_be_traced_is_named(config, layouts):
    """A tensor that does not fit its place fails in the trace, not in a compiled graph."""
    specs = store_specs(config, MAX_MODEL_LEN)
    specs["layers.0.attn.attn_sink"] = ((3,), torch.float32)
    with pytest.raises(CaptureError, match="tracing failed") as failure:
        capture(GraphSpec("decode", 2, 2), config, PRECISIONS["native"], layouts["native"], specs)
    assert "decode-2" in str(failure.value)
